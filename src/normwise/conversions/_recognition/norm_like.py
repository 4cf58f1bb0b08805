"""Which modules may be norms, what forbids to replace one, and copies of them to look at: no class name is read."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from normwise.conversions._apply import tensors_of
from normwise.conversions._edits import CALL_HOOKS
from normwise.conversions._recognition.layers import Then
from normwise.errors import NoNorm, NotKnown
from normwise.layers._convention_probe import quiet
from normwise.layers._norm_module import NormModule

__all__ = ["HOOKS", "bare", "children_after", "further_arguments", "may_be_norm", "obstacle"]

HOOKS = (
    *CALL_HOOKS,
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_MOST_TENSORS = 5  # gain, shift, running mean and variance, count
_CONTRACTIONS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "embedding", "_embedding_bag")
)
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)  # a fake one stands for a plain one of a large model
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def may_be_norm(module: nn.Module) -> bool:
    """Return whether a module holds no more than norms do: vectors of one length, children without tensors.

    Raises:
        NotKnown: one of torch's norms that has no tensors yet.
    """
    if any(map(is_lazy, tensors_of(module).values())):
        if isinstance(module, _NormBase):
            raise NotKnown("it has no channels yet; run one batch first")
        return False
    if not parametrize.is_parametrized(module) and any(tensors_of(child) for child in module.children()):
        return False
    held = list(tensors_of(module).values())
    sizes = {tensor.numel() for tensor in held if tensor.numel() > 1 and tensor.is_floating_point()}
    if len(sizes) > 1 or len(held) > _MOST_TENSORS:
        return False
    matrices = [tensor for tensor in held if sum(size > 1 for size in tensor.shape) > 1]
    return not matrices or _is_pointwise(module, matrices[0].shape)


class _Watch(TorchDispatchMode):
    """Notes whether anything is a matrix product, a convolution or a look-up."""

    def __init__(self) -> None:
        super().__init__()
        self.contracts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.contracts |= func.overloadpacket.__name__ in _CONTRACTIONS
        return func(*args, **(kwargs or {}))


def _is_pointwise(module: nn.Module, shape: torch.Size) -> bool:
    """Return whether a module whose parameter has several axes multiplies by it element by element.

    Tried without storage: such parameters are large where they are the matrices of linear maps and convolutions.
    """
    memo: dict[int, Any] = {}
    for tensor in tensors_of(module).values():
        made = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
    for leading in ((2, 3), (3,), ()):
        watch = _Watch()
        try:
            copied = copy.deepcopy(module, memo)
            with watch, quiet():
                y = copied(torch.empty(*leading, *shape, device="meta"))
        except Exception:  # the user's code may refuse this shape in any way
            continue
        return isinstance(y, torch.Tensor) and y.shape == (*leading, *shape) and not watch.contracts
    return False


def obstacle(module: nn.Module) -> str | None:
    """Return what forbids to put another module in a module's place, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by TorchScript; convert the model before it is scripted"
    if parametrize.is_parametrized(module):
        return "a tensor of it is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    if any(not isinstance(hook, Then) for name in HOOKS for hook in getattr(module, name).values()):
        return "hooks are registered on it and would be lost; register them after the conversion"
    if "forward" in vars(module):
        return "its forward was replaced on the instance; convert the model before it is wrapped"
    for name, tensor in tensors_of(module).items():
        if type(tensor) not in _PLAIN:
            return (
                f"its {name} is a {type(tensor).__name__}, not a plain tensor; convert the model before it is sharded"
            )
        if tensor.dtype not in _FLOATS and tensor.ndim:
            dtype = str(tensor.dtype).removeprefix("torch.")
            return f"its {name} holds {dtype} numbers; convert the model before it is quantized"
    return None


def children_after(module: nn.Module) -> tuple[str, ...]:
    """Return the children that a fused norm may apply to its value, in order."""
    return () if parametrize.is_parametrized(module) else tuple(module._modules)


def further_arguments(module: nn.Module, known: int) -> Iterator[str]:
    """Yield what a forward takes beyond its first arguments; our layers have theirs in common."""
    if not isinstance(module, NormModule):
        yield from list(inspect.signature(module.forward).parameters)[known:]


def bare(module: nn.Module, *, alone: bool) -> nn.Module:
    """Return a copy in float32 on the CPU, in eval mode, its tensors filled with numbers of ours.

    Args:
        module: is not changed; its tensors are not copied and need no storage.
        alone: without its activation.

    Raises:
        NoNorm: it cannot be copied.
    """
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for tensor in tensors_of(module).values():
        if tensor.is_floating_point() or tensor.ndim:  # numbers of a quantized gain as well
            made = torch.rand(tensor.shape, generator=generator) + 0.5
        else:
            made = torch.zeros(tensor.shape, dtype=tensor.dtype)
        memo[id(tensor)] = nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:  # the user's code may refuse to be copied in any way
        raise NoNorm(f"it cannot be copied: {type(error).__name__}: {str(error)[:120]}") from error
    for each in copied.modules():
        vars(each).pop("forward", None)  # one put on the instance calls the original
        for name in HOOKS:
            hooks = getattr(each, name)
            for key in [key for key, hook in hooks.items() if alone or not isinstance(hook, Then)]:
                del hooks[key]
    if alone:
        copied._modules.update({name: nn.Identity() for name in children_after(copied)})
    return copied.eval()
