"""Which ops matter: those on which an output, a decision of the model's code, or its next call depends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from normwise.facts import vocabulary as ops
from normwise.graph import ALIAS, Graph, Op, ValueKind

__all__ = ["ends", "live_uses"]

# what reads a value on the host: the program may go another way
_ASKS = frozenset({"is_nonzero", "_local_scalar_dense", "item", "equal", "allclose"})


def ends(graph: Graph) -> frozenset[int]:
    """Return the ops whose effect leaves the graph otherwise than by an output: decisions, and what is kept."""
    return frozenset(op.id for op in graph.ops if op.short in _ASKS or _is_kept(graph, op))


def live_uses(graph: Graph, ends: frozenset[int]) -> Mapping[int, list[Op]]:
    """Return the ops that read each value, those apart on which nothing depends."""
    live, uses = _live(graph, ends), defaultdict[int, list[Op]](list)
    for op in graph.ops:
        if op.id in live:
            for value in dict.fromkeys(op.inputs):
                uses[value].append(op)
    return uses


def _live(graph: Graph, ends: frozenset[int]) -> set[int]:
    """Return the ops on which an output of the model, a decision of its code, or its next call depends."""
    pending = [*graph.outputs, *(v for op in ends for v in graph.ops[op].inputs)]
    live, seen = set(ends), set(pending)
    while pending:
        op = graph.producer(pending.pop())
        if op is None or op.id in live:
            continue
        live.add(op.id)
        fresh = [v for v in op.inputs if v not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return live


def _is_kept(graph: Graph, op: Op) -> bool:
    """Whether an op overwrites a buffer, a parameter or an input, which the next call or the caller may read."""
    if not op.name.endswith("_") or not op.inputs:
        return False
    value = op.inputs[0]
    while (made := graph.producer(value)) is not None:
        if made.short not in ops.VIEW and made.name != ALIAS and not made.name.endswith("_"):
            return False
        value = made.inputs[0]
    return graph.values[value].kind is not ValueKind.CONST
