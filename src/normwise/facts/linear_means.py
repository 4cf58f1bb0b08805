"""Means of a value over some axes, however they are written, compared by their structure."""

from __future__ import annotations

from collections.abc import Callable

from normwise.facts import vocabulary as ops
from normwise.graph import Graph, Op, Ref

__all__ = ["centred_already"]

_STEPS = 8
# what leaves a value centred over its real elements: zeros where nothing counts
_KEEPS_CENTRE = ops.CAST | frozenset({"masked_fill", "where"})
_SAME_CODE = 4  # ops that two spellings of one divisor may be long
# a mean: its source, and how it was taken
Mean = tuple[int, tuple[object, ...]]


def centred_already(graph: Graph, op: Op, value: int, mean: int, at: Callable[[int], int]) -> bool:
    """Whether ``value`` is x - mean(x) and ``mean`` is its own mean, taken the same way within one module call.

    Args:
        graph: the traced program.
        op: value - mean.
        value: what is centred again.
        mean: what is subtracted.
        at: the value that stands for another one.
    """
    again = _mean(graph, mean, at)
    if again is None or again[0] != value:
        return False
    first = graph.producer(value)
    while first is not None and first.short in _KEEPS_CENTRE and first.outputs:
        whole = graph.values[value].shape
        kept = [i for i in first.inputs if graph.values[i].floating and graph.values[i].shape == whole]
        first = graph.producer(at(kept[0])) if kept else None
    if first is None or first.short not in ops.SUB - {"rsub"} or first.call != op.call:
        return False
    refs = [at(a.value) for a in first.args if isinstance(a, Ref)]
    before = _mean(graph, refs[1], at) if len(refs) == 2 and first.kwargs.get("alpha", 1) == 1 else None
    return before is not None and before == (refs[0], again[1])


def _mean(graph: Graph, value: int, at: Callable[[int], int]) -> Mean | None:
    """Return the source of a mean and the steps that took it, or None if the value is no mean."""
    steps: list[tuple[str, object]] = []
    for _ in range(_STEPS):
        op = graph.producer(value)
        if op is None or not op.inputs:
            return None
        how = tuple(_spelled(graph, a, at) for a in op.args[1:])
        if op.short in ("mean", "sum"):
            averaged = op.short == "mean" or any(name in ops.DIV | ops.MUL for name, _ in steps)
            return (at(op.inputs[0]), (*steps, (op.short, how, repr(op.kwargs)))) if averaged else None
        if op.short not in ops.VIEW | ops.DIV | ops.MUL or not isinstance(op.args[0], Ref):
            return None
        if op.short not in ops.CAST:
            steps.append((op.short, how))
        value = at(op.inputs[0])
    return None


def _spelled(graph: Graph, argument: object, at: Callable[[int], int], depth: int = _SAME_CODE) -> object:
    """Return what tells an argument from others: for a tensor the code that made it, the count of a mask twice."""
    if not isinstance(argument, Ref):
        return repr(argument)
    value = at(argument.value)
    op = graph.producer(value)
    if op is None or depth == 0:
        return value
    return (op.name, *(_spelled(graph, a, at, depth - 1) for a in op.args), repr(sorted(op.kwargs.items())))
