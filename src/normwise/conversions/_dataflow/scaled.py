"""LayerScale: a linear map whose output is multiplied by a learned vector before it is added to a stream."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from normwise.conversions._dataflow.axes import carriers, is_constant
from normwise.facts import vocabulary as ops
from normwise.graph import Graph, Op, ValueKind

__all__ = ["ScaledWriter", "scaled_writer"]

Uses = Mapping[int, Sequence[Op]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledWriter:
    """A linear map whose output is multiplied by a learned vector (LayerScale) before it is added to a stream."""

    op: Op  # the product
    axis: int
    weight: int  # value ids of the parameters
    dim: int  # of the output features in the weight
    bias: int | None
    scale: int


def scaled_writer(
    graph: Graph, uses: Uses, norms: Container[int], op: Op, value: int, axis: int
) -> ScaledWriter | None:
    """Read a product of a linear map's output with a learned vector, all of it used here only.

    Args:
        graph: the traced program.
        uses: the live ops that read each value.
        norms: ops that belong to norms.
        op: the product.
        value: its result.
        axis: of the features.
    """
    if op.short not in ops.MUL or len(op.inputs) != 2:
        return None
    for source, factor in (op.inputs, op.inputs[::-1]):
        scale = _parameter_behind(graph, uses, factor)
        if scale is None or is_constant(graph, axis, factor):
            continue
        if graph.values[scale].numel != graph.values[value].shape[axis]:
            continue
        found = _linear_behind(graph, uses, norms, source, axis)
        if found is not None and graph.values[scale].numel > 1:
            weight, dim, bias = found
            return ScaledWriter(op=op, axis=axis, weight=weight, dim=dim, bias=bias, scale=scale)
    return None


def _parameter_behind(graph: Graph, uses: Uses, value: int) -> int | None:
    while len(uses[value]) == 1:
        op = graph.producer(value)
        if op is None:
            return value if graph.values[value].kind is ValueKind.PARAM else None
        if op.short not in ops.VIEW or len(op.inputs) != 1:
            return None
        value = op.inputs[0]
    return None


def _linear_behind(
    graph: Graph, uses: Uses, norms: Container[int], value: int, axis: int
) -> tuple[int, int, int | None] | None:
    """Return weight, its axis of outputs, and bias of the linear map behind a value, if nobody else reads it."""
    while len(uses[value]) == 1 and (op := graph.producer(value)) is not None:
        found = carriers(graph, op, value, axis) if op.id not in norms else None
        if not found:
            return None
        own = [graph.values[v].kind is ValueKind.PARAM and len(uses[v]) == 1 for v, _ in found]
        vectors = [v for v, _ in found if len(graph.values[v].shape) == 1]
        weights = [(v, a) for v, a in found if len(graph.values[v].shape) > 1]
        if all(own) and len(weights) == 1 and len(vectors) < 2:
            return (*weights[0], vectors[0] if vectors else None)
        if len(found) != 1:
            return None
        value, axis = found[0]
    return None
