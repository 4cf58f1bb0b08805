"""Watches a run of the user's code: calls of norms, forwards, backward passes, steps, buffers, collectives."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from normwise.facts.running import BatchStatistics, measured
from normwise.graph.capture import tensors_in

__all__ = ["Change", "NormEvent", "Watch"]

_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "barrier",
)
# calls of one norm whose buffers and inputs are kept: two passes, recomputed each, and room for one more
_KEPT_CALLS = 5


@dataclass(slots=True, kw_only=True)
class NormEvent:
    """One call of one module that keeps running statistics or executes a norm."""

    path: str
    training: bool  # the module's own flag
    grad: bool  # gradients were recorded
    recomputed: bool  # it ran inside a backward pass: activation checkpointing
    forward: int  # forwards of the whole model begun before it
    shape: tuple[int, ...] = ()  # of its input
    per_channel: int | None = None  # values under one running statistic
    updated: bool = False  # it wrote its own buffers
    rewritten: bool = False  # something else wrote them since its last call
    before: dict[str, torch.Tensor] = field(default_factory=dict)  # its buffers
    after: dict[str, torch.Tensor] = field(default_factory=dict)
    batch: BatchStatistics | None = None  # of its input, by channel


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one buffer was before and after."""

    before: torch.Tensor
    after: torch.Tensor

    @property
    def largest(self) -> float:
        """The largest change of an element; infinite where it became NaN or changed its shape."""
        if self.before.shape != self.after.shape:
            return float("inf")
        return float((self.after.double() - self.before.double()).abs().nan_to_num(nan=float("inf")).max())


@dataclass(slots=True)
class Watch:
    """What happened while it was on."""

    norms: list[NormEvent] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0
    steps: int = 0
    collectives: list[str] = field(default_factory=list)
    changed: dict[str, Change] = field(default_factory=dict)  # by path of the buffer
    modes_before: dict[str, bool] = field(default_factory=dict)
    modes_after: dict[str, bool] = field(default_factory=dict)
    _open: list[NormEvent] = field(default_factory=list)
    _versions: dict[str, list[int]] = field(default_factory=dict)
    _calls: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def on(self, model: nn.Module, paths: Collection[str] = ()) -> Iterator[None]:
        """Watch a block.

        Args:
            model: whose forwards and buffers are watched.
            paths: of modules that execute norms, besides those that hold running statistics.
        """
        self.modes_before = {path: m.training for path, m in model.named_modules()}
        buffers = {path: (b, b.detach().clone()) for path, b in model.named_buffers() if b.numel()}
        with ExitStack() as stack:
            stack.enter_context(self._patched())
            for handle in self._hooks(model, paths):
                stack.callback(handle.remove)
            try:
                yield
            finally:
                self.modes_after = {path: m.training for path, m in model.named_modules()}
                now = dict(model.named_buffers())
                for path, (buffer, before) in buffers.items():
                    after = now.get(path, buffer).detach()
                    if after.shape != before.shape or not torch.equal(after, before):
                        self.changed[path] = Change(before=before, after=after.clone())

    def _hooks(self, model: nn.Module, paths: Collection[str]) -> Iterator[Any]:
        yield register_optimizer_step_pre_hook(lambda *_: self._step())
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks
            if path == "":
                yield module.register_forward_pre_hook(lambda *_: self._forward())
            if path in paths or "running_var" in module._buffers:
                enter, leave = functools.partial(self._enter, path), functools.partial(self._leave, path)
                yield module.register_forward_pre_hook(enter, with_kwargs=True)
                yield module.register_forward_hook(leave, always_call=True)

    def _step(self) -> None:
        self.steps += 1

    def _forward(self) -> None:
        self.forwards += 1

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = next((t for t in tensors_in((args, kwargs)) if t.is_floating_point()), None)
        event = NormEvent(
            path=path,
            training=module.training,
            grad=torch.is_grad_enabled(),
            recomputed=torch._C._current_graph_task_id() != -1,
            forward=self.forwards,
            shape=() if given is None else tuple(given.shape),
        )
        versions = _versions(module)
        event.rewritten = path in self._versions and self._versions[path] != versions
        self._calls[path] = self._calls.get(path, 0) + 1
        if self._calls[path] <= _KEPT_CALLS:
            event.batch = None if given is None else measured(module, given)
        event.before = _copies(module)
        event.per_channel = None if event.batch is None else event.batch.count
        self.norms.append(event)
        self._open.append(event)

    def _leave(self, path: str, module: nn.Module, *_: Any) -> None:
        while self._open and self._open[-1].path != path:
            self._open.pop()  # a call that a raised exception left open
        if not self._open:
            return
        event = self._open.pop()
        event.after = _copies(module)
        event.updated = any(not torch.equal(event.after[n], b) for n, b in event.before.items() if n in event.after)
        self._versions[path] = _versions(module)
        if self._calls[path] > _KEPT_CALLS:
            event.before, event.after = {}, {}

    @contextmanager
    def _patched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in ("backward", "grad"):
                stack.enter_context(_replaced(torch.autograd, name, self._counting_backward))
            distributed = sys.modules.get("torch.distributed")
            for name in _COLLECTIVES if distributed is not None else ():
                if hasattr(distributed, name):
                    stack.enter_context(_replaced(distributed, name, functools.partial(self._counting, name)))
            yield

    def _counting_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:  # not the inner pass of a reentrant checkpoint
                self.backwards += 1
            return function(*args, **kwargs)

        return counted

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.collectives.append(name)
            return function(*args, **kwargs)

        return counted


@contextmanager
def _replaced(holder: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(holder, name)
    setattr(holder, name, wrap(original))
    try:
        yield
    finally:
        setattr(holder, name, original)


def _copies(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the module's own buffers, as far as they are small enough to be statistics."""
    own = {n: b for n, b in module._buffers.items() if b is not None and b.dim() <= _STATISTIC_DIMS}
    return {n: b.detach().clone() for n, b in own.items()}


def _versions(module: nn.Module) -> list[int]:
    return [b._version for b in module._buffers.values() if b is not None and not b.is_inference()]


_STATISTIC_DIMS = 1  # one number a channel
