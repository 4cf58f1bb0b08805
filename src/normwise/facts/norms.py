"""Every execution of a norm: native ops, hand-written ones found by algebra and proved by replay, frozen ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.facts import native, vocabulary
from normwise.facts.affine import Affine, follow, offset_of, pre_gated
from normwise.facts.flow import Flow
from normwise.facts.homogeneity import Candidate, Term, candidates
from normwise.facts.records import Evidence
from normwise.facts.replay import Replayer
from normwise.graph import Graph, Op, Recording, Ref, ValueKind
from normwise.spec import Cast, Gate, Kind, Modulation, NormSpec, Scope, Statistic, Weight, reference

__all__ = ["NormCall", "NormCalls", "find"]

# Float64 against float64: rounding alone, with room for badly conditioned variances
_AGREES = 1e-6
_SEED = 20261129


@dataclass(slots=True)
class NormCall:
    """One execution of one norm."""

    op: Op  # the op that divides
    input: int
    core: int  # normalized, before gain and shift
    output: int
    spec: NormSpec | None
    call: int  # id of the module call that holds it
    native: bool
    evidence: Evidence
    members: frozenset[int] = frozenset()  # op ids from the input to the output
    weight: int | None = None  # value ids of the parameters
    bias: int | None = None
    running_mean: int | None = None
    running_var: int | None = None
    uses_batch: bool = True
    note: str | None = None
    statistic_value: int = -1  # whose elements were reduced
    guarded_value: int = -1  # the sum with eps
    eps_outside: bool = False
    count: int = 0  # elements under one statistic
    inner_values: frozenset[int] = field(default_factory=frozenset)  # full-size values between input and output


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
            norms.append(_native_call(flow, op, found, replayer))
    apart: list[NormCall] = []
    weights: list[NormCall] = []
    for candidate in candidates(flow, skip=frozenset(natives)):
        if candidate.root not in range(len(graph.values)) or candidate.statistic.count < 1:
            continue
        if not flow.act[candidate.root]:
            if flow.learned[candidate.root] and candidate.statistic.second:
                weights.append(_derived_call(flow, candidate, replayer))
        elif candidate.statistic.second:
            norms.append(_derived_call(flow, candidate, replayer))
        elif candidate.statistic.stat in ("mean", "l1", "amax"):
            apart.append(_derived_call(flow, candidate, replayer))
    norms.extend(_frozen_calls(flow, replayer, {m for n in norms for m in n.members}))
    norms = [n for n in norms if n.spec is not None or n.evidence is Evidence.UNKNOWN]
    norms.sort(key=lambda n: n.op.id)
    taken = {m for n in norms for m in n.members}
    return NormCalls(norms=tuple(norms), probabilities=tuple(a for a in apart if a.op.id not in taken), weights=tuple(weights))


# -- native ----------------------------------------------------------------------------------


def _native_call(flow: Flow, op: Op, found: native.NativeNorm, replayer: Replayer) -> NormCall:
    graph = flow.graph
    source = op.inputs[0]
    spec, note = found.spec, found.note
    instance_view = spec.scope is Scope.INSTANCE and op.short != "instance_norm"
    affine = Affine(output=op.outputs[0])
    if found.weight is None and not instance_view:
        affine = follow(flow, op.outputs[0], width=graph.values[source].shape)
        spec = _with_affine(spec, affine)
    spec = _with_cast_of_native(flow, op, spec)
    if found.weight is not None:
        spec = replace(spec, weight_offset=offset_of(flow, found.weight))
    weight = found.weight if found.weight is not None else affine.weight
    call = NormCall(
        op=op, input=source, core=op.outputs[0], output=affine.output, spec=spec, call=op.call, native=True, evidence=Evidence.DERIVED,
        members=frozenset({op.id}) | affine.members, weight=_parameter(flow, weight), bias=_parameter(flow, found.bias if found.bias is not None else affine.bias),
        running_mean=found.running_mean, running_var=found.running_var, uses_batch=found.uses_batch, note=note,
        statistic_value=source, count=native.row_count(graph, op, found),
    )
    if replayer.once((op.short, spec, graph.values[source].shape), lambda: _native_agrees(graph, op, found, replayer)):
        call.evidence = Evidence.VERIFIED
    return call


def _native_agrees(graph: Graph, op: Op, found: native.NativeNorm, replayer: Replayer) -> bool:
    """Compare torch's own op with the definition, in float64 and with random gain, shift and running statistics."""
    x = _random(graph.values[op.inputs[0]].shape, found.spec.eps)
    held = [v for v in (found.weight, found.bias, found.running_mean, found.running_var) if v is not None]
    given = {v: _random(graph.values[v].shape, None).abs() for v in held} | {op.inputs[0]: x}
    try:
        y = replayer(op.outputs[0], given)
        weight, bias = (None if v is None else given[v] for v in (found.weight, found.bias))
        if found.uses_batch:
            expected = reference(replace(found.spec, cast=Cast.NONE, stats_dtype=None), x, weight, bias)
        else:
            expected = _from_running(found, given, x, weight, bias)
    except (NotKnown, ValueError, RuntimeError, IndexError):
        return False
    return _close(y, expected)


def _from_running(
    found: native.NativeNorm, given: dict[int, torch.Tensor], x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    shape = (1, -1) + (1,) * (x.ndim - 2)
    assert found.running_mean is not None
    assert found.running_var is not None
    mean, var = (given[v].view(shape) for v in (found.running_mean, found.running_var))
    y = (x - mean) / (var + (found.spec.eps or 0.0)).sqrt()
    y = y * weight.view(shape) if weight is not None else y
    return y + bias.view(shape) if bias is not None else y


def _with_cast_of_native(flow: Flow, op: Op, spec: NormSpec) -> NormSpec:
    """A cast right before a native norm and one right after it show where the arithmetic was meant to happen."""
    after = [c for c in flow.casts_of(op.outputs[0])]
    return replace(spec, cast=Cast.AFTER_WEIGHT) if after and spec.cast is Cast.NONE else spec


# -- derived ---------------------------------------------------------------------------------


def _derived_call(flow: Flow, candidate: Candidate, replayer: Replayer) -> NormCall:
    graph, stat = flow.graph, candidate.statistic
    root = _through_casts(flow, candidate.root)
    affine = follow(flow, candidate.core, width=graph.values[candidate.root].shape)
    note = None
    spec = _derived_spec(flow, candidate, affine)
    evidence = Evidence.DERIVED
    if spec is not None and stat.second:
        prove = partial(_prove, flow, candidate, spec, replayer)
        program = _program(flow, candidate, spec)
        evidence, spec, note = replayer.once(program, prove) if program is not None else prove()
        if spec is not None and spec.kind is Kind.OTHER and (folded := _folded(flow, candidate, spec, replayer)) is not None:
            spec, affine = folded
        if spec is not None:
            spec = _with_affine(spec, affine)
            spec = _resolve_l2(spec, stat.count)
            gate = pre_gated(flow, root)
            spec = replace(spec, gate=Gate.BEFORE) if gate and spec.gate is Gate.NONE else spec
    members = candidate.members | affine.members
    inner = {o for m in members for o in graph.ops[m].outputs if graph.values[o].shape == graph.values[candidate.root].shape}
    return NormCall(
        op=candidate.op, input=root, core=candidate.core, output=affine.output, spec=spec, call=_owner(graph, candidate), native=False,
        evidence=evidence, members=members, weight=_parameter(flow, _weight_value(candidate, affine)), bias=_parameter(flow, affine.bias),
        note=note, statistic_value=stat.stat_value, guarded_value=stat.eps_value, eps_outside=stat.eps_at.endswith("outside"),
        count=stat.count, inner_values=frozenset(inner),
    )


def _owner(graph: Graph, candidate: Candidate) -> int:
    return candidate.op.call


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
    statistic = Statistic.VARIANCE if stat.stat == "variance" else Statistic.MEAN_SQUARE
    scale = candidate.scale
    return NormSpec(
        scope=_scope(flow, candidate, affine),
        axes=stat.axes,
        center=full.centered,
        statistic=statistic,
        eps=_eps(stat),
        eps_inside=stat.eps_at in ("", "inside"),
        eps_clamp=stat.eps_at.startswith("clamp"),
        biased=stat.biased,
        factor=1.0 if scale is None else scale,
        weight=weight,
        stats_dtype=_stats_dtype(flow, candidate),
    )


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
    for value in {candidate.root, _through_casts(flow, candidate.root), stat.stat_value}:
        for cast in flow.casts_of(value):
            if cast.call == candidate.op.call and reduced in _dtypes_of(cast):
                return reduced
    producers = [graph.ops[m] for m in stat.members if graph.ops[m].kwargs.get("dtype") is not None]
    return reduced if any(reduced in _dtypes_of(p) for p in producers) else None


def _dtypes_of(op: Op) -> set[str]:
    given = [a for a in (*op.args, *op.kwargs.values()) if isinstance(a, torch.dtype)]
    return {str(d).removeprefix("torch.") for d in given}


def _scope(flow: Flow, candidate: Candidate, affine: Affine) -> Scope:
    """Name the set of reduced axes, in the layout of the value that was reduced."""
    axes, ndim = candidate.statistic.axes, candidate.statistic.ndim
    trailing = axes == tuple(range(-len(axes), 0))
    if ndim >= 2 and -ndim in axes:
        return Scope.BATCH if len(axes) < ndim or ndim == 2 else Scope.OTHER
    if ndim >= 4 and trailing and len(axes) == ndim - 2:
        spans = affine.weight_axes
        return Scope.HIDDEN if spans and set(spans) <= set(axes) else Scope.INSTANCE
    if ndim == 3 and axes == (-1,) and affine.weight_axes == (-2,):
        return Scope.INSTANCE
    if ndim >= 4 and trailing and len(axes) == ndim - 2 + 1 and affine.viewed_back:
        return Scope.GROUP
    if -1 not in axes and len(axes) < ndim - 1 and ndim == 3:
        return Scope.INSTANCE  # over the positions of one sample and channel
    return Scope.HIDDEN


def _prove(
    flow: Flow, candidate: Candidate, spec: NormSpec, replayer: Replayer
) -> tuple[Evidence, NormSpec | None, str | None]:
    """Replay the piece on random data against its closed form; on a mismatch search the near conventions."""
    shape = flow.graph.values[candidate.root].shape
    if 0 in shape:
        return Evidence.DERIVED, spec, "ran on an empty tensor"
    runs = []
    try:
        for x in (_random(shape, None), _random(shape, spec.eps), _random(shape, spec.eps, offset=0.0, scale=3.0)):
            runs.append((x, replayer(candidate.core, {candidate.root: x}), _gain(candidate, replayer, x)))
    except NotKnown as unknown:
        return Evidence.DERIVED, spec, None if flow.graph.fake else f"not replayed: {unknown.why}"
    for variant in _variants(spec, candidate):
        fitted = _fit(variant, candidate, runs)
        if fitted is not None:
            return Evidence.VERIFIED, fitted, None
    where = str(candidate.op.source) if candidate.op.source else candidate.op.name
    return Evidence.UNKNOWN, None, f"scale-invariant, but its form at {where} matches no known norm"


def _folded(flow: Flow, candidate: Candidate, spec: NormSpec, replayer: Replayer) -> tuple[NormSpec, Affine] | None:
    """Recognise s * x + (b - m * s), a layer norm whose mean is subtracted with the shift."""
    consumers = list(flow.graph.consumers(candidate.core))
    if flow.graph.fake or spec.statistic is not Statistic.VARIANCE or len(consumers) != 1 or consumers[0].short not in vocabulary.ADD:
        return None
    output = consumers[0].outputs[0]
    x = _random(flow.graph.values[candidate.root].shape, None)
    centred = replace(spec, center=True, weight=Weight.NONE, factor=1.0, stats_dtype=None)
    try:
        gain = _gain(candidate, replayer, x)
        shift = replayer(output, {candidate.root: x}) - reference(centred, x) * gain * spec.factor
    except (NotKnown, ValueError, RuntimeError, IndexError):
        return None
    rows = shift.reshape(-1, shift.shape[-1])
    if not _close(rows, rows[:1].expand_as(rows)) and float(rows.abs().max()) > _AGREES:
        return None
    learned = [v for v in consumers[0].inputs if flow.learned[v]]
    bias = learned[0] if learned and float(rows.abs().max()) > _AGREES else None
    affine = Affine(output=output, bias=bias, members=frozenset({consumers[0].id}))
    return replace(spec, center=True, bias=bool(learned)), affine


def _program(flow: Flow, candidate: Candidate, spec: NormSpec) -> tuple[object, ...] | None:
    """Return what identifies a norm's piece of program, so that the same code is proved once; None if weights enter it."""
    graph = flow.graph
    members = sorted(candidate.members)
    names = {candidate.root: "x"} | {o: f"{i}.{j}" for i, m in enumerate(members) for j, o in enumerate(graph.ops[m].outputs)}

    def plain(item: object) -> object:
        if isinstance(item, Ref):
            return names.get(item.value, graph.values[item.value].scalar)
        return tuple(plain(i) for i in item) if isinstance(item, (list, tuple)) else repr(item)

    inputs = {i for m in members for i in graph.ops[m].inputs if i not in names}
    if any(graph.values[i].scalar is None for i in inputs):
        return None
    ops = tuple((graph.ops[m].name, plain(graph.ops[m].args), plain(tuple(sorted(graph.ops[m].kwargs.items())))) for m in members)
    return (graph.values[candidate.root].shape, spec, ops)


def _gain(candidate: Candidate, replayer: Replayer, x: torch.Tensor) -> torch.Tensor | float:
    """Return the learned factors that were multiplied in before the division."""
    gain: torch.Tensor | float = 1.0
    for value in candidate.numerator.scaled_by:
        gain = gain * replayer(value, {candidate.root: x})
    for value in candidate.statistic.scaled_by:
        # the statistic's factor g came with the power that leaves degree -1: g / norm(x), or x / (g * norm(x))
        gain = gain * replayer(value, {candidate.root: x})
    return gain


def _variants(spec: NormSpec, candidate: Candidate) -> Iterator[NormSpec]:
    yield spec
    yield replace(spec, biased=not spec.biased)
    if candidate.statistic.stat == "variance":
        yield replace(spec, statistic=Statistic.MEAN_SQUARE)
    if not spec.center:
        yield replace(spec, center=True, statistic=Statistic.VARIANCE)
        yield replace(spec, statistic=Statistic.VARIANCE)
    if spec.eps:
        yield replace(spec, eps_inside=not spec.eps_inside)
        n = candidate.statistic.count
        for eps in (spec.eps * n, spec.eps * math.sqrt(n), spec.eps / n, spec.eps / math.sqrt(n), 0.0):
            yield replace(spec, eps=eps)


def _fit(spec: NormSpec, candidate: Candidate, runs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]]) -> NormSpec | None:
    """Return the spec with its constant factor if it explains every run."""
    bare = replace(spec, factor=1.0, weight=Weight.NONE, stats_dtype=None, scope=Scope.OTHER if spec.scope is Scope.BATCH else spec.scope)
    bare = replace(bare, scope=Scope.HIDDEN, groups=None)
    factor: float | None = None
    for x, y, gain in runs:
        try:
            core = reference(bare, x) * gain
        except (ValueError, RuntimeError, IndexError):
            return None
        if core.shape != y.shape or not torch.isfinite(y).all():
            return None
        if factor is None:
            energy = float((core * core).sum())
            factor = float((core * y).sum()) / energy if energy > 0 else 1.0
        if not _close(y, core * factor):
            return None
    near = next((known for known in (1.0, spec.factor) if factor is not None and abs(factor - known) <= _AGREES * abs(known)), factor)
    return replace(spec, factor=near if near is not None else 1.0)


def _resolve_l2(spec: NormSpec, count: int) -> NormSpec:
    """Call x * g / |x| an L2 norm: its constant is n^-1/2 in terms of the root mean square."""
    if spec.statistic is not Statistic.MEAN_SQUARE or count <= 1 or spec.center:
        return spec
    factor = spec.factor * math.sqrt(count)
    if abs(spec.factor - 1.0) < 1e-3:
        return spec
    eps = spec.eps
    if eps:
        eps = eps * count if spec.eps_inside and not spec.eps_clamp else eps * math.sqrt(count)
    near = 1.0 if abs(factor - 1.0) < 1e-5 else factor
    return replace(spec, statistic=Statistic.L2, eps=eps, factor=near)


def _with_affine(spec: NormSpec, affine: Affine) -> NormSpec:
    weight = affine.weight_kind if affine.weight is not None else spec.weight
    return replace(
        spec,
        factor=spec.factor * affine.factor,
        weight=weight,
        weight_offset=affine.weight_offset,
        bias=spec.bias or affine.bias is not None,
        groups=affine.groups if affine.groups else spec.groups,
        modulation=affine.modulation if affine.modulation is not Modulation.NONE else spec.modulation,
        gate=affine.gate if affine.gate is not Gate.NONE else spec.gate,
        cast=affine.cast,
    )


def _parameter(flow: Flow, value: int | None) -> int | None:
    """Return the parameter or buffer that a gain or shift was made from."""
    seen = 0
    while value is not None and flow.graph.values[value].kind is ValueKind.OP and seen < 12:
        op = flow.graph.producer(value)
        assert op is not None
        learned = [i for i in op.inputs if flow.learned[i]]
        value, seen = (learned[0] if learned else None), seen + 1
    if value is not None and flow.graph.values[value].kind in (ValueKind.PARAM, ValueKind.BUFFER):
        return value
    return None


def _through_casts(flow: Flow, value: int) -> int:
    while (op := flow.graph.producer(value)) is not None and op.short in ("to", "_to_copy", "type_as", "float", "contiguous", "clone"):
        value = op.inputs[0]
    return value


# -- frozen batch norm -----------------------------------------------------------------------


def _frozen_calls(flow: Flow, replayer: Replayer, taken: set[int]) -> Iterator[NormCall]:
    """Yield x * f(rsqrt(buffer)) + g: a batch norm with running statistics, written out."""
    graph = flow.graph
    for op in graph.ops:
        if op.id in taken or op.short not in (vocabulary.MUL | vocabulary.DIV) or len(op.inputs) != 2 or not op.outputs:
            continue
        acts = flow.acts(op)
        others = [i for i in op.inputs if not flow.act[i]]
        if len(acts) != 1 or len(others) != 1:
            continue
        found = _root_of_buffer(flow, others[0])
        if found is None:
            continue
        variance, eps = found
        source = acts[0]
        producer = graph.producer(source)
        members = {op.id}
        center = False
        if producer is not None and producer.short in vocabulary.SUB and any(not flow.act[i] for i in producer.inputs):
            source, center = flow.acts(producer)[0], True
            members.add(producer.id)
        affine = follow(flow, op.outputs[0], width=graph.values[source].shape)
        ndim = len(graph.values[source].shape)
        spec = NormSpec(
            scope=Scope.BATCH, axes=(-ndim, *range(2 - ndim, 0)) if ndim >= 2 else (-1,), center=center or affine.bias is not None,
            statistic=Statistic.VARIANCE, eps=eps, weight=Weight.VECTOR, bias=affine.bias is not None, running=True,
            stats_dtype=graph.values[variance].dtype,
        )
        yield NormCall(
            op=op, input=source, core=op.outputs[0], output=affine.output, spec=spec, call=op.call, native=False, evidence=Evidence.DERIVED,
            members=frozenset(members) | affine.members, weight=_parameter(flow, others[0]), bias=_parameter(flow, affine.bias),
            running_var=variance, uses_batch=False, note="running statistics, written out (frozen batch norm)",
        )


def _root_of_buffer(flow: Flow, value: int) -> tuple[int, float | None] | None:
    """Return the buffer and eps under a square root that a value was made from, without any activation."""
    graph = flow.graph
    pending, rooted, eps, seen = [value], False, None, 0
    buffers: list[int] = []
    while pending and seen < 24:
        current = pending.pop()
        seen += 1
        record = graph.values[current]
        if record.kind is ValueKind.BUFFER and record.floating and record.numel > 1:
            buffers.append(current)
        op = graph.producer(current)
        if op is None:
            continue
        if op.short in ("rsqrt", "sqrt") or (op.short == "pow" and op.args[1] in (-0.5, 0.5)):
            rooted = True
            under = graph.producer(op.inputs[0])
            if under is not None and under.short == "add":
                numbers = [a for a in under.args if isinstance(a, float)] + [
                    graph.values[a.value].scalar for a in under.args if isinstance(a, Ref) and graph.values[a.value].scalar is not None
                ]
                eps = numbers[0] if numbers else None
        pending.extend(i for i in op.inputs if not flow.act[i])
    return (buffers[-1], eps) if rooted and buffers else None


# -- numbers ---------------------------------------------------------------------------------


def _random(shape: tuple[int, ...], eps: float | None, *, offset: float = 0.5, scale: float = 1.0) -> torch.Tensor:
    """Return float64 data; with ``eps`` at the size where eps matters as much as the variance."""
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + offset
    return x * math.sqrt(eps) if eps else x


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    bound = float(b.abs().max()) if b.numel() else 0.0
    return bool(((a - b).abs() <= _AGREES * (b.abs() + bound + 1e-30)).all())
