"""What reads a residual stream after its last add."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from normwise.facts import vocabulary as ops
from normwise.facts.flow import Flow
from normwise.facts.norms import NormCall
from normwise.facts.placing import Placed
from normwise.graph import Op

__all__ = ["Beyond", "Reader", "beyond"]

# what still carries the stream: the same numbers moved, pooled, joined, or changed one by one
_CARRIES = ops.VIEW | ops.POINTWISE | ops.POOL | ops.OVERWRITE | frozenset({"cat", "stack", "concat"})


class Reader(StrEnum):
    """Who reads the end of a stream, as it stands."""

    HEAD = "head"  # a linear map whose result leaves the model
    STAGE = "stage"  # a convolution: the neck or decoder that follows was trained on the stream as it is
    MEMORY = "memory"  # a sublayer of another stack: cross-attention
    STACK = "stack"  # another stack starts from it
    NORM = "norm"  # a norm stands somewhere behind it
    OUTPUT = "output"  # the model returns it
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """The reader of a stream's end and the module it belongs to."""

    reader: Reader
    path: str


def beyond(flow: Flow, placed: Placed, norms: tuple[NormCall, ...], stack: int) -> Beyond:
    """Follow a stream from its last add to what reads it.

    Args:
        flow: the graph with taints.
        placed: the streams.
        norms: every norm execution of the run.
        stack: index of the stream, as in ``placement.stacks``.
    """
    graph = flow.graph
    end = placed.streams[stack].adds[-1].out
    near, far = _closure(flow, end, through=False), _closure(flow, end, through=True)
    others = [s for i, s in enumerate(placed.streams) if i != stack]
    if any(s.origin in far.values or set(s.adds[0].skip.values) & far.values for s in others):
        return Beyond(reader=Reader.STACK, path="")
    inside = {o for s in others for a in s.adds for o in a.region}
    memory = [o for o in near.stopped if o.id in inside]
    if memory:
        return Beyond(reader=Reader.MEMORY, path=graph.path(memory[0]))
    if any(n.op.id in far.ops for n in norms):
        return Beyond(reader=Reader.NORM, path="")
    heads = [o for o in near.stopped if any(flow.learned[i] and not flow.act[i] for i in o.inputs)]
    linear = [o for o in heads if o.short not in ops.CONV]
    if heads:
        first = (linear or heads)[0]
        return Beyond(reader=Reader.HEAD if linear else Reader.STAGE, path=graph.path(first))
    if set(graph.outputs) & near.values:
        return Beyond(reader=Reader.OUTPUT, path="")
    return Beyond(reader=Reader.NONE, path="")


@dataclass(slots=True)
class _Closure:
    values: set[int]
    ops: set[int]
    stopped: list[Op]  # the mixing ops at which the stream ends


def _closure(flow: Flow, start: int, *, through: bool) -> _Closure:
    """Return what is computed from a value, up to the first mixing ops or ``through`` everything."""
    found = _Closure({start}, set(), [])
    pending = [start]
    while pending:
        for op in flow.graph.consumers(pending.pop()):
            if op.id in found.ops:
                continue
            found.ops.add(op.id)
            if not through and op.short not in _CARRIES:
                found.stopped.append(op)
                continue
            fresh = [o for o in op.outputs if o not in found.values and flow.graph.values[o].floating]
            found.values.update(fresh)
            pending.extend(fresh)
    found.stopped.sort(key=lambda op: op.id)
    return found
