"""Modules that keep running statistics under names of their own, told by what one update does to their buffers.

A module is run alone, in train mode, on random data. Where two of its buffers move along the straight line from what
they held to the mean and to the variance of that data, it keeps them as running statistics, whatever they are called.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from normwise.graph.guard import as_found
from normwise.targets.target import numberless

__all__ = ["Keeper", "read"]

_SEED = 20261129
# layouts in which norms of C channels are called, tried in this order
_LAYOUTS = ((8, -1, 5), (8, -1), (8, -1, 3, 3), (8, -1, 2, 2, 2), (8, 5, -1))
# of the length of the step: float32 rounds to 1e-7, and what is no average points elsewhere
_STRAIGHT = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """What a module does with the running statistics it keeps."""

    buffers: tuple[str, ...]  # those of the mean, then those of the variance
    momentum: float | None  # weight of the newest batch in the running mean; None where it changes from batch to batch
    writes_in_eval: bool


def read(model: nn.Module) -> Mapping[str, Keeper]:
    """Return the modules that keep running statistics without torch's names for them, as far as they run alone."""
    found = {}
    for path, module in model.named_modules():
        if "running_var" in module._buffers or next(module.children(), None) is not None:
            continue
        if (keeper := _probed(module)) is not None:
            found[path] = keeper
    return found


def _vectors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers with one number a channel, where they hold numbers."""
    held = {name: b for name, b in module._buffers.items() if b is not None and b.is_floating_point()}
    if any(map(numberless, held.values())):
        return {}
    return {name: b for name, b in held.items() if max(b.shape, default=0) == b.numel() > 1}


def _probed(module: nn.Module) -> Keeper | None:
    vectors = _vectors(module)
    channels = {b.numel() for b in vectors.values()}
    if len(vectors) < 2 or len(channels) != 1:
        return None
    with torch.no_grad(), as_found(module, evaluate=None):
        for x, axis in _inputs(channels.pop(), next(iter(vectors.values()))):
            try:
                return _judged(module, tuple(vectors), x, axis)
            except Exception:  # another layout, or no module that runs alone
                continue
    return None


def _inputs(channels: int, like: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(_SEED)
    for layout in _LAYOUTS:
        axis = layout.index(-1)
        shape = tuple(channels if s == -1 else s for s in layout)
        x = torch.randn(shape, generator=generator)
        sizes = torch.rand(channels, generator=generator).add(1).reshape(-1, *[1] * (len(shape) - 1 - axis))
        yield (x * sizes + 3 * sizes.square()).to(like), axis


def _judged(module: nn.Module, names: tuple[str, ...], x: torch.Tensor, axis: int) -> Keeper | None:
    still, first, second = (copy.deepcopy(module) for _ in range(3))
    start = {n: module._buffers[n] for n in names}
    _call(still, x, training=False)
    _call(first, x, training=True)
    _call(second, x, training=True)
    _call(second, x * 2 + 1, training=True)
    kept: dict[str, list[tuple[str, float]]] = {"mean": [], "variance": []}
    for name in names:
        for kind, of in _statistics(x, axis).items():
            if (share := _share(start[name], first._buffers[name], of)) is not None:
                kept[kind].append((name, share))
                break
    if not kept["mean"] or not kept["variance"]:
        return None
    mean = kept["mean"][0]
    later = _share(first._buffers[mean[0]], second._buffers[mean[0]], _statistics(x * 2 + 1, axis)["mean"])
    steady = later is not None and math.isclose(later, mean[1], abs_tol=0.01)
    written = any(not torch.equal(_of(still, n), _of(module, n)) for n in names)
    return Keeper(
        buffers=tuple(name for group in kept.values() for name, _ in group),
        momentum=mean[1] if steady else None,
        writes_in_eval=written,
    )


def _of(module: nn.Module, name: str) -> torch.Tensor:
    found = module._buffers[name]
    assert found is not None
    return found


def _call(module: nn.Module, x: torch.Tensor, *, training: bool) -> None:
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()
    module.train(training)
    module(x.clone())


def _statistics(x: torch.Tensor, axis: int) -> dict[str, tuple[torch.Tensor, ...]]:
    values = x.double().movedim(axis, 0).flatten(1)
    return {"mean": (values.mean(1),), "variance": (values.var(1, correction=0), values.var(1, correction=1))}


def _share(old: torch.Tensor | None, new: torch.Tensor | None, of: tuple[torch.Tensor, ...]) -> float | None:
    """Return how far a buffer went toward a statistic; None where it went elsewhere, or nowhere."""
    if old is None or new is None:
        return None
    moved = new.double().flatten() - old.double().flatten()
    for statistic in of:
        step = statistic - old.double().flatten()
        size = float(step.square().sum())
        share = float((moved * step).sum()) / size if size else 0.0
        if share > _STRAIGHT and float((moved - share * step).norm()) <= _STRAIGHT * share * math.sqrt(size):
            return share
    return None
