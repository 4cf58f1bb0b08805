"""Every execution of a norm in a recorded run: native, hand-written, frozen."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from normwise.facts import native
from normwise.facts.calls import NormCall
from normwise.facts.derived import derived_call
from normwise.facts.flow import Flow
from normwise.facts.frozen import frozen_calls
from normwise.facts.homogeneity import candidates
from normwise.facts.native_calls import native_call
from normwise.facts.records import Evidence
from normwise.facts.replay import Replayer
from normwise.graph import Recording

__all__ = ["NormCall", "NormCalls", "find"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormCalls:
    """The norms of a run, and what looks like a norm but normalises no activation."""

    norms: tuple[NormCall, ...]
    probabilities: tuple[NormCall, ...]  # router weights, Sinkhorn, max-scaling
    weights: tuple[NormCall, ...]  # weight standardisation, weight norm


def find(recording: Recording, flow: Flow, model: nn.Module) -> NormCalls:
    """Return every norm that a recorded run executed."""
    graph = recording.graph
    replayer = Replayer(recording, model)
    norms: list[NormCall] = []
    natives: set[int] = set()
    for op in graph.ops:
        found = native.read(graph, op) if op.outputs else None
        if found is not None and op.inputs:
            natives.add(op.id)
            norms.append(native_call(flow, op, found, replayer))
    apart: list[NormCall] = []
    weights: list[NormCall] = []
    for candidate in candidates(flow, skip=frozenset(natives)):
        if candidate.statistic.count < 1:
            continue
        if not flow.act[candidate.root]:
            if flow.learned[candidate.root] and candidate.statistic.second:
                weights.append(derived_call(flow, candidate, replayer))
        elif candidate.statistic.second:
            norms.append(derived_call(flow, candidate, replayer))
        elif candidate.statistic.stat in ("mean", "l1", "amax"):
            apart.append(derived_call(flow, candidate, replayer))
    norms.extend(frozen_calls(flow, {m for n in norms for m in n.members}))
    norms = [n for n in norms if n.spec is not None or n.evidence is Evidence.UNKNOWN]
    norms.sort(key=lambda n: n.op.id)
    taken = {m for n in norms for m in n.members}
    return NormCalls(
        norms=tuple(norms), probabilities=tuple(a for a in apart if a.op.id not in taken), weights=tuple(weights)
    )
