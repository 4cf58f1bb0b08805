"""What each norm with running statistics does in train mode and in eval mode, found by running it alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from normwise.graph.guard import as_found
from normwise.targets.target import numberless

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Liveness", "Scope", "in_training", "modes_in_training", "read"]

_SEED = 20261129
# layouts in which norms of C channels are called, tried in this order
_Layout = tuple[int, ...]
_LAYOUTS: tuple[_Layout, ...] = ((4, -1), (4, -1, 5), (4, -1, 3, 3), (4, -1, 2, 2, 2), (4, 5, -1))
_SAMPLES = 4


class Scope(StrEnum):
    """Whose statistics a norm uses in train mode."""

    BATCH = "batch"  # those of all samples of the batch
    INSTANCE = "instance"  # those of each sample
    FIXED = "fixed"  # the running ones, as in eval mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The behaviour of one norm with running statistics."""

    scope: Scope
    updates: bool  # it writes its buffers in train mode
    writes_in_eval: bool
    momentum: float | None  # weight of the newest batch; None where it averages plainly or writes nothing


def read(model: nn.Module) -> Mapping[str, Liveness]:
    """Return the behaviour of every module with ``running_var``; one that cannot be run alone is left out."""
    found = {}
    layouts: dict[type, list[_Layout]] = {}
    for path, module in model.named_modules():
        if isinstance(module._buffers.get("running_var"), torch.Tensor):
            live = _of_torch(module) or _probed(module, layouts.setdefault(type(module), list(_LAYOUTS)))
            if live is not None:
                found[path] = live
    return found


def modes_in_training(model: nn.Module) -> Mapping[str, bool]:
    """Return the mode of every module after ``model.train()``: an overridden ``train`` keeps frozen parts in eval."""
    if all(type(m).train is nn.Module.train and "train" not in m.__dict__ for m in model.modules()):
        return {path: True for path, _ in model.named_modules()}
    with as_found(model, evaluate=None):
        try:
            model.train()
        except Exception:  # the user's own train(): as found is the best guess left
            return {path: m.training for path, m in model.named_modules()}
        return {path: m.training for path, m in model.named_modules()}


def in_training(facts: Facts, *scopes: Scope) -> tuple[str, ...]:
    """Return the norms that use live statistics while the model is trained, of some scopes.

    A model that was given in train mode is judged in the modes it was given in; one in eval mode in those that its
    own ``train()`` would set.
    """
    model = facts.target.model
    modes = {p: m.training for p, m in model.named_modules()} if model.training else facts.modes_in_training
    return tuple(p for p, live in facts.live_norms.items() if modes.get(p) and live.scope in (scopes or tuple(Scope)))


def _of_torch(module: nn.Module) -> Liveness | None:
    """Return what torch's own forwards do; a subclass with a forward of its own is run instead."""
    forward = type(module).forward
    if forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        scope = Scope.BATCH
    elif forward is _InstanceNorm.forward:
        scope = Scope.INSTANCE
    else:
        return None
    momentum = getattr(module, "momentum", None)
    updates = bool(getattr(module, "track_running_stats", True)) and momentum != 0
    weight = float(momentum) if isinstance(momentum, (int, float)) else None
    return Liveness(scope=scope, updates=updates, writes_in_eval=False, momentum=weight)


def _probed(module: nn.Module, layouts: list[_Layout]) -> Liveness | None:
    """Run a norm in the first layout that it takes, which then comes first for the next of its class."""
    var = module._buffers["running_var"]
    if var is None or var.dim() != 1 or numberless(var) or next(module.children(), None) is not None:
        return None
    for layout in tuple(layouts):
        try:
            found = _run(module, _input(var, layout))
        except Exception:
            continue
        layouts.remove(layout)
        layouts.insert(0, layout)
        return found
    return None


def _input(var: torch.Tensor, layout: _Layout) -> torch.Tensor:
    shape = tuple(len(var) if s == -1 else s for s in layout)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))
    # samples of different mean and size, so that statistics of one are not those of all
    steps = torch.arange(1.0, _SAMPLES + 1).reshape(-1, *[1] * (len(layout) - 1))
    return (x * steps + 3 * steps).to(var)


def _run(module: nn.Module, x: torch.Tensor) -> Liveness:
    others = x.clone()
    others[1:] *= -2
    with torch.no_grad(), as_found(module, evaluate=None):
        still, _, wrote = _answer(module, x, training=False)
        live, after, updates = _answer(module, x, training=True)
        partners, _, _ = _answer(module, others, training=True)
    if not torch.allclose(live[0], partners[0], rtol=1e-3, atol=1e-5):
        scope = Scope.BATCH
    else:
        scope = Scope.FIXED if torch.allclose(live, still, rtol=1e-3, atol=1e-5) else Scope.INSTANCE
    return Liveness(
        scope=scope, updates=updates, writes_in_eval=wrote, momentum=_momentum(module, x, after) if updates else None
    )


def _answer(module: nn.Module, x: torch.Tensor, *, training: bool) -> tuple[torch.Tensor, nn.Module, bool]:
    alone = copy.deepcopy(module)
    alone._forward_hooks.clear()
    alone._forward_pre_hooks.clear()
    alone.train(training)
    before = {n: b.clone() for n, b in alone.named_buffers()}
    out = alone(x.clone())
    if out.shape != x.shape:
        raise ValueError("broadcast: x has another layout")
    wrote = any(not torch.equal(b, before[n]) for n, b in alone.named_buffers() if n in before)
    return out, alone, wrote


def _momentum(module: nn.Module, x: torch.Tensor, after: nn.Module) -> float | None:
    """Return the weight of the newest batch in the running mean, from one update."""
    old, new = module._buffers.get("running_mean"), after._buffers.get("running_mean")
    if old is None or new is None:
        return None
    axis = 1 if x.shape[1] == len(old) else x.dim() - 1
    step = x.double().movedim(axis, 0).flatten(1).mean(1) - old.double()
    size = float(step.square().sum())
    return float(((new.double() - old.double()) * step).sum()) / size if size else None
