"""The factors that a model computes for its norms, as they were in the example run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normwise.facts import vocabulary as ops
from normwise.facts.calls import NormCall
from normwise.facts.sites import Site
from normwise.spec import Modulation

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["silenced"]

_STEPS = 12  # views and sums with a number between a matrix and the factor it makes


def silenced(facts: Facts) -> tuple[Site, ...]:
    """Return the norms whose computed factor is exactly 0 in every element, whatever the condition.

    A factor that is 0 because the example's condition is 0 says nothing of the model.

    Raises:
        NotKnown: the factors were not kept, or effort is "read".
    """
    modulated = [s for s in facts.sites if s.row.spec is not None and s.row.spec.modulation is not Modulation.NONE]
    return tuple(s for s in modulated if all(_zero(facts, c) for c in s.calls))


def _zero(facts: Facts, call: NormCall) -> bool:
    factor = _factor(facts, call)
    if factor is None:
        return False
    base = facts.runs.base
    if bool((base.of(factor) != 0).any()):
        return False
    values = facts.graph.values  # an index says which row of a table it is, also where it is 0
    return any(not values[v].floating or bool((base.of(v) != 0).any()) for v in _made_from(facts, factor))


def _factor(facts: Facts, call: NormCall) -> int | None:
    """Return the value computed from data by which a core is multiplied."""
    graph, chain = facts.graph, {call.core}
    for member in sorted(call.members):
        op = graph.ops[member]
        if not chain & set(op.inputs) or not op.outputs:
            continue
        others = [i for i in op.inputs if i not in chain and facts.flow.act[i]]
        if op.short in ops.MUL and others:
            return others[0]
        chain.update(op.outputs)
    return None


def _made_from(facts: Facts, value: int) -> list[int]:
    """Return the data that the matrix behind a factor is given."""
    graph = facts.graph
    for _ in range(_STEPS):
        op = graph.producer(value)
        if op is None:
            return []
        data = [i for i in op.inputs if facts.flow.data[i]]
        if len(data) < len(op.inputs) or op.short not in ops.VIEW | ops.ADD or len(data) != 1:
            return data
        value = data[0]
    return []
