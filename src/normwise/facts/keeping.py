"""Lets the user's own code train and evaluate, and puts everything back that it touched.

``graph.guard.as_found`` protects a model while it is only called. A training step does more: it writes parameters
and gradients in place, steps optimizers, schedulers and loss scalers, and uses other modules (a generator beside the
discriminator). Those that the code can reach are saved before it runs, any other module at its first call and any
other optimizer at its first step.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from normwise.errors import NotKnown
from normwise.graph.guard import as_found, uncounted
from normwise.rendering import both

__all__ = ["kept"]

# copies of parameters, gradients and optimizer states that are made at most, as for the hash of a whole model
_BYTES = 4 * 2**30
# containers longer than this are data, not state: their items are not looked into
_ITEMS = 10_000
# elements of a loose tensor that is copied; larger ones are data. Parameters and optimizer states have no such limit
_ELEMENTS = 2**22
# torch's own objects that hold the state of a training run; a gradient scaler of the CPU is one of torch.amp
_STATEFUL = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_FOREIGN = ("builtins", "torch", "numpy", "normwise", "typing", "collections", "functools", "_thread", "threading")


@contextmanager
def kept(model: nn.Module, reached: Iterable[Any] = (), inputs: Any = ()) -> Iterator[None]:
    """Run a block that may train the model, and undo everything afterwards, also after an exception or Ctrl-C.

    Args:
        model: the module to protect.
        reached: whatever else the block uses: functions, optimizers, schedulers, modules.
        inputs: arguments of the model's calls.

    Raises:
        NotKnown: a parameter is of a kind that cannot be copied back, or all of them are too large to copy.
    """
    _refuse(model)
    keeper = _Keeper()
    hooks = []
    try:
        with ExitStack() as inner, as_found(model, evaluate=None, inputs=inputs):
            keeper.inner = inner
            keeper.own(model)
            for item in reached:
                keeper.save(item)
            hooks.append(register_module_forward_pre_hook(lambda module, _: keeper.save(module)))
            hooks.append(register_optimizer_step_pre_hook(lambda optimizer, *_: keeper.save(optimizer)))
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
    finally:
        keeper.restore()


def _refuse(model: nn.Module) -> None:
    tensors = [*model.parameters(), *model.buffers()]
    odd = next((t for t in tensors if type(t) not in _PLAIN or t.device.type == "meta"), None)
    if odd is not None:
        kind = "meta" if odd.device.type == "meta" else type(odd).__name__
        raise NotKnown(both(f"cannot be run: it holds {kind} tensors", f"无法运行：其中有 {kind} 张量"))
    if sum(t.numel() * t.element_size() for t in tensors) > _BYTES:
        raise NotKnown(both("the model is too large to be copied and put back", "模型太大，无法复制后再恢复原状"))


class _Keeper:
    """What is put back, found by walking from what the user's code can reach."""

    def __init__(self) -> None:
        self.inner = ExitStack()
        self._state = False  # within an optimizer: every tensor counts
        self._seen: dict[int, Any] = {}  # held, so that the ids stay taken
        self._undo: list[Callable[[], object]] = []

    def restore(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def own(self, module: nn.Module) -> None:
        """Save a module that ``as_found`` protects: what that leaves out is what is written in place."""
        for child in module.modules():
            self._new(child)
        for parameter in module.parameters():
            self._tensor(parameter)
            if parameter.grad is not None:
                self._tensor(parameter.grad, whole=True)
        for buffer in module.buffers():
            self._tensor(buffer, whole=True)

    def save(self, item: Any) -> None:
        """Save one object and what it holds."""
        if isinstance(item, _ATOMS) or id(item) in self._seen:
            return
        if isinstance(item, nn.Module):
            self._module(item)
        elif isinstance(item, torch.Tensor):
            self._tensor(item)
        elif isinstance(item, dict | list | set):
            self._container(item)
        elif isinstance(item, tuple):
            self._each(item)
        elif isinstance(item, types.FunctionType | types.MethodType | functools.partial):
            self._new(item)
            self._each(_reachable(item))
        elif isinstance(item, torch.Generator):
            self._new(item)
            self._undo.append(functools.partial(item.set_state, item.get_state()))
        elif isinstance(item, _STATEFUL) or _is_users(item):
            self._new(item)
            outer, self._state = self._state, isinstance(item, _STATEFUL)
            self.save(item.__dict__)
            self._state = outer

    def _module(self, module: nn.Module) -> None:
        try:
            # the process is the outer guard's: this one begins while the hooks of ``kept`` are in place
            self.inner.enter_context(as_found(module, evaluate=None, process=False))
            self.own(module)
        except Exception as error:  # its parameters cannot be listed or copied: nor can they be put back
            kind = type(module).__name__
            raise NotKnown(both(f"a {kind} cannot be put back: {error}", f"{kind} 无法恢复原状：{error}")) from error

    def _each(self, items: Iterable[Any]) -> None:
        for item in items:
            self.save(item)

    def _new(self, item: Any) -> bool:
        fresh = id(item) not in self._seen
        self._seen[id(item)] = item
        return fresh

    def _tensor(self, tensor: torch.Tensor, *, whole: bool = False) -> None:
        if not self._new(tensor) or type(tensor) not in _PLAIN or tensor.device.type == "meta":
            return
        if tensor.numel() > _ELEMENTS and not (whole or self._state or isinstance(tensor, nn.Parameter)):
            return
        if tensor.layout is not torch.strided or tensor.is_inference():
            return
        copy, count_kept = tensor.detach().clone(), uncounted(tensor)

        def undo() -> None:
            with count_kept, torch.no_grad():
                if tensor.shape != copy.shape or not torch.equal(tensor.detach(), copy):
                    tensor.detach().copy_(copy)

        self._undo.append(undo)
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            self._gradient(tensor)

    def _gradient(self, tensor: torch.Tensor) -> None:
        if not tensor.is_leaf:
            return
        grad = tensor.grad

        def undo() -> None:
            if tensor.grad is not grad:
                tensor.grad = grad

        self._undo.append(undo)
        if grad is not None:
            self._tensor(grad, whole=True)

    def _container(self, item: Any) -> None:
        self._new(item)
        items = dict(item) if isinstance(item, dict) else list(item)

        def undo() -> None:
            if not _same(item, items):
                item.clear()
                item.extend(items) if isinstance(item, list) else item.update(items)

        self._undo.append(undo)
        if len(items) <= _ITEMS:
            if isinstance(items, dict):
                self._each(tuple(items))
            self._each(items.values() if isinstance(items, dict) else items)


def _same(container: Any, items: Any) -> bool:
    """Compare by identity: tensors have no truth value."""
    if len(container) != len(items):
        return False
    if isinstance(items, dict):
        return all(k in container and container[k] is v for k, v in items.items())
    return all(a is b for a, b in zip(container, items, strict=True))


def _is_users(item: Any) -> bool:
    """Whether an object is of the user's own making, with plain attributes: a trainer, a counter."""
    kind = type(item)
    plain = type(getattr(item, "__dict__", None)) is dict
    return plain and not isinstance(item, type) and kind.__module__.partition(".")[0] not in _FOREIGN


def _reachable(function: Any) -> Iterator[Any]:
    """Yield what a function can change without being given it."""
    if isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
        return
    if isinstance(function, types.MethodType):
        yield from (function.__self__, function.__func__)
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that was never bound
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    used = (function.__globals__.get(name) for name in function.__code__.co_names)
    yield from (g for g in used if not isinstance(g, types.ModuleType | type))


_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, types.ModuleType)
