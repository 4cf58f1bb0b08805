"""Which axis of its operand a view leaves whole and in order: found by running the op on an index along each."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from normwise.conversions._dataflow.operands import LIKE_SECOND
from normwise.facts.replay import op_function
from normwise.graph import Graph, Op, Ref

__all__ = ["Carried", "moved"]

Carried = tuple[tuple[int, int], ...]
"""Operands by value id, with the axis of each."""

_LARGEST_PROBE = 2**22  # elements of a tensor that is moved for a test
_LARGEST_VIEW = 2**26  # the same where torch moves nothing, unless features are torn apart


def moved(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry a view: the axis of the operand that the op leaves whole and in order, found by running it on an index."""
    source = op.inputs[0]
    shape = graph.values[source].shape
    if len(op.inputs) != 1 and op.short not in LIKE_SECOND:
        return None
    place, size = op.outputs.index(out), graph.values[out].shape[axis]
    # the same axis first: the common case
    for at in sorted(range(-len(shape), 0), key=lambda a: a != axis):
        if shape[at] == size and _lands(graph, op, shape, at, place, axis):
            return ((source, at),)
    return None


def _lands(graph: Graph, op: Op, shape: tuple[int, ...], at: int, place: int, axis: int) -> bool:
    shapes = tuple(graph.values[i].shape for i in op.inputs)
    return _probe(_Probe(op, shapes), shape, at, place, axis)


class _Probe:
    """An op with the shapes of its operands, equal to others of the same code."""

    def __init__(self, op: Op, shapes: tuple[tuple[int, ...], ...]) -> None:
        self.op, self.shapes = op, shapes
        self.key = (op.name, op.overload, repr([_bare(a) for a in op.args]), repr(op.kwargs), shapes)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Probe) and self.key == other.key

    @property
    def is_view(self) -> bool:
        """Whether the op returns views of its operand."""
        schema = getattr(op_function(self.op), "_schema", None)
        return schema is not None and any(made.alias_info is not None for made in schema.returns)

    def run(self, index: torch.Tensor) -> list[torch.Tensor]:
        given = iter([index, *(torch.empty(s, device="meta") for s in self.shapes[1:])])

        def plain(item: Any) -> Any:
            if isinstance(item, Ref):
                return next(given)
            if isinstance(item, (list, tuple)):
                return [plain(i) for i in item]
            return torch.device("cpu") if isinstance(item, torch.device) else item

        kwargs = {k: plain(v) for k, v in self.op.kwargs.items() if k not in ("dtype", "device")}
        result = op_function(self.op)(*[plain(a) for a in self.op.args], **kwargs)
        return list(result) if isinstance(result, (list, tuple)) else [result]


def _bare(item: Any) -> Any:
    if isinstance(item, Ref):
        return "tensor"
    return [_bare(i) for i in item] if isinstance(item, (list, tuple)) else item


@lru_cache(maxsize=4096)
def _probe(probe: _Probe, shape: tuple[int, ...], at: int, place: int, axis: int) -> bool:
    """Whether an index along ``at`` of the operand comes out as an index along ``axis``, or as zeros (padding)."""
    if math.prod(shape) > (_LARGEST_VIEW if probe.is_view else _LARGEST_PROBE):
        return False
    size = shape[at]
    along = [1] * len(shape)
    along[at] = size
    index = torch.arange(1.0, size + 1, device="cpu").reshape(along).expand(shape)
    try:
        made = probe.run(index)[place]
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, StopIteration):
        return False
    if made.dim() < -axis or made.shape[axis] != size:
        return False
    for other, stride in enumerate(made.stride()):
        if stride == 0:  # the same everywhere
            made = made.narrow(other, 0, min(made.shape[other], 1))
    rows = made.movedim(axis, -1)
    want = torch.arange(1.0, size + 1, device="cpu")
    return bool(((rows == want).all(-1) | (rows == 0).all(-1)).all())
