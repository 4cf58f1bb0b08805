"""Every execution of a norm in a recorded run: native, hand-written, frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from normwise.errors import TargetError
from normwise.facts import native
from normwise.facts import vocabulary as ops
from normwise.facts.calls import NormCall
from normwise.facts.derived import derived_call
from normwise.facts.flow import Flow
from normwise.facts.frozen import frozen_calls
from normwise.facts.homogeneity import candidates
from normwise.facts.native_calls import native_call
from normwise.facts.records import Evidence
from normwise.facts.replay import Replayer
from normwise.graph import Graph, Op, Recording
from normwise.rendering import both, clean

__all__ = ["NormCall", "NormCalls", "find"]

_WEIGHT_NORM = frozenset({"_weight_norm", "_weight_norm_interface"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NormCalls:
    """The norms of a run, and what looks like a norm but normalises no activation."""

    norms: tuple[NormCall, ...]
    probabilities: tuple[NormCall, ...]  # router weights, Sinkhorn, max-scaling
    weights: tuple[NormCall, ...]  # weight standardisation, weight norm


def _weight_norm(op: Op) -> NormCall:
    return NormCall(
        op=op,
        input=op.inputs[0],
        core=op.outputs[0],
        output=op.outputs[0],
        spec=None,
        call=op.call,
        native=True,
        evidence=Evidence.DERIVED,
        members=frozenset({op.id}),
        note=both("weight norm", "权重归一化"),
    )


def _serves_as_weight(flow: Flow, value: int) -> bool:
    """Whether a normalized parameter becomes the weight of a linear map, and not an activation (learned latents)."""
    pending, seen = [value], set()
    while pending and len(seen) < 50:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        for op in flow.graph.consumers(current):
            if op.short not in ops.LINEAR | ops.CONV | ops.MATMUL | ops.ATTENTION:
                pending.extend(op.outputs)
            elif op.inputs[0] != current:
                return True
    return False


@contextmanager
def _naming_module(graph: Graph, op: Op) -> Iterator[None]:
    """Say of numbers that no norm can have, such as an eps that is NaN, which module has them."""
    try:
        yield
    except ValueError as error:
        where = f"{clean(graph.path(op))}: " if graph.path(op) else ""
        raise TargetError(f"{where}{error}") from error


def find(recording: Recording, flow: Flow, model: nn.Module) -> NormCalls:
    """Return every norm that a recorded run executed.

    Raises:
        TargetError: one has numbers that no norm can have.
    """
    graph = recording.graph
    replayer = Replayer(recording, model)
    norms: list[NormCall] = []
    apart: list[NormCall] = []
    weights: list[NormCall] = []
    natives: set[int] = set()
    for op in graph.ops:
        with _naming_module(graph, op):
            found = native.read(graph, op) if op.outputs else None
        if found is not None and op.inputs:
            natives.add(op.id)
            call = native_call(flow, op, found, replayer)
            standardizes = (
                not flow.act[call.input] and flow.learned[call.input] and _serves_as_weight(flow, call.output)
            )
            (weights if standardizes else norms).append(call)
        elif op.short in _WEIGHT_NORM:
            weights.append(_weight_norm(op))
    for candidate in candidates(flow, skip=frozenset(natives)):
        second, learned = candidate.statistic.second, not flow.act[candidate.root]
        if learned:
            wanted = second and flow.learned[candidate.root]
        else:
            wanted = second or candidate.statistic.stat in ("mean", "l1", "amax")
        if not wanted or candidate.statistic.count < 1:
            continue
        with _naming_module(graph, candidate.op):
            call = derived_call(flow, candidate, replayer)
        if learned:
            (weights if _serves_as_weight(flow, call.output) else norms).append(call)
        else:
            (norms if second else apart).append(call)
    norms.extend(frozen_calls(flow, {m for n in norms for m in n.members}, replayer))
    norms = [n for n in norms if n.spec is not None or n.evidence is Evidence.UNKNOWN]
    norms.sort(key=lambda n: n.op.id)
    taken = {m for n in norms for m in n.members}
    return NormCalls(
        norms=tuple(norms), probabilities=tuple(a for a in apart if a.op.id not in taken), weights=tuple(weights)
    )
