"""Streams that start from a constant: learned queries, latents, a zero target.

The first residual adds of such a stream (DETR's decoder, a perceiver) have a skip that no input reached, so the
taint of activations has not begun. Such a skip is told from a position table or a bias by its branch: the add is the
only one at which it meets an activation, and that activation was computed from it through a linear map or attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from normwise.facts import vocabulary as ops
from normwise.graph import Graph, Op, ValueKind

__all__ = ["origins"]

_MAPS = ops.LINEAR | ops.CONV | ops.MATMUL | ops.ATTENTION
_NORMS = frozenset({"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"})
_STEPS = 64


def origins(graph: Graph, act: Sequence[bool]) -> frozenset[int]:
    """Return the constants in which a residual stream starts.

    Args:
        graph: the traced program.
        act: by value, whether it is an activation.
    """
    meetings: dict[int, list[tuple[Op, int]]] = {}
    for op in graph.ops:
        pair = _meeting(graph, act, op)
        if pair is not None:
            meetings.setdefault(pair[0], []).append((op, pair[1]))
    found: set[int] = set()
    for constant, met in meetings.items():
        op, branch = met[0]
        if len(met) == 1 and _ends_in_a_map(graph, act, branch) and _feeds(graph, constant, branch, op.id):
            found.add(_origin(graph, constant))
    return frozenset(found)


def _meeting(graph: Graph, act: Sequence[bool], op: Op) -> tuple[int, int] | None:
    """Return the constant and the activation of an add of the two, of one shape."""
    if op.short not in ops.ADD or len(set(op.inputs)) != 2:
        return None
    constant, branch = sorted(op.inputs, key=lambda v: act[v])
    held, met = graph.values[constant], graph.values[branch]
    if act[constant] or not act[branch] or not held.floating or len(met.shape) < 2 or 1 in held.shape[-2:-1]:
        return None
    same = held.shape == met.shape or held.shape[-2:] == met.shape[-2:] == held.shape
    return (constant, branch) if same and graph.values[op.outputs[0]].shape == met.shape else None


def _ends_in_a_map(graph: Graph, act: Sequence[bool], value: int) -> bool:
    """Whether a value is what a linear map or attention gave, perhaps normalised, and nothing else reads it."""
    for _ in range(_STEPS):
        op = graph.producer(value)
        if op is None or len(list(graph.consumers(value))) > 1:
            return False
        if op.short in _MAPS:
            return True
        inputs = [i for i in op.inputs if act[i]]
        if len(inputs) != 1 or op.short not in ops.POINTWISE | ops.VIEW | _NORMS:
            return False
        value = inputs[0]
    return False


def _feeds(graph: Graph, constant: int, branch: int, before: int) -> bool:
    """Whether a branch was computed from a constant through a linear map or attention."""
    pending, seen = [(constant, False)], set()
    while pending:
        value, mapped = pending.pop()
        if value == branch and mapped:
            return True
        if (value, mapped) in seen:
            continue
        seen.add((value, mapped))
        for op in graph.consumers(value):
            if op.id < before:
                pending.extend((o, mapped or op.short in _MAPS) for o in op.outputs)
    return False


def _origin(graph: Graph, value: int) -> int:
    """Return the constant from which the skip came, back over views, norms and earlier residual adds of constants."""
    nearest = value
    for _ in range(_STEPS):
        op = graph.producer(value)
        back = _step(graph, op) if op is not None else None
        if back is None:
            return value
        nearest, value = value, back
        if graph.values[value].kind is ValueKind.PARAM:  # the parameter's copy for this batch, not the parameter
            return nearest
    return value


def _step(graph: Graph, op: Op) -> int | None:
    if op.short in ops.VIEW | ops.DROPOUT | _NORMS:
        return op.inputs[0] if op.inputs else None
    if op.short in ops.MUL:
        full = [i for i in op.inputs if graph.values[i].shape == graph.values[op.outputs[0]].shape]
        return full[0] if len(full) == 1 else None
    if op.short in ops.ADD and len(set(op.inputs)) == 2:
        one, two = op.inputs[:2]
        fed = [a for a, b in ((one, two), (two, one)) if _feeds(graph, a, b, op.id) and not _feeds(graph, b, a, op.id)]
        return fed[0] if len(fed) == 1 else None
    return None
