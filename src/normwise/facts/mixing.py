"""Where one sample's, or an earlier step's, result comes to depend on what it must not: norms first, then any op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from normwise.facts.differences import (
    AGREE,
    DIFFER,
    Introduced,
    Layout,
    held,
    paired_with_output,
    relative_change,
    still_layouts,
)
from normwise.facts.norms import NormCall
from normwise.facts.runs import Run
from normwise.facts.sites import Site
from normwise.graph import Graph, Instead, Op
from normwise.spec import Scope
from normwise.targets import inputs
from normwise.targets.target import Target

__all__ = [
    "Mixer",
    "holding",
    "like_calls",
    "may_mix",
    "mixer",
    "moved",
    "norm_values",
    "output_change",
    "sites_of_calls",
]

LEFT = 0.1  # of the change, with the norms held: rounding moves a row-wise model by 6e-7, at most that of AGREE


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """The first op that is no norm and mixes what was apart."""

    op: Op
    path: str
    pairs: bool  # it pairs operands of which one has other samples than the other in the same places


def may_mix(call: NormCall, graph: Graph, batch: int, lengths: Collection[int]) -> bool:
    """Whether a norm's statistics may span several units: all but those whose reduced axes hold features alone.

    Args:
        call: a norm.
        graph: of its run.
        batch: samples; 0 where no axis of the inputs holds them.
        lengths: steps of each sequence among the inputs: several where an encoder and a decoder read their own.
    """
    spec, shape = call.spec, graph.values[call.input].shape
    if spec is None or spec.scope is Scope.OTHER:
        return True
    if not call.uses_batch:
        return False
    if spec.scope is not Scope.HIDDEN or any(-len(shape) > axis for axis in spec.axes):
        return True
    reduced = {axis % len(shape) for axis in spec.axes}
    left = [size for axis, size in enumerate(shape) if axis not in reduced]
    if any(shape[axis] in (batch, *lengths) for axis in reduced if shape[axis] > 1):
        return True
    if len(reduced) == 1 and call.weight is not None and graph.values[call.weight].numel == shape[max(reduced)] > 1:
        return False  # a gain along the axis: those are features, whatever stands around them

    def apart(unit: int) -> bool:
        return any(size % max(unit, 1) == 0 for size in left)

    # batch and time, of one of the sequences, both stand outside the reduced axes, alone or merged into one
    return not (left and apart(batch) and (not lengths or any(apart(n) for n in lengths)))


def like_calls(found: Iterable[NormCall], calls: Iterable[NormCall], graph: Graph) -> list[NormCall]:
    """Return the norms that reduce the same axes of values of as many axes as those found."""

    def kind(call: NormCall) -> tuple[object, ...]:
        spec = call.spec
        form = (call.op.name,) if spec is None else (spec.scope, spec.axes, spec.groups is None)
        return len(graph.values[call.input].shape), call.uses_batch, *form

    kinds = {kind(f) for f in found}
    return [c for c in calls if kind(c) in kinds]


def norm_values(calls: Iterable[NormCall], graph: Graph) -> set[int]:
    """Return inputs and outputs of norms and of the model: all that is compared of a run of the same ops."""
    return {v for c in calls for v in (c.input, c.core, c.output)} | set(graph.outputs)


def sites_of_calls(sites: Iterable[Site], calls: Collection[NormCall]) -> tuple[Site, ...]:
    """Return the rows of the norm map that executions belong to."""
    wanted = {call.op.id for call in calls}
    return tuple(s for s in sites if any(call.op.id in wanted for call in s.calls))


def holding(
    found: Iterable[Introduced], calls: Iterable[NormCall], first: Run, pairs: Mapping[int, int]
) -> tuple[dict[int, Instead], set[int]]:
    """Return what holds norms to a first run wherever their own input does not move, and the values that reads.

    Args:
        found: which norms moved units whose input was still, and in which layout.
        calls: the norms to hold.
        first: the run to hold to.
        pairs: values of the run that is changed by those of the first.
    """
    instead: dict[int, Instead] = {}
    wanted: set[int] = set()
    axis = next(f.layout.axis for f in found)
    for call in calls:
        value = paired_with_output(call, first.graph)
        if value is None or not {call.input, value} <= first.tensors.keys() or not {call.input, value} <= pairs.keys():
            continue
        ids = pairs[call.input], pairs[value]
        instead[ids[1]] = held(first.tensors[call.input], first.tensors[value], axis, ids, lambda t: t)
        wanted.add(ids[0])
    return instead, wanted


def _protected(
    target: Target, name: str, units: int, protected: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the protected part of an output in two runs; None where it has no such axis."""
    axis = inputs.axis_of(target, name, first) if name == "batch" else _time_of(target, first, units)
    if axis is None or first.shape != second.shape or axis >= first.ndim or first.shape[axis] % units:
        return None
    index = protected[Layout(axis, first.shape[axis] // units, units).unit_of(first.shape[axis])].nonzero()[:, 0]
    return first.index_select(axis, index.to(first.device)), second.index_select(axis, index.to(second.device))


def _time_of(target: Target, output: torch.Tensor, steps: int) -> int | None:
    given = inputs.axis_of(target, "time", output)
    likely = [a for a in (given, 1, 2, 0) if a is not None and a < output.ndim and output.shape[a] == steps]
    return likely[0] if likely else None


def output_change(
    target: Target, name: str, units: int, protected: torch.Tensor, first: Run, second: Run, pairs: Mapping[int, int]
) -> float | None:
    """Return how far the protected part of the model's outputs moves; None where no output has such a part."""
    moved = []
    for value in first.graph.outputs:
        other = pairs.get(value, -1)
        if value not in first.tensors or other not in second.tensors:
            continue
        parts = _protected(target, name, units, protected, first.tensors[value], second.tensors[other])
        if parts is not None:
            moved.append(relative_change(*parts))
    return max(moved) if moved else None


def moved(change: float, held: Callable[[], float]) -> bool:
    """Whether norms that mix move the outputs: visibly, or by less but more than rounding, and not while they are held.

    Args:
        change: of the outputs.
        held: returns what is left of it with the norms held; costs a pass.
    """
    return change >= DIFFER or (change > AGREE and held() <= LEFT * change)


def mixer(first: Run, second: Run, pairs: Mapping[int, int], units: int, protected: torch.Tensor) -> Mixer | None:
    """Return the first op behind the outputs whose result moves everywhere while what it reads does not."""
    states: dict[int, frozenset[Layout] | None] = {}

    def state(value: int) -> frozenset[Layout] | None:
        """The layouts in which a value's protected units are still; none at all: everything moved. None: unknown."""
        if value not in states:
            states[value] = _state(value)
        return states[value]

    def _state(value: int) -> frozenset[Layout] | None:
        a, b = first.tensors.get(value), second.tensors.get(pairs.get(value, -1))
        if a is None or b is None or a.shape != b.shape:
            return None
        still = still_layouts(a, b, units, protected)
        return None if still is None else frozenset(layout for layout, _ in still)

    for op in _behind_outputs(first.graph):
        read = {i: known for i in op.inputs if (known := state(i)) is not None}
        made = [known for o in op.outputs if (known := state(o)) is not None]
        if read and all(read.values()) and any(not known for known in made):
            return Mixer(op=op, path=first.graph.path(op), pairs=_pairs_apart(read, first.graph, units))
    return None


def _behind_outputs(graph: Graph) -> Iterator[Op]:
    needed, pending = set[int](), list(graph.outputs)
    while pending:
        op = graph.producer(pending.pop())
        if op is not None and op.id not in needed:
            needed.add(op.id)
            pending.extend(op.inputs)
    return (op for op in graph.ops if op.id in needed)


def _pairs_apart(read: Mapping[int, frozenset[Layout]], graph: Graph, units: int) -> bool:
    """Whether two operands have the same axis in two layouts that do not agree: not the same rows."""
    along: dict[tuple[int, int, int], list[set[Layout]]] = {}
    for value, known in read.items():
        shape = graph.values[value].shape
        for axis in {layout.axis for layout in known}:
            along.setdefault((len(shape), axis, shape[axis]), []).append({k for k in known if k.axis == axis})
    return any(not set.intersection(*each) for (_, _, size), each in along.items() if len(each) > 1 and size > units)
