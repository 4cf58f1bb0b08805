"""Hand-written norms: a candidate of the algebra becomes a spec, read off the graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from normwise.facts import proofs, vocabulary
from normwise.facts.affine import Affine, follow, offset_of, pre_gated, scaled_input
from normwise.facts.calls import NormCall, parameter_of, with_affine
from normwise.facts.candidate import Candidate
from normwise.facts.flow import Flow, through_casts
from normwise.facts.records import Evidence
from normwise.facts.replay import Replayer, program
from normwise.facts.terms import Term
from normwise.graph import Graph, Op
from normwise.spec import Gate, Kind, NormSpec, Scope, Statistic, Weight

__all__ = ["derived_call"]

# ops between the cast of a module's input and what is reduced
_AROUND = 12


def derived_call(flow: Flow, candidate: Candidate, replayer: Replayer) -> NormCall:
    """Return what a candidate computes, with the evidence for it."""
    graph, stat = flow.graph, candidate.statistic
    root = through_casts(flow, candidate.root)
    affine = follow(flow, candidate.core, source=candidate.root)
    note = None
    spec = _derived_spec(flow, candidate, affine)
    evidence = Evidence.DERIVED
    if spec is not None and stat.second:
        prove = partial(proofs.prove, flow, candidate, spec, replayer)
        program = _program(flow, candidate, spec)
        evidence, spec, note = replayer.once(program, prove) if program is not None else prove()
        if (
            spec is not None
            and spec.kind is Kind.OTHER
            and (folded := proofs.folded(flow, candidate, spec, replayer)) is not None
        ):
            spec, affine = folded
        if spec is not None:
            spec = proofs.resolve_l2(with_affine(spec, affine), stat.count, own=spec.factor)
            spec = _regrouped(flow, candidate, affine, spec)
            gate = pre_gated(flow, root)
            spec = replace(spec, gate=Gate.BEFORE) if gate and spec.gate is Gate.NONE else spec
    members = candidate.members | affine.members
    gain = _weight_value(candidate, affine)
    if spec is not None and gain is None and (scaled := scaled_input(flow, candidate.op, root, members)) is not None:
        root, gain, product = scaled
        kind = Weight.SCALAR if graph.values[gain].numel == 1 else Weight.VECTOR
        spec = replace(spec, weight=kind, weight_on_input=True, weight_offset=offset_of(flow, gain))
        members |= {product}
    inner = {
        o for m in members for o in graph.ops[m].outputs if graph.values[o].shape == graph.values[candidate.root].shape
    }
    return NormCall(
        op=candidate.op,
        input=root,
        core=candidate.core,
        output=affine.output,
        spec=spec,
        call=_owner(graph, candidate),
        native=False,
        evidence=evidence,
        members=members,
        weight=parameter_of(flow, gain),
        bias=parameter_of(flow, affine.bias),
        note=note,
        statistic_value=stat.stat_value,
        guarded_value=stat.eps_value,
        eps_outside=stat.eps_at.endswith("outside"),
        count=stat.count,
        inner_values=frozenset(inner),
    )


def _spans_axes(affine: Affine, axes: tuple[int, ...]) -> bool:
    """Whether the gain varies along normalized axes alone: those are features, not positions."""
    return bool(affine.weight_axes) and set(affine.weight_axes) <= set(axes)


def _regrouped(flow: Flow, candidate: Candidate, affine: Affine, spec: NormSpec) -> NormSpec:
    """State a norm of x.view(N, G, ...) in the layout of x [N, C, *]: a group norm, an instance norm if G is C."""
    graph, axes = flow.graph, candidate.statistic.axes
    view = graph.producer(candidate.root)
    if view is None or view.short not in ("view", "reshape", "unflatten", "_unsafe_view"):
        return spec
    before, after = graph.values[view.inputs[0]].shape, graph.values[candidate.root].shape
    if _spans_axes(affine, axes) and len(graph.values[affine.output].shape) == len(after):
        return spec
    grouped = len(axes) == len(after) - 2 and axes == tuple(range(-len(axes), 0))
    if (
        not grouped
        or len(before) < 3
        or before == after
        or before[:1] != after[:1]
        or after[1] == 0
        or before[1] % after[1]
    ):
        return spec
    if not any(graph.values[o.outputs[0]].shape == before for o in _views_behind(flow, candidate.core)):
        return spec
    if after[1] == before[1]:
        return replace(spec, scope=Scope.INSTANCE, axes=tuple(range(2 - len(before), 0)), groups=None)
    return replace(spec, scope=Scope.GROUP, axes=tuple(range(1 - len(before), 0)), groups=after[1])


def _views_behind(flow: Flow, value: int) -> Iterator[Op]:
    """Yield the views that read a core, across its casts and single-use affine ops."""
    for _ in range(6):
        consumers = list(flow.graph.consumers(value))
        yield from (o for o in consumers if o.short in vocabulary.VIEW)
        if len(consumers) != 1 or consumers[0].short not in vocabulary.POINTWISE | vocabulary.VIEW:
            return
        value = consumers[0].outputs[0]


def _owner(graph: Graph, candidate: Candidate) -> int:
    """Return the call that holds the norm: that of a leaf module which makes the factor its caller multiplies in."""
    made = graph.ops[max(candidate.statistic.members)].call
    around = {c.id for c in graph.ancestors(made)}
    return made if graph.calls[made].leaf and candidate.op.call in around else candidate.op.call


def _weight_value(candidate: Candidate, affine: Affine) -> int | None:
    if affine.weight is not None:
        return affine.weight
    scaled = (*candidate.numerator.scaled_by, *candidate.statistic.scaled_by)
    return scaled[0] if scaled else None


def _derived_spec(flow: Flow, candidate: Candidate, affine: Affine) -> NormSpec | None:
    stat, full, graph = candidate.statistic, candidate.numerator, flow.graph
    if not stat.second:
        return NormSpec(axes=stat.axes, statistic=Statistic.OTHER, eps=None, weight=Weight.NONE)
    scaled = (*full.scaled_by, *stat.scaled_by)
    weight = Weight.NONE
    if scaled:
        weight = Weight.SCALAR if all(graph.values[s].numel == 1 for s in scaled) else Weight.VECTOR
    known = {"variance": Statistic.VARIANCE, "completed": Statistic.COMPLETED}
    statistic = known.get(stat.stat, Statistic.MEAN_SQUARE)
    scale = candidate.scale
    return NormSpec(
        scope=_scope(candidate, affine),
        axes=stat.axes,
        center=full.centered,
        statistic=statistic,
        eps=_eps(stat),
        eps_inside=stat.eps_at in ("", "inside"),
        eps_clamp=stat.eps_at.startswith("clamp"),
        biased=stat.biased,
        partial=_partial(flow, candidate),
        factor=1.0 if scale is None else scale,
        weight=weight,
        stats_dtype=_stats_dtype(flow, candidate),
    )


def _partial(flow: Flow, candidate: Candidate) -> float:
    """Return the share of the features that the statistic of a norm of all of them is taken over."""
    stat, shape = candidate.statistic, flow.graph.values[candidate.root].shape
    whole = shape[-1] if shape else 0
    if not stat.partial or candidate.numerator.partial or candidate.numerator.centered or stat.axes != (-1,):
        return 1.0
    return stat.count / whole if 0 < stat.count < whole else 1.0


def _eps(stat: Term) -> float | None:
    if not stat.eps_known:
        return None
    if not stat.eps_at or stat.eps is None:
        return 0.0
    return math.sqrt(stat.eps) if stat.eps_at == "clamp_inside" else stat.eps  # sqrt(max(s, c)) = max(sqrt(s), sqrt(c))


def _stats_dtype(flow: Flow, candidate: Candidate) -> str | None:
    """Return the dtype that the statistic was cast to, or None if it stayed in the dtype of the input."""
    graph, stat = flow.graph, candidate.statistic
    reduced = graph.values[stat.stat_value].dtype
    for value in {candidate.root, through_casts(flow, candidate.root), stat.stat_value}:
        for cast in flow.casts_of(value):
            if cast.call == candidate.op.call and reduced in _dtypes_of(cast):
                return reduced
    producers = [graph.ops[m] for m in stat.members if graph.ops[m].kwargs.get("dtype") is not None]
    if any(reduced in _dtypes_of(p) for p in producers) or _widened_before(flow, candidate, reduced):
        return reduced
    return None


def _widened_before(flow: Flow, candidate: Candidate, dtype: str) -> bool:
    """Whether the module of a norm casts its input and then gates, masks or regroups it."""
    graph, pending, seen = flow.graph, [candidate.root], set[int]()
    while pending and len(seen) < _AROUND:
        op = graph.producer(pending.pop())
        if op is None or op.id in seen or op.call != candidate.op.call:
            continue
        seen.add(op.id)
        if op.short in vocabulary.RECAST and graph.values[op.inputs[0]].dtype != dtype:
            return graph.values[op.outputs[0]].dtype == dtype
        if op.short in vocabulary.POINTWISE | vocabulary.VIEW:
            pending.extend(i for i in op.inputs if flow.act[i])
    return False


def _dtypes_of(op: Op) -> set[str]:
    given = [a for a in (*op.args, *op.kwargs.values()) if isinstance(a, torch.dtype)]
    return {str(d).removeprefix("torch.") for d in given}


def _scope(candidate: Candidate, affine: Affine) -> Scope:
    """Name the set of reduced axes, in the layout of the value that was reduced."""
    axes, ndim = candidate.statistic.axes, candidate.statistic.ndim
    trailing = axes == tuple(range(-len(axes), 0))
    if ndim >= 2 and -ndim in axes:
        return Scope.BATCH if len(axes) < ndim or ndim == 2 else Scope.OTHER
    if ndim >= 4 and trailing and len(axes) == ndim - 2:
        return Scope.HIDDEN if _spans_axes(affine, axes) else Scope.INSTANCE
    if ndim == 3 and axes == (-1,) and affine.weight_axes == (-2,):
        return Scope.INSTANCE
    if ndim >= 4 and trailing and len(axes) == ndim - 2 + 1 and affine.viewed_back:
        return Scope.GROUP
    if axes == (-2,) and ndim == 3 and not _spans_axes(affine, axes):
        return Scope.INSTANCE  # over the positions of one sample and channel
    return Scope.HIDDEN


def _program(flow: Flow, candidate: Candidate, spec: NormSpec) -> tuple[object, ...] | None:
    """Return what identifies a candidate, so that the same code is proved once; None if weights enter it."""
    graph = flow.graph
    ops = program(graph, sorted(candidate.members), {candidate.root: "x"}, of=candidate.core)
    return None if ops is None else (graph.values[candidate.root].shape, spec, ops)
