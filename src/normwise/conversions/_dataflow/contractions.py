"""Ops that contract one axis of a value with a parameter: linear maps and convolutions, as they are traced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from normwise.conversions._dataflow.axes import carriers
from normwise.conversions._dataflow.operands import argument
from normwise.conversions._plan import Blocked
from normwise.facts import vocabulary as ops
from normwise.facts.flow import Flow
from normwise.graph import Graph, Op, Ref, ValueKind

__all__ = ["VIEWS", "Reader", "reader_at"]

_TRANSPOSES = frozenset({"t", "transpose", "permute", "mT", "numpy_T", "swapaxes", "swapdims"})
_PARTS = frozenset({"select", "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind"})
# between a parameter and the op that reads it
VIEWS = ops.CAST | _TRANSPOSES | _PARTS | {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "expand"}
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
_CONVOLUTIONS = _TRANSPOSED | {"conv1d", "conv2d", "conv3d", "convolution"}
_PRODUCTS = frozenset({"mm", "matmul", "bmm", "_grouped_mm"})
_FUSED = frozenset({"addmm", "baddbmm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One linear map that contracts a norm's axis with a parameter.

    Args:
        op: the map.
        path: the module in whose call it runs.
        weight: value id of the parameter.
        dim: its axis that is contracted, negative.
        groups: of a convolution.
        bias: value id of the parameter that is added, or None.
        bias_op: the op that adds it.
        fixed: why nothing can be added to what it returns, or None.
    """

    op: Op
    path: str
    weight: int
    dim: int
    groups: int = 1
    bias: int | None = None
    bias_op: int = -1
    fixed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contraction:
    """A sum of products, by its operands."""

    weight: int
    dim: int
    bias: int | None = None
    groups: int = 1
    fixed: str | None = None


def reader_at(flow: Flow, op: Op, value: int, axis: int) -> Reader | None:
    """Return the reader that an op is for an axis of one of its operands, or None.

    Raises:
        Blocked: its weight is no parameter.
    """
    graph = flow.graph
    found = _contraction(graph, op, value, axis)
    if found is None or flow.data[found.weight]:
        return None
    source = _parameter(graph, found.weight, found.dim)
    if source is None:
        raise Blocked(
            f"the weight of {graph.path(op) or 'the model itself'} is no parameter: quantised, or computed from others",
            op,
            "convert before quantising; torch.nn.utils.parametrize.remove_parametrizations gives a parameter",
        )
    bias, bias_op, fixed = _added(graph, op, found)
    if len(graph.values[source[0]].shape) > 2 and op.short in _PRODUCTS | _FUSED:
        fixed = fixed or "its weight holds several matrices"
    return Reader(
        op=op,
        path=graph.path(op),
        weight=source[0],
        dim=source[1],
        groups=found.groups,
        bias=bias,
        bias_op=bias_op,
        fixed=fixed,
    )


def _contraction(graph: Graph, op: Op, value: int, axis: int) -> _Contraction | None:
    """Read an op as a sum of products over ``axis`` of ``value``."""
    if op.short == "linear" and op.args[0] == Ref(value) and axis == -1:
        return _Contraction(weight=op.args[1].value, dim=-1, bias=_id(argument(op, 2, "bias")))
    if op.short in _PRODUCTS:
        return _product(graph, op, op.args[0], op.args[1], value, axis)
    if op.short in _FUSED:
        found = _product(graph, op, op.args[1], op.args[2], value, axis)
        plain = (op.kwargs.get("alpha", 1), op.kwargs.get("beta", 1)) == (1, 1)
        fixed = None if plain else "its product is scaled"
        return found and replace(found, bias=_id(op.args[0]), fixed=found.fixed or fixed)
    if op.short in _CONVOLUTIONS and op.args[0] == Ref(value):
        return _convolution(graph, op, axis)
    return None


def _product(graph: Graph, op: Op, a: Any, b: Any, value: int, axis: int) -> _Contraction | None:
    """Read A @ B with ``value`` on either side."""
    if a == Ref(value) and axis == -1:
        dim = -2 if len(graph.values[b.value].shape) > 1 else -1
        fixed = "it has a bias of its own kind" if op.short == "_grouped_mm" and len(op.inputs) > 3 else None
        return _Contraction(weight=b.value, dim=dim, fixed=fixed)
    if b == Ref(value) and axis == -2:
        return _Contraction(weight=a.value, dim=-1, fixed="its weight stands on the left")
    return None


def _convolution(graph: Graph, op: Op, axis: int) -> _Contraction | None:
    weight = op.args[1].value
    ndim = len(graph.values[weight].shape)
    if axis != 1 - ndim:
        return None
    whole = op.short == "convolution"  # as inference mode does not leave it: with all arguments
    bias, groups = _id(argument(op, 2, "bias")), argument(op, 8 if whole else 6, "groups") or 1
    if op.short in _TRANSPOSED or (whole and op.args[6]):
        # the channels lie along the first axis, group after group
        fixed = "a transposed convolution overlaps less at its borders"
        return _Contraction(weight=weight, dim=-ndim, bias=bias, fixed=fixed)
    padding = argument(op, 4, "padding") or 0
    padded = padding == "same" or (padding != "valid" and any(padding if isinstance(padding, tuple) else (padding,)))
    fixed = "it pads with zeros where it would have to pad with the bias" if padded else None
    return _Contraction(weight=weight, dim=1 - ndim, bias=bias, groups=groups, fixed=fixed)


def _id(argument: Any) -> int | None:
    return argument.value if isinstance(argument, Ref) else None


def _parameter(graph: Graph, value: int, axis: int) -> tuple[int, int] | None:
    """Return the parameter that a value is a view of, with the axis there that ``axis`` is here; None if no such."""
    while (op := graph.producer(value)) is not None:
        before = _before(graph, op, value, axis) if op.short in VIEWS and op.inputs else None
        if before is None:
            return None
        value, axis = op.inputs[0], before
    record = graph.values[value]
    return (value, axis) if record.kind is ValueKind.PARAM and record.floating else None


def _before(graph: Graph, op: Op, out: int, axis: int) -> int | None:
    """Return the axis of a view's operand; for transposes without running them, as weights are large."""
    ndim = len(graph.values[out].shape)
    if op.short not in _TRANSPOSES:
        found = carriers(graph, op, out, axis)
        return found[0][1] if found and len(found) == 1 else None
    if op.short == "permute":
        order = op.args[1]
    elif op.short == "numpy_T":
        order = tuple(reversed(range(ndim)))
    else:
        first, second = (op.args[1], op.args[2]) if len(op.args) > 2 else (-2, -1)
        order = list(range(ndim))
        order[first], order[second] = order[second], order[first]
    return order[axis] % ndim - ndim


def _added(graph: Graph, op: Op, found: _Contraction) -> tuple[int | None, int, str | None]:
    """Return the parameter that is added to a product, the op that adds it, and why it cannot take more."""
    if found.bias is not None:
        source = _vector(graph, found.bias)
        return source, op.id, found.fixed or (None if source is not None else "its bias is no parameter")
    readers = list(graph.consumers(op.outputs[0]))
    if len(readers) == 1 and readers[0].short in ops.ADD and readers[0].kwargs.get("alpha", 1) == 1:
        for other in readers[0].inputs:
            source = _vector(graph, other) if other != op.outputs[0] else None
            if source is not None and graph.values[other].shape[-1:] == graph.values[op.outputs[0]].shape[-1:]:
                return source, readers[0].id, found.fixed
    return None, op.id, found.fixed


def _vector(graph: Graph, value: int) -> int | None:
    """Return the one-dimensional parameter that a value is."""
    if len(graph.values[value].shape) != 1:
        return None
    source = _parameter(graph, value, -1)
    return source[0] if source is not None and len(graph.values[source[0]].shape) == 1 else None
