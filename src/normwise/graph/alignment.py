"""Finds the ops of one run again in another run of the same model."""

from __future__ import annotations

from collections import Counter

from normwise.graph.data import Graph

__all__ = ["Key", "aligned", "keys"]

Key = tuple[str, int, str, int]
"""The module call an op runs in (path, ordinal), its name, and its order among those."""


def keys(graph: Graph) -> dict[int, Key]:
    """Return what identifies each op in every run of the model, by op id."""
    counts: Counter[tuple[str, int, str]] = Counter()
    found = {}
    for op in graph.ops:
        call = graph.calls[op.call]
        key = (call.path, call.ordinal, op.short)
        found[op.id] = (*key, counts[key])
        counts[key] += 1
    return found


def aligned(first: Graph, second: Graph) -> dict[int, int]:
    """Return the value of ``second`` for each value of ``first`` that the same op, or nobody, made in both.

    Extra ops in one run (a counter that only training advances) do not disturb the others.
    """
    there = {key: op for op, key in keys(second).items()}
    found = _given(first, second)
    for op, key in keys(first).items():
        other = there.get(key)
        if other is None:
            continue
        a, b = first.ops[op].outputs, second.ops[other].outputs
        if len(a) == len(b):
            found.update(zip(a, b, strict=True))
    return found


def _given(first: Graph, second: Graph) -> dict[int, int]:
    """Match parameters, buffers and inputs by their names."""
    there = {(v.kind, n): v.id for v in second.values if v.producer < 0 for n in v.names}
    found = {}
    for value in first.values:
        if value.producer < 0 and value.names and (other := there.get((value.kind, value.names[0]))) is not None:
            found[value.id] = other
    return found
