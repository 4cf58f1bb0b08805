"""A module run with gradients, and the truth beside it in float64: what both need."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from normwise.errors import NotKnown
from normwise.graph.capture import tensors_in
from normwise.rendering import both

__all__ = [
    "SAME_FORWARD",
    "Truth",
    "Watch",
    "differentiable",
    "distance",
    "distinct",
    "has_function",
    "largest_error",
    "leaf_of",
    "refuses",
]

# The forward must be the recorded one before its gradient is judged; half precision rounds at every op
SAME_FORWARD = {torch.float16: 3e-2, torch.bfloat16: 1e-1, torch.float32: 1e-3, torch.float64: 1e-6}
# A gradient smaller than this share of the largest is a cancellation (a bias in front of a centring norm): rounding
_NEGLIGIBLE = 1e-3
_REFUSAL = "torch::autograd::Error"  # torch's node that raises when it is differentiated


@dataclass
class Truth:
    """The holder in float64."""

    core: torch.Tensor
    outputs: list[torch.Tensor]
    pairs: list[tuple[torch.Tensor, torch.Tensor]]  # of the live run, here
    opaque: bool

    def leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for an input or a parameter of the live run."""
        return next(mine for theirs, mine in self.pairs if theirs is tensor)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the output that a live output is, told by shape and nearness."""
        same = [o for o in self.outputs if o.shape == tensor.shape and o.requires_grad]
        if not same:
            raise NotKnown(both("the norm run by itself gives other outputs", "单独运行时该归一化给出不同的输出"))
        return min(same, key=lambda o: distance(tensor, o))

    def gradients(
        self, outputs: list[torch.Tensor], wanted: list[torch.Tensor], directions: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the true gradients of what the live run differentiates by."""
        mine = {id(a): b for a, b in self.pairs}
        leaves = [mine.get(id(t)) for t in wanted]
        known = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(outputs, known, [d.double() for d in directions], allow_unused=True))
        return [None if leaf is None else next(found) for leaf in leaves]


class Watch(TorchDispatchMode):
    """Sees whether a value is computed with autograd switched off."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value, self.untracked = value.detach(), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        tensor = isinstance(output, torch.Tensor) and output.dtype in SAME_FORWARD
        if tensor and not torch.is_grad_enabled() and output.shape == self.value.shape:
            self.untracked |= distance(output, self.value) < SAME_FORWARD[output.dtype]
        return output


def has_function(outputs: list[torch.Tensor]) -> bool:
    """Whether autograd's graph holds exactly one backward written by hand (more could not be told apart)."""
    written = [
        isinstance(n, torch.autograd.function.BackwardCFunction) or "CppNode" in n.name() for n in _history(outputs)
    ]
    return sum(written) == 1


def refuses(gradient: torch.Tensor) -> bool:
    """Whether a gradient says that it cannot be differentiated again, as `once_differentiable` makes it."""
    return any(n.name() == _REFUSAL for n in _history([gradient]))


def _history(outputs: list[torch.Tensor]) -> Iterator[Any]:
    """Yield the nodes of autograd's graph behind some tensors, each once."""
    seen, pending = set(), [t.grad_fn for t in outputs]
    while pending:
        node: Any = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(n for n, _ in node.next_functions)


def distance(made: torch.Tensor, true: torch.Tensor) -> float:
    """Return the relative difference of two tensors; inf where one is not finite."""
    a, b = made.detach().double().cpu(), true.detach().double().cpu()
    scale = float(b.norm())
    apart = float((a - b).norm())
    return apart / scale if scale > 0 and math.isfinite(apart) else (0.0 if apart == 0 else math.inf)


def largest_error(
    names: list[str], made: Iterable[torch.Tensor | None], true: Iterable[torch.Tensor | None]
) -> tuple[float, str]:
    """Return the largest relative error of gradients and the name it belongs to; one that is missing is infinite."""
    rows = [(n, a, b) for n, a, b in zip(names, made, true, strict=True) if b is not None]
    sizes = [float(b.detach().double().square().mean().sqrt()) for _, _, b in rows]
    floor = _NEGLIGIBLE * max(sizes, default=0.0)
    worst, of = 0.0, ""
    for (name, a, b), size in zip(rows, sizes, strict=True):
        if size <= floor:
            continue
        apart = math.inf if a is None else distance(a, b)
        if apart > worst:
            worst, of = apart, name
    return worst, of


def leaf_of(tensor: torch.Tensor, *, grad: bool | None = None) -> torch.Tensor:
    """Return a float64 leaf that stands for a tensor."""
    if not tensor.is_floating_point():
        return tensor.detach()
    wanted = tensor.requires_grad if grad is None else grad
    return tensor.detach().double().requires_grad_(wanted)


def differentiable(tree: Any) -> Any:
    """Return arguments whose floating tensors are leaves that ask for a gradient."""
    copies: dict[int, torch.Tensor] = {}

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copy = tensor.detach().clone()
            copies[id(tensor)] = copy.requires_grad_() if copy.is_floating_point() else copy
        return copies[id(tensor)]

    return tree_map_only(torch.Tensor, leaf, tree)


def distinct(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a nest, each once."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors_in(tree):
        found.setdefault(id(tensor), tensor)
    return list(found.values())
