"""Whether what a model makes of one sample depends on the other samples of its batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normwise.errors import NotKnown
from normwise.facts import mixing
from normwise.facts.changed_inputs import replaced
from normwise.facts.differences import AGREE, DIFFER, Introduced, introduced
from normwise.facts.sites import Site
from normwise.graph import aligned
from normwise.rendering import both
from normwise.targets import inputs

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Partners", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partners:
    """What happened to the first sample when all others were replaced, in eval mode."""

    samples: int
    change: float = 0.0  # of the first sample's outputs, relative to their root mean square
    norms: tuple[Introduced, ...] = ()  # that moved the first sample although its input had not moved
    sites: tuple[Site, ...] = ()  # all norms that reduce the same axes
    mixer: mixing.Mixer | None = None  # where no norm did: the first op
    change_held: Callable[[], float] | None = None  # with the norms held where their input is still; costs a pass


_NO_BATCH = both("the batch axis of the inputs cannot be told", "无法判断输入的批次轴")
_NO_OTHERS = both("the inputs hold no other values to put in the place of a sample", "输入中没有可替换样本的其他值")
_NO_OUTPUT = both("no output of the model has a batch axis", "模型没有带批次轴的输出")


def read(facts: Facts) -> Partners:
    """Replace all samples but the first, in one run; two where the example inputs hold one sample.

    Raises:
        NotKnown: the batch cannot be told, or nothing comparable came out.
    """
    facts = facts.exact
    sites = facts.sites
    samples = inputs.size_of(facts.target, "batch")
    if samples == 1:
        # a batch of two costs a pass more: only where a norm could mix it
        if not any(_spans_first_axis(facts, site) for site in sites):
            return Partners(samples=1)
        call = inputs.with_batch(facts.target, 2)
        if call is None:
            raise NotKnown(_NO_BATCH)
        from normwise.facts.exact import with_inputs

        facts, samples = with_inputs(facts, call), 2
    if samples < 2:
        raise NotKnown(_NO_BATCH)
    return _compare(facts, samples)


def _spans_first_axis(facts: Facts, site: Site) -> bool:
    spec, call = site.row.spec, site.calls[0]
    return spec is None or (call.uses_batch and min(spec.axes, default=0) <= -len(facts.graph.values[call.input].shape))


def _compare(facts: Facts, samples: int) -> Partners:
    call = replaced(facts.target, "batch", slice(1, None))
    if call is None:
        raise NotKnown(_NO_OTHERS)
    base = facts.runs.base
    protected = torch.arange(samples) == 0
    common = facts.target, "batch", samples, protected, base
    # the outputs alone acquit nearly every model; only a suspect is run again with all its values kept
    other = facts.runs.variant(*call, wanted=base.graph.outputs)
    change = mixing.output_change(*common, other, aligned(base.graph, other.graph))
    if change is not None and change <= AGREE:
        return Partners(samples=samples, change=change)
    other = facts.runs.variant(*call)
    pairs = aligned(base.graph, other.graph)
    change = mixing.output_change(*common, other, pairs)
    if change is None:
        raise NotKnown(_NO_OUTPUT)
    found = tuple(introduced(facts.norm_calls.norms, base, other, pairs, samples, protected))
    if not found and change < DIFFER:
        return Partners(samples=samples, change=change)
    if not found:
        first = mixing.mixer(base, other, pairs, samples, protected)
        return Partners(samples=samples, change=change, mixer=first)
    calls = mixing.like_calls([f.call for f in found], facts.norm_calls.norms, base.graph)
    instead, wanted = mixing.holding(found, calls, base, pairs)
    wanted |= set(other.graph.outputs)

    @functools.cache
    def change_held() -> float:
        repaired = facts.runs.variant(*call, wanted=wanted, instead=instead)
        return mixing.output_change(*common, repaired, pairs) or 0.0

    if not mixing.moved(change, change_held):
        return Partners(samples=samples, change=change)
    sites = mixing.sites_of_calls(facts.sites, calls)
    return Partners(samples=samples, change=change, norms=found, sites=sites, change_held=change_held)
