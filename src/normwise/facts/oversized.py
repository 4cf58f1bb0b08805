"""Gains far above those of their siblings, and the attention that they alone saturate."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normwise.errors import NotKnown
from normwise.facts.gains import Gain
from normwise.facts.logits import ENTROPY, HEADS, SPREAD, again
from normwise.facts.repairs import respecified
from normwise.facts.runs import Run
from normwise.spec import Kind
from normwise.targets.target import InputsFrom

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["LEAST", "SIBLINGS", "SIGMAS", "TIMES", "Driven", "Oversized", "driven", "oversized"]

SIBLINGS = 5  # fewer have no distribution
SIGMAS = 8.0
TIMES = 4.0
# The median deviation of equal gains is 0; 5 % of difference is not worth a deviation (in logarithms).
LEAST = 0.05
_TO_SIGMA = 1.4826  # from the median absolute deviation of a normal distribution to its deviation
_TRIED = 2  # of the largest gains: each costs a pass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Oversized:
    """One gain far above its siblings."""

    gain: Gain
    siblings: int
    median: float
    times: float
    sigmas: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Driven:
    """A saturated attention that is not saturated with the gain at the median of its siblings."""

    by: Gain
    path: str
    before: float  # standard deviation of a query's logits, mean over the heads
    after: float


def oversized(facts: Facts) -> tuple[Oversized, ...]:
    """Return the gains of a trained or loaded model that stand far above their siblings."""
    if facts.gains.trained is False and not facts.gains.loaded:
        return ()
    roles: dict[Hashable, list[Gain]] = defaultdict(list)
    for gain in facts.gains.of(Kind.LAYER, Kind.RMS):
        if gain.rms > 0:
            roles[gain.role].append(gain)
    return tuple(found for gains in roles.values() if len(gains) >= SIBLINGS for found in _far_above(gains))


def _far_above(gains: list[Gain]) -> Iterator[Oversized]:
    logs = [math.log(g.rms) for g in gains]
    middle = statistics.median(logs)
    deviation = max(LEAST, _TO_SIGMA * statistics.median(abs(size - middle) for size in logs))
    for gain, size in zip(gains, logs, strict=True):
        times, sigmas = math.exp(size - middle), (size - middle) / deviation
        if times > TIMES and sigmas > SIGMAS:
            yield Oversized(gain=gain, siblings=len(gains) - 1, median=math.exp(middle), times=times, sigmas=sigmas)


def driven(facts: Facts) -> Mapping[int, Driven]:
    """Return by op the attentions without a norm on queries and keys that an oversized gain alone saturates."""
    target = facts.target
    if not target.weights.magnitudes_count or target.inputs_from is InputsFrom.NONE:
        return {}
    try:
        largest = sorted(facts.oversized, key=lambda o: -o.times)[:_TRIED]
    except NotKnown:
        return {}
    found: dict[int, Driven] = {}
    for one in largest:
        try:
            found |= _driven(facts, one)
        except (NotKnown, ValueError):  # no attention that can be read, or a norm that cannot be repaired
            continue
    return found


def _driven(facts: Facts, one: Oversized) -> dict[int, Driven]:
    hit = [a for a in facts.attentions if a.bare and a.saturated(SPREAD, ENTROPY) >= HEADS]
    first = min(call.op.id for call in one.gain.calls)
    hit = [a for a in hit if a.op > first]
    if not hit or not one.gain.direct:
        return {}
    run = _at_the_median(facts, one, {value for a in hit for value in facts.graph.ops[a.op].inputs + a.operands})
    found: dict[int, Driven] = {}
    for attention in hit:
        measured = again(facts, attention, run)
        if measured is not None and measured.saturated(SPREAD, ENTROPY) < HEADS:
            before, after = (sum(m.spread) / len(m.spread) for m in (attention.measured, measured))
            if after <= SPREAD:
                found[attention.op] = Driven(by=one.gain, path=attention.path, before=before, after=after)
    return found


def _at_the_median(facts: Facts, one: Oversized, wanted: set[int]) -> Run:
    offset = one.gain.offset

    def smaller(stored: torch.Tensor) -> torch.Tensor:
        return (stored + offset) / one.times - offset

    return respecified(facts, one.gain.calls, lambda spec: spec, wanted, weight=smaller)
