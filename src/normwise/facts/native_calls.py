"""Executions of native norm ops, compared with the definition by replay."""

from __future__ import annotations

from dataclasses import replace

import torch

from normwise.errors import NotKnown
from normwise.facts import native
from normwise.facts.affine import Affine, follow, offset_of
from normwise.facts.calls import NormCall, agree, parameter_of, random_input, with_affine
from normwise.facts.flow import Flow
from normwise.facts.records import Evidence
from normwise.facts.replay import Replayer
from normwise.graph import Graph, Op
from normwise.spec import Cast, NormSpec, Scope, reference

__all__ = ["native_call"]

_HALF = ("float16", "bfloat16")


def native_call(flow: Flow, op: Op, found: native.NativeNorm, replayer: Replayer) -> NormCall:
    """Return what a native norm op computes, with the affine map behind it."""
    graph = flow.graph
    source = op.inputs[0]
    spec, note = found.spec, found.note
    instance_view = spec.scope is Scope.INSTANCE and op.short != "instance_norm"
    affine = Affine(output=op.outputs[0])
    if found.weight is None and not instance_view:
        affine = follow(flow, op.outputs[0], source=source)
        spec = with_affine(spec, affine)
        if affine.weight is not None and graph.values[op.outputs[0]].dtype in _HALF:
            spec = replace(spec, cast=Cast.BEFORE_WEIGHT)  # the op itself rounds what the gain multiplies
    spec = _with_cast_of_native(flow, op, spec)
    if found.weight is not None:
        spec = replace(spec, weight_offset=offset_of(flow, found.weight))
    weight = found.weight if found.weight is not None else affine.weight
    call = NormCall(
        op=op,
        input=source,
        core=op.outputs[0],
        output=affine.output,
        spec=spec,
        call=op.call,
        native=True,
        evidence=Evidence.DERIVED,
        members=frozenset({op.id}) | affine.members,
        weight=parameter_of(flow, weight),
        bias=parameter_of(flow, found.bias if found.bias is not None else affine.bias),
        running_mean=found.running_mean,
        running_var=found.running_var,
        uses_batch=found.uses_batch,
        note=note,
        statistic_value=source,
        count=native.row_count(graph, op, found),
    )
    if replayer.once((op.short, spec, graph.values[source].shape), lambda: _native_agrees(graph, op, found, replayer)):
        call.evidence = Evidence.VERIFIED
    return call


def _native_agrees(graph: Graph, op: Op, found: native.NativeNorm, replayer: Replayer) -> bool:
    """Compare torch's own op with the definition, in float64 and with random gain, shift and running statistics."""
    x = random_input(_small(graph.values[op.inputs[0]].shape, found.spec), found.spec.eps)
    held = [v for v in (found.weight, found.bias, found.running_mean, found.running_var) if v is not None]
    given = {v: random_input(graph.values[v].shape, None).abs() for v in held} | {op.inputs[0]: x}
    try:
        y = replayer(op.outputs[0], given)
        weight, bias = (None if v is None else given[v] for v in (found.weight, found.bias))
        if found.uses_batch:
            expected = reference(replace(found.spec, cast=Cast.NONE, stats_dtype=None), x, weight, bias)
        else:
            expected = _from_running(found, given, x, weight, bias)
    except (NotKnown, ValueError, RuntimeError, IndexError):
        return False
    return agree(y, expected)


def _small(shape: tuple[int, ...], spec: NormSpec) -> tuple[int, ...]:
    """Return a shape that the op takes as well: a few rows, channels as they are, a small map."""
    if spec.scope is Scope.HIDDEN:
        split = len(shape) - len(spec.axes)
        return (*(min(size or 3, 3) for size in shape[:split]), *shape[split:])
    return (*(min(size or 3, 3) for size in shape[:1]), *shape[1:2], *(min(size or 4, 4) for size in shape[2:]))


def _from_running(
    found: native.NativeNorm,
    given: dict[int, torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
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
    return replace(spec, cast=Cast.AFTER_WEIGHT) if flow.casts_of(op.outputs[0]) and spec.cast is Cast.NONE else spec
