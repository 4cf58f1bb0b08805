"""Which operands carry a feature axis into a result: the linear ops through which a mean over that axis passes.

``carriers`` answers for one result and one of its axes (negative) with the operands, and their axes, whose centring
centres the result: the result is linear in them, and every element of the result's axis comes from the same element
of theirs. A bilinear op (a linear map, an attention) has them on one side only. What is not known is None: an unknown
op never carries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from normwise.conversions._dataflow.operands import argument
from normwise.conversions._dataflow.views import Carried, moved
from normwise.facts import vocabulary as ops
from normwise.graph import Graph, Op, Ref

__all__ = ["SPATIAL", "carriers", "is_constant", "is_zero"]

# the same elements moved to other places, none along the axis; found by running the op on an index
_MOVES = ops.VIEW - {"gather", "index", "index_select", "masked_select", "take_along_dim", "as_strided"}
_SAME = ops.CAST | {"neg", "negative"}
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros", "zero"})
SPATIAL = frozenset(
    [f"{op}{n}d" for op in ("avg_pool", "adaptive_avg_pool", "upsample_nearest") for n in (1, 2, 3)]
    + ["_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"]
    + ["upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"]
)
"""Poolings and interpolations that are linear in space, each channel by itself."""


def carriers(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Return what carries ``axis`` of the result ``out`` of ``op``; an empty tuple for a result that is zero."""
    if is_zero(op):
        return ()
    if not graph.values[out].floating:
        return None
    rule = _RULES.get(op.short)
    if rule is None and op.short in _MOVES:
        rule = moved
    found = rule(graph, op, out, axis) if rule is not None else None
    if found is None:
        return None
    size = graph.values[out].shape[axis]
    for value, at in found:
        shape = graph.values[value].shape
        if len(shape) < -at or shape[at] != size or not graph.values[value].floating:
            return None
    # an operand that also enters elsewhere, such as x in x * x, is not carried
    return found if all(op.inputs.count(v) == sum(v == w for w, _ in found) for v, _ in found) else None


def is_zero(op: Op) -> bool:
    """Whether an op makes zeros, which have a mean of zero along every axis."""
    return op.short in _ZEROS


def is_constant(graph: Graph, axis: int, value: int) -> bool:
    """Whether a tensor operand is one number along ``axis`` of the result that it is broadcast to."""
    shape = graph.values[value].shape
    return len(shape) < -axis or shape[axis] == 1


def _first(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    return ((op.inputs[0], axis),) if op.inputs else None


def _dropped(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry a dropout that drops nothing."""
    idle = argument(op, 2, "train") is False or argument(op, 1, "p") == 0
    return _first(graph, op, out, axis) if idle else None


def _scalar(item: Any) -> bool:
    return isinstance(item, (int, float)) and not isinstance(item, bool)


def _sum(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry a + alpha * b; adding a number, or one number a token, would leave a mean."""
    if len(op.args) < 2 or not all(isinstance(a, Ref) for a in op.args[:2]):
        scalars = [a for a in op.args[:2] if not isinstance(a, Ref)]
        return _first(graph, op, out, axis) if scalars == [0] or scalars == [0.0] else None
    operands = op.args[0].value, op.args[1].value
    if any(graph.values[i].kind == "const" and graph.values[i].scalar == 0 for i in operands):
        return tuple((i, axis) for i in operands if graph.values[i].scalar != 0)
    return tuple((i, axis) for i in operands)


def _product(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry x * s and x / s, where s is one number a token."""
    args = op.args[:2]
    if op.kwargs.get("rounding_mode") is not None or len(op.args) < 2:
        return None
    tensors = [a.value for a in args if isinstance(a, Ref)]
    if not all(isinstance(a, Ref) or _scalar(a) for a in args) or not tensors:
        return None
    size = graph.values[out].shape[axis]
    wide = [i for i in tensors if not is_constant(graph, axis, i) or size == 1]
    if len(wide) != 1 or (op.short in ops.DIV and not (isinstance(args[0], Ref) and args[0].value == wide[0])):
        return None
    return ((wide[0], axis),)


def _joined(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry a concatenation along another axis."""
    shape = graph.values[out].shape
    dim = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
    if not isinstance(dim, int) or dim % len(shape) == axis % len(shape):
        return None
    return tuple((i, axis) for i in op.inputs if graph.values[i].shape != (0,))  # a cache before its first token


def _stacked(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    ndim = len(graph.values[out].shape)
    dim = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
    if not isinstance(dim, int) or dim % ndim == axis % ndim:
        return None
    at = axis if dim % ndim < axis % ndim else axis + 1
    return tuple((i, at) for i in op.inputs) if at < 0 else None


def _reduced(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry a mean or sum over other axes."""
    source = op.inputs[0]
    ndim = len(graph.values[source].shape)
    dims = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
    if dims is None or dims == () or len(op.inputs) != 1:
        return None
    gone = {d % ndim for d in (dims if isinstance(dims, (list, tuple)) else (dims,))}
    kept = [d for d in range(ndim) if d not in gone]
    if len(graph.values[out].shape) == ndim:  # keepdim
        return ((source, axis),) if ndim + axis in kept else None
    return ((source, kept[axis] - ndim),) if len(kept) >= -axis else None


def _where(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry a choice between tokens."""
    if len(op.args) != 3 or not isinstance(op.args[0], Ref) or not is_constant(graph, axis, op.args[0].value):
        return None
    found: list[tuple[int, int]] = []
    for choice in op.args[1:]:
        if isinstance(choice, Ref):
            if graph.values[choice.value].scalar == 0 and graph.values[choice.value].numel == 1:
                continue
            found.append((choice.value, axis))
        elif choice != 0:
            return None
    return tuple(found)


def _filled(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry what sets whole tokens to zero."""
    mask, number = op.args[1], op.args[2]
    if isinstance(number, Ref):
        number = graph.values[number.value].scalar
    if not isinstance(mask, Ref) or number != 0 or not is_constant(graph, axis, mask.value):
        return None
    return _first(graph, op, out, axis)


def _scattered(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry what replaces whole tokens by the rows of another tensor (image features among text)."""
    mask, source = op.args[1], op.args[2]
    if axis != -1 or not isinstance(mask, Ref) or not isinstance(source, Ref):
        return None
    made = graph.producer(mask.value)
    while made is not None and made.short in ops.CAST and made.inputs:
        made = graph.producer(made.inputs[0])
    if is_constant(graph, axis, mask.value):
        return ((op.inputs[0], axis), (source.value, -1))
    whole = made is not None and made.short in ("expand", "expand_as") and graph.values[made.inputs[0]].shape[-1] == 1
    return ((op.inputs[0], axis), (source.value, -1)) if whole else None


def _indexed(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry x[i, :, j] with indices before the axis only: those behind the last of them stay."""
    source, indices = op.inputs[0], list(op.args[1])
    while indices and indices[-1] is None:
        indices.pop()
    if not indices:
        return None
    masks = [graph.values[i.value] for i in indices if isinstance(i, Ref)]
    more = sum(len(mask.shape) - 1 for mask in masks if mask.dtype in ("bool", "uint8"))  # a mask spans all its axes
    before = len(indices) + more
    return ((source, axis),) if len(graph.values[source].shape) - before >= -axis else None


def _selected(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    ndim = len(graph.values[out].shape)
    return _first(graph, op, out, axis) if op.args[1] % ndim != axis % ndim else None


def _added_rows(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry index_add and index_copy: whole rows of one tensor into another."""
    ndim = len(graph.values[out].shape)
    if not isinstance(op.args[1], int) or op.args[1] % ndim == axis % ndim or not isinstance(op.args[3], Ref):
        return None
    return ((op.inputs[0], axis), (op.args[3].value, axis))


def _embedded(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    return ((op.inputs[0], -1),) if axis == -1 else None


def _bias(op: Op) -> Carried:
    bias = argument(op, 2, "bias")
    return ((bias.value, -1),) if isinstance(bias, Ref) else ()


def _linear(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    if axis != -1 or len(graph.values[op.inputs[1]].shape) != 2:
        return None
    return ((op.inputs[1], -2), *_bias(op))


def _convolved(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry the channels of a convolution that mixes all of them."""
    weight = op.inputs[1]
    ndim, transposed = len(graph.values[weight].shape), "transpose" in op.short
    groups = argument(op, 6, "groups")
    if axis != 1 - ndim or groups not in (None, 1) or len(graph.values[out].shape) != ndim:
        return None
    return ((weight, 1 - ndim if transposed else -ndim), *_bias(op))


def _multiplied(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    return _of_product(graph, op.args[0], op.args[1], axis)


def _of_product(graph: Graph, a: Any, b: Any, axis: int) -> Carried | None:
    """Carry A @ B: columns come from B, rows from A."""
    if not isinstance(a, Ref) or not isinstance(b, Ref) or len(graph.values[b.value].shape) < 2:
        return None
    if axis == -1:
        return ((b.value, -1),)
    return ((a.value, -2),) if axis == -2 and len(graph.values[a.value].shape) >= 2 else None


def _fused(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry c + A @ B."""
    product = _of_product(graph, op.args[1], op.args[2], axis)
    if product is None or op.kwargs.get("beta", 1) == 0:
        return product
    return (*product, (op.inputs[0], axis))


def _summed(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry an einsum: the axis belongs to exactly one operand."""
    equation, operands = op.args[0], op.args[1]
    if not isinstance(equation, str) or "->" not in equation:
        return None
    left, right = equation.replace(" ", "").split("->")
    named = right.rpartition("...")[2]  # what an ellipsis stands for has no letters
    if len(named) < -axis:
        return None
    letter = named[axis]
    terms = list(zip(left.split(","), operands, strict=True))
    holding = [(term, ref) for term, ref in terms if letter in term]
    if len(holding) != 1 or right.count(letter) != 1 or holding[0][0].count(letter) != 1:
        return None
    term, ref = holding[0]
    behind = term.rpartition("...")[2]
    return ((ref.value, behind.index(letter) - len(behind)),) if letter in behind else None


def _attended(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    return ((op.inputs[2], -1),) if axis == -1 else None


def _spatial(graph: Graph, op: Op, out: int, axis: int) -> Carried | None:
    """Carry the channels of a pooling or interpolation, which lie before the spatial axes."""
    spatial = int(next(c for c in op.short if c.isdigit()))
    return _first(graph, op, out, axis) if axis == -1 - spatial else None


_RULES: dict[str, Callable[[Graph, Op, int, int], Carried | None]] = {
    **dict.fromkeys(_SAME, _first),
    **dict.fromkeys(ops.DROPOUT, _dropped),
    **dict.fromkeys(("add", "sub", "subtract"), _sum),
    **dict.fromkeys(ops.MUL | ops.DIV, _product),
    **dict.fromkeys(("cat", "concat"), _joined),
    **dict.fromkeys(("index_add", "index_copy"), _added_rows),
    **dict.fromkeys(("matmul", "mm", "bmm", "_grouped_mm"), _multiplied),
    **dict.fromkeys(("addmm", "baddbmm"), _fused),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _convolved
    ),
    **dict.fromkeys(ops.ATTENTION, _attended),
    **dict.fromkeys(SPATIAL, _spatial),
    "stack": _stacked,
    "mean": _reduced,
    "sum": _reduced,
    "where": _where,
    "masked_fill": _filled,
    "masked_scatter": _scattered,
    "index": _indexed,
    "index_select": _selected,
    "embedding": _embedded,
    "linear": _linear,
    "einsum": _summed,
}
