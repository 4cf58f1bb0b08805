"""Batch norms with running statistics, written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from normwise.errors import NotKnown
from normwise.facts import vocabulary
from normwise.facts.affine import Affine, follow
from normwise.facts.calls import NormCall, agree, random_input
from normwise.facts.flow import Flow
from normwise.facts.records import Evidence
from normwise.facts.replay import Replayer
from normwise.graph import Op, Ref, ValueKind
from normwise.rendering import both
from normwise.spec import Cast, NormSpec, Scope, Statistic, Weight

__all__ = ["frozen_calls"]

_CONE = 24  # values between a scale and the buffers it was made from


@dataclass(frozen=True, slots=True)
class _Root:
    """The buffer under a square root, and what stands beside it there."""

    variance: int
    eps: float | None
    dtype: str


@dataclass(frozen=True, slots=True)
class _Roles:
    """Which held vector is what; a mean or bias may be missing."""

    variance: int
    weight: int | None
    mean: int | None
    bias: int | None


def frozen_calls(flow: Flow, taken: set[int], replayer: Replayer) -> Iterator[NormCall]:
    """Yield x * f(rsqrt(buffer)) + g: a batch norm with running statistics, written out."""
    held: Flow | None = None
    for op in flow.graph.ops:
        if op.id in taken or op.short not in (vocabulary.MUL | vocabulary.DIV) or len(op.inputs) != 2 or not op.outputs:
            continue
        acts = flow.acts(op)
        others = [i for i in op.inputs if not flow.act[i]]
        if len(acts) != 1 or len(others) != 1:
            continue
        root = _root_of_buffer(flow, others[0])
        if root is not None:
            held = held or _with_buffers(flow)
            yield _call(held, op, acts[0], others[0], root, replayer)


def _with_buffers(flow: Flow) -> Flow:
    """Return a flow in which buffers count as learned: frozen norms keep gain and shift in them."""
    held = copy.copy(flow)
    held.learned = [
        learned or (v.kind is ValueKind.BUFFER and v.floating and v.numel > 1)
        for learned, v in zip(flow.learned, flow.graph.values, strict=True)
    ]
    for op in flow.graph.ops:
        made = any(held.learned[i] for i in op.inputs)
        for out in op.outputs:
            held.learned[out] = made
    return held


def _call(flow: Flow, op: Op, source: int, scale: int, root: _Root, replayer: Replayer) -> NormCall:
    graph = flow.graph
    mean, members = None, {op.id}
    producer = graph.producer(source)
    if producer is not None and producer.short in vocabulary.SUB - {"rsub"} and not flow.act[producer.inputs[-1]]:
        source, mean = flow.acts(producer)[0], producer.inputs[-1]
        members.add(producer.id)
    affine = follow(flow, op.outputs[0], source=source)
    channel = _channel(graph.values[scale].shape, graph.values[source].shape)
    ndim = len(graph.values[source].shape)
    roles = _candidates(flow, root.variance, scale, mean, affine)
    proved = next((r for r in roles if _agrees(flow, source, channel, r, affine, root, replayer)), None)
    settled = proved or roles[0]
    spec = NormSpec(
        scope=Scope.BATCH,
        axes=tuple(axis for axis in range(-ndim, 0) if axis != channel) or (-1,),
        center=settled.mean is not None,
        statistic=Statistic.VARIANCE,
        eps=root.eps,
        weight=Weight.NONE if settled.weight is None else Weight.VECTOR,
        weight_offset=affine.weight_offset,
        bias=settled.bias is not None,
        cast=Cast.AFTER_WEIGHT if affine.cast is Cast.BEFORE_WEIGHT and affine.weight is None else affine.cast,
        running=True,
        stats_dtype=root.dtype,
    )
    return NormCall(
        op=op,
        input=source,
        core=op.outputs[0],
        output=affine.output,
        spec=spec,
        call=op.call,
        native=False,
        evidence=Evidence.DERIVED if proved is None else Evidence.VERIFIED,
        members=frozenset(members) | affine.members,
        weight=settled.weight,
        bias=settled.bias,
        running_mean=settled.mean,
        running_var=root.variance,
        uses_batch=False,
        note=both("running statistics, written out (frozen batch norm)", "手写的运行统计量（冻结的批归一化）"),
    )


def _channel(scale: tuple[int, ...], source: tuple[int, ...]) -> int:
    """Return the axis along which a scale varies: the second, unless its shape says otherwise."""
    varying = [axis for axis in range(-len(scale), 0) if scale[axis] > 1]
    return varying[0] if varying else min(1, len(source) - 1) - len(source)


def _candidates(flow: Flow, variance: int, scale: int, mean: int | None, affine: Affine) -> list[_Roles]:
    """Return what the vectors behind scale, mean and shift may be, the likeliest first."""
    gains = [v for v in _vectors(flow, (scale, affine.weight)) if v != variance]
    weight = gains[0] if gains else None
    shifts = [v for v in _vectors(flow, (affine.bias,)) if v not in (variance, weight)]
    first = _Roles(variance, weight, next(iter(_vectors(flow, (mean,))), None), shifts[0] if shifts else None)
    if first.mean is not None or not shifts:
        return [first]
    one, two = shifts[0], shifts[1] if len(shifts) > 1 else None
    # x * s + (b - m * s): which of the two is multiplied, replay tells
    return [replace(first, mean=m, bias=b) for m, b in ((one, two), (two, one)) if m is not None] + [first]


def _vectors(flow: Flow, values: Iterable[int | None]) -> list[int]:
    """Return the parameters and buffers with more than one element that values were made from."""
    pending, found, seen = [v for v in values if v is not None], [], set[int]()
    while pending and len(seen) < _CONE:
        current = pending.pop(0)
        if current in seen:
            continue
        seen.add(current)
        record, op = flow.graph.values[current], flow.graph.producer(current)
        if op is not None:
            pending.extend(i for i in op.inputs if not flow.act[i])
        elif record.kind in (ValueKind.BUFFER, ValueKind.PARAM) and record.floating and record.shape:
            found.append(current)
    return found


def _agrees(
    flow: Flow, source: int, channel: int, roles: _Roles, affine: Affine, root: _Root, replayer: Replayer
) -> bool:
    """Compare a replay with random data in every role with the closed form, in float64."""
    graph = flow.graph
    shape = tuple(size or 3 for size in graph.values[source].shape)
    size = shape[channel]
    named = {"variance": roles.variance, "weight": roles.weight, "mean": roles.mean, "bias": roles.bias}
    vectors = {name: v for name, v in named.items() if v is not None}
    if root.eps is None or any(graph.values[v].numel != size for v in vectors.values()):
        return False
    given = {v: random_input(graph.values[v].shape, None, offset=i).abs() for i, v in enumerate(vectors.values())}
    x = random_input(shape, None)
    wide = [size if axis == channel else 1 for axis in range(-len(shape), 0)]
    held = {name: given[v].reshape(wide) for name, v in vectors.items()}
    zero, one = torch.zeros(()), torch.ones(())
    y = (x - held.get("mean", zero)) / (held["variance"] + root.eps).sqrt()
    y = y * (held["weight"] + affine.weight_offset if "weight" in held else one) * affine.factor
    try:
        return agree(replayer(affine.output, given | {source: x}), y + held.get("bias", zero))
    except NotKnown:
        return False


def _root_of_buffer(flow: Flow, value: int) -> _Root | None:
    """Return the buffer and eps under a square root that a value was made from, without any activation."""
    graph = flow.graph
    pending, seen = [value], 0
    while pending and seen < _CONE:
        current = pending.pop()
        seen += 1
        op = graph.producer(current)
        if op is None:
            continue
        if op.short in ("rsqrt", "sqrt") or (op.short == "pow" and op.args[1] in (-0.5, 0.5)):
            buffers = [v for v in _vectors(flow, op.inputs[:1]) if graph.values[v].kind is ValueKind.BUFFER]
            if buffers:
                return _Root(buffers[0], _eps(flow, op.inputs[0]), graph.values[op.inputs[0]].dtype)
        pending.extend(i for i in op.inputs if not flow.act[i])
    return None


def _eps(flow: Flow, value: int) -> float | None:
    """Return the number that was added to what stands under a root."""
    op = flow.graph.producer(value)
    if op is None or op.short not in vocabulary.ADD:
        return None
    numbers = [a for a in op.args if isinstance(a, float)]
    scalars = [flow.graph.values[a.value].scalar for a in op.args if isinstance(a, Ref)]
    return next(iter([*numbers, *(s for s in scalars if s is not None)]), None)
