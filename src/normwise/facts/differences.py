"""Compares two runs of a model value by value: what moved, where, and which norm or op made it move.

A value is laid out in units: the samples of a batch, or the steps of a sequence, along one of its axes, alone or merged
with others. Some units are protected: what the two runs gave the model is the same for them. A unit is still where
none of its elements moved beyond rounding. Where the layout is not known beforehand, the values themselves show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from normwise.facts.norms import NormCall
from normwise.facts.runs import Run
from normwise.graph import Graph, Instead

__all__ = [
    "ABOVE_FLOOR",
    "AGREE",
    "DIFFER",
    "LARGEST",
    "Introduced",
    "Layout",
    "changes",
    "held",
    "introduced",
    "largest_change",
    "layouts",
    "paired_with_output",
    "relative_change",
    "still_layouts",
]

# Relative to the root mean square. Rounding of float32 moves a row-wise model by 6e-7 at most, real causes by 1.5e-2
# to 0.9 (RULES 0.4, measured): between the two bounds nothing is said.
AGREE, DIFFER = 1e-5, 1e-3
# What a norm makes of the rounding of its input is no difference of its own: its output must move this much more.
ABOVE_FLOOR = 1000.0
LARGEST = 1e6  # stands for a change to or from what is not finite as well: numbers of a report are finite


@dataclass(frozen=True, slots=True)
class Layout:
    """How units lie along an axis: index i belongs to unit (i // inner) % units."""

    axis: int
    inner: int
    units: int

    def unit_of(self, size: int) -> torch.Tensor:
        """Return the unit of each index of an axis of a size."""
        return torch.arange(size) // self.inner % self.units


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduced:
    """A norm that moved units whose own input did not move."""

    call: NormCall
    value: int  # id of the compared output in the traced run: the norm's output, or its core
    layout: Layout
    change: float  # of the output on the protected units, relative to its root mean square
    floor: float  # of the input there


def layouts(shape: tuple[int, ...], units: int) -> Iterator[Layout]:
    """Yield every way in which a number of units may lie along an axis of a shape."""
    for axis, size in enumerate(shape):
        if size and size % units == 0:
            yield from (Layout(axis, inner, units) for inner in _divisors(size // units))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def changes(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return by how much each element differs; elements that are the same infinity or both NaN do not."""
    a, b = _wide(first), _wide(second)
    apart = (a - b).abs()
    if apart.numel() and not apart.max().isfinite():
        same = (a == b) | (a.isnan() & b.isnan())
        apart = torch.where(same, torch.zeros_like(apart), apart.nan_to_num(torch.inf, torch.inf))
    return apart


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.double()  # token ids and masks
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def largest_change(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest difference of two tensors relative to the root mean square of the first."""
    return _ratio(float(changes(first, second).max()), _rms(first)) if first.numel() else 0.0


def relative_change(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the root mean square of the difference relative to that of the first."""
    if not first.numel():
        return 0.0
    return _ratio(_rms(changes(first, second).clamp_max(torch.finfo(torch.float32).max)), _rms(first))


def _rms(tensor: torch.Tensor) -> float:
    wide = _wide(tensor)
    norm = float(torch.linalg.vector_norm(wide))
    if not math.isfinite(norm):
        wide = wide[wide.isfinite()]
        norm = float(torch.linalg.vector_norm(wide.double()))
    return norm / math.sqrt(wide.numel()) if wide.numel() else 0.0


def _own_size(tensor: torch.Tensor) -> float:
    """Return the standard deviation, or the size of a constant: a norm divides by it, so rounding counts against it."""
    return _rms(tensor - tensor.detach().mean()) or _rms(tensor)


def _ratio(change: float, size: float) -> float:
    return 0.0 if change == 0.0 else min(change / size, LARGEST) if size else LARGEST


def still_layouts(
    first: torch.Tensor, second: torch.Tensor, units: int, protected: torch.Tensor
) -> list[tuple[Layout, float]] | None:
    """Return the layouts in which the protected units are still while others moved, and how still they are.

    None where nothing moved.

    Args:
        first: a value in one run.
        second: the value in the other run, of the same shape.
        units: their number.
        protected: bool by unit.
    """
    size, apart = _rms(first), changes(first, second)
    if not apart.numel() or _ratio(float(apart.max()), size) < DIFFER:
        return None
    found = []
    for layout, along in _along(apart, units):
        safe = protected[layout.unit_of(len(along))]
        mine, others = float(along[safe].max()), float(along[~safe].max())
        # the protected units' own size is at most sqrt(units) times that of all
        if _ratio(others, size) < DIFFER or mine > AGREE * size * math.sqrt(units):
            continue
        floor = _ratio(mine, _own_size(first.movedim(layout.axis, 0)[safe.to(first.device)])) if mine else 0.0
        if floor <= AGREE:
            found.append((layout, floor))
    return found


def _along(apart: torch.Tensor, units: int) -> Iterator[tuple[Layout, torch.Tensor]]:
    """Yield each layout with the largest difference at each index of its axis."""
    largest: dict[int, torch.Tensor] = {}
    for layout in layouts(tuple(apart.shape), units):
        if layout.axis not in largest:
            largest[layout.axis] = apart.movedim(layout.axis, 0).flatten(1).amax(1) if apart.ndim > 1 else apart
        yield layout, largest[layout.axis]


def introduced(
    calls: tuple[NormCall, ...], first: Run, second: Run, pairs: Mapping[int, int], units: int, protected: torch.Tensor
) -> Iterator[Introduced]:
    """Yield the norms that move protected units, in the order of the run, up to where everything has moved.

    Args:
        calls: norms of the first run.
        first: a run.
        second: a run on inputs that differ in the units that are not protected.
        pairs: values of the second run by those of the first.
        units: number of samples or steps.
        protected: bool by unit.
    """
    for call in calls:
        found = _tensors(call, first, second, pairs)
        if found is None or not any(layouts(tuple(found[0].shape), units)):
            continue
        x, other_x, value, y, other_y = found
        still = still_layouts(x, other_x, units, protected)
        if still is None:
            continue
        if not still:
            return  # everything here depends on everything: the difference came in before
        apart = changes(y, other_y)
        moved = [(layout, floor, _moved(apart, y, layout, protected)) for layout, floor in still]
        # in one of several possible layouts of a healthy norm, the true one, the protected units stay still
        if all(change >= max(DIFFER, ABOVE_FLOOR * floor) for _, floor, change in moved):
            layout, floor, change = moved[0]
            yield Introduced(call=call, value=value, layout=layout, change=change, floor=floor)


def _moved(apart: torch.Tensor, y: torch.Tensor, layout: Layout, protected: torch.Tensor) -> float:
    safe = protected[layout.unit_of(y.shape[layout.axis])]
    return _ratio(float(apart.movedim(layout.axis, 0)[safe].max()), _rms(y))


def _tensors(
    call: NormCall, first: Run, second: Run, pairs: Mapping[int, int]
) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor] | None:
    """Return input and output of a norm in both runs; None where a run does not have them in one shape."""
    value = paired_with_output(call, first.graph)
    there = [pairs.get(v, -1) for v in (call.input, value)] if value is not None else []
    if value is None or not {call.input, value} <= first.tensors.keys() or not set(there) <= second.tensors.keys():
        return None
    x, y = first.tensors[call.input], first.tensors[value]
    other_x, other_y = (second.tensors[v] for v in there)
    if other_x.shape != x.shape or other_y.shape != y.shape:
        return None
    return x, other_x, value, y, other_y


def paired_with_output(call: NormCall, graph: Graph) -> int | None:
    """Return the value of a norm to compare with its input: its output, or its core where only that has the shape."""
    shape = graph.values[call.input].shape
    return next((v for v in (call.output, call.core) if graph.values[v].shape == shape), None)


def held(
    x: torch.Tensor, y: torch.Tensor, axis: int, ids: tuple[int, int], align: Callable[[torch.Tensor], torch.Tensor]
) -> Instead:
    """Return what computes a norm's output with every index held at what it was whose own input is what it was.

    Args:
        x: input of the norm in the run to hold to.
        y: its output there.
        axis: the axis along which positions are told apart.
        ids: value ids of input and output in the run that is changed.
        align: the part of a tensor of that run which stands for the other run's.
    """
    size = _own_size(x)

    def instead(kept: Mapping[int, torch.Tensor]) -> torch.Tensor:
        here, out = kept[ids[0]], kept[ids[1]].clone()
        apart = changes(x, align(here)).movedim(axis, 0)
        still = (apart.flatten(1).amax(1) if apart.ndim > 1 else apart) <= AGREE * size
        part = align(out).movedim(axis, 0)
        part[still.to(part.device)] = y.movedim(axis, 0)[still.to(y.device)].to(part)
        return out

    return instead
