"""Norms whose statistics are detached: the gradient through mean and variance is cut openly.

A `detach` between the input of a norm and its normalized value is an op of the trace. The norm is replayed in float64
on random rows with that op and without it; the difference of the two gradients is what it cuts. A detached factor that
the norm cancels anyway (a scale against overflow) cuts nothing, a norm of which no part is differentiated is a
stop-gradient, and what is detached behind the normalized value (the factor of AdaNorm, a straight-through estimate) is
not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normwise.errors import NotKnown
from normwise.facts.calls import NormCall
from normwise.facts.gradients import distance
from normwise.facts.rows import alike
from normwise.facts.sites import Site

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Detached", "detached"]

_SEED = 20261129
_STEPS = 200  # ops of one norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached:
    """Norms alike that cut their own gradient."""

    sites: tuple[Site, ...]
    error: float  # relative difference of the input's gradient from that of the formula


def detached(facts: Facts) -> Iterator[Detached]:
    """Yield the hand-written norms in which a `detach` changes the gradient, with how much."""
    hand_written = [s for s in facts.sites if not s.row.native]
    cut = [s for s in hand_written if any(_cuts(facts, c) for c in s.calls)]
    for group in alike(cut, facts.recording):
        try:
            error = _error(facts, group[0].calls[0])
        except NotKnown:
            continue
        if error is not None:
            yield Detached(sites=group, error=error)


def _cuts(facts: Facts, call: NormCall) -> tuple[int, ...]:
    """Return the ids of the ops between input and normalized value that detach."""
    graph, pending, seen = facts.graph, [call.core], set[int]()
    found: set[int] = set()
    while pending and len(seen) < _STEPS:
        value = pending.pop()
        op = graph.producer(value)
        if value == call.input or value in seen or op is None:
            continue
        seen.add(value)
        if op.short == "detach":
            found.add(op.id)
        pending.extend(op.inputs)
    return tuple(sorted(found))


def _error(facts: Facts, call: NormCall) -> float | None:
    """Return the relative error of the gradient; None where the whole norm is cut off."""
    replay, shape = facts.rows.double, facts.graph.values[call.input].shape
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").requires_grad_()
    gradients: list[torch.Tensor] = []
    direction: torch.Tensor | None = None
    with torch.enable_grad():
        for replayed in (replay, replay.opening(_cuts(facts, call))):
            y = replayed(call.core, {call.input: x}, grad=True)
            if not y.requires_grad:
                return None
            if direction is None:
                direction = torch.randn(y.shape, generator=generator, dtype=torch.float64, device="cpu")
            gradients.extend(torch.autograd.grad(y, x, direction))
    return distance(*gradients)
