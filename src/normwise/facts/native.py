"""The norms that torch computes in one op, read from its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from normwise.graph import Graph, Op, Ref
from normwise.rendering import both
from normwise.spec import NormSpec, Scope, Statistic, Weight

__all__ = ["NATIVE", "NativeNorm", "read"]

# torch resolves RMSNorm's eps=None in the dtype of the arithmetic: fp32 for half types (measured, torch 2.13 CPU)
_EPS_NONE = {"float64": 2.220446049250313e-16}
_EPS_NONE_DEFAULT = 1.1920928955078125e-07


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeNorm:
    """A native norm op: its spec, and the values that hold gain, shift and running statistics."""

    spec: NormSpec
    weight: int | None = None
    bias: int | None = None
    running_mean: int | None = None
    running_var: int | None = None
    uses_batch: bool = True  # statistics of this call's data, not running ones
    note: str | None = None


def read(graph: Graph, op: Op) -> NativeNorm | None:
    """Return what a native norm op computes, or None if the op is no norm."""
    reader = NATIVE.get(op.short)
    return reader(graph, op) if reader else None


def _arguments(op: Op, names: str) -> dict[str, Any]:
    named = dict(zip(names.split(), op.args, strict=False))
    return named | op.kwargs


def _value(argument: Any) -> int | None:
    return argument.value if isinstance(argument, Ref) else None


def _weight(graph: Graph, value: int | None) -> Weight:
    if value is None:
        return Weight.NONE
    return Weight.VECTOR if graph.values[value].numel > 1 or graph.values[value].shape else Weight.SCALAR


def _stats_dtype(graph: Graph, op: Op) -> str:
    """Native kernels accumulate half precision in fp32."""
    dtype = graph.values[op.inputs[0]].dtype
    return dtype if dtype == "float64" else "float32"


def _layer_norm(graph: Graph, op: Op) -> NativeNorm:
    a = _arguments(op, "x shape weight bias eps")
    weight, bias = _value(a.get("weight")), _value(a.get("bias"))
    spec = NormSpec(
        axes=tuple(range(-len(a["shape"]), 0)),
        center=True,
        statistic=Statistic.VARIANCE,
        eps=a.get("eps", 1e-5),
        weight=_weight(graph, weight),
        bias=bias is not None,
        stats_dtype=_stats_dtype(graph, op),
    )
    return NativeNorm(spec=spec, weight=weight, bias=bias)


def _rms_norm(graph: Graph, op: Op) -> NativeNorm:
    a = _arguments(op, "x shape weight eps")
    weight, eps, note = _value(a.get("weight")), a.get("eps"), None
    if eps is None:
        eps = _EPS_NONE.get(graph.values[op.inputs[0]].dtype, _EPS_NONE_DEFAULT)
        note = both(
            f"eps=None resolves to {eps:.3g} in this dtype and torch version",
            f"eps=None 在此 dtype 和 torch 版本中为 {eps:.3g}",
        )
    spec = NormSpec(
        axes=tuple(range(-len(a["shape"]), 0)),
        eps=eps,
        weight=_weight(graph, weight),
        stats_dtype=_stats_dtype(graph, op),
    )
    return NativeNorm(spec=spec, weight=weight, note=note)


def _group_norm(graph: Graph, op: Op) -> NativeNorm:
    native = op.short == "native_group_norm"
    a = _arguments(op, "x weight bias n c hw groups eps" if native else "x groups weight bias eps")
    weight, bias = _value(a.get("weight")), _value(a.get("bias"))
    ndim = len(graph.values[op.inputs[0]].shape)
    spec = NormSpec(
        scope=Scope.GROUP,
        axes=tuple(range(1 - ndim, 0)),
        center=True,
        statistic=Statistic.VARIANCE,
        eps=a.get("eps", 1e-5),
        groups=int(a["groups"]),
        weight=_weight(graph, weight),
        bias=bias is not None,
        stats_dtype=_stats_dtype(graph, op),
    )
    return NativeNorm(spec=spec, weight=weight, bias=bias)


_BATCH_ARGUMENTS = {
    "batch_norm": "x weight bias running_mean running_var training momentum eps",
    "native_batch_norm": "x weight bias running_mean running_var training momentum eps",
    "cudnn_batch_norm": "x weight bias running_mean running_var training momentum eps",
    "miopen_batch_norm": "x weight bias running_mean running_var training momentum eps",
    "_native_batch_norm_legit": "x weight bias running_mean running_var training momentum eps",
    "_batch_norm_with_update": "x weight bias running_mean running_var momentum eps",
    "_native_batch_norm_legit_no_training": "x weight bias running_mean running_var momentum eps",
    "instance_norm": "x weight bias running_mean running_var use_input_stats momentum eps",
}


def _batch_norm(graph: Graph, op: Op) -> NativeNorm:
    names = _BATCH_ARGUMENTS[op.short]
    a = _arguments(op, names)
    if op.short == "_native_batch_norm_legit" and op.overload == "no_stats":
        a = _arguments(op, "x weight bias training momentum eps")
    x = graph.values[op.inputs[0]]
    weight, bias = _value(a.get("weight")), _value(a.get("bias"))
    running_mean, running_var = _value(a.get("running_mean")), _value(a.get("running_var"))
    training = bool(a.get("training", op.short == "_batch_norm_with_update"))
    instance = op.short == "instance_norm"
    if instance:
        training = bool(a.get("use_input_stats", True))
    elif x.shape[:1] == (1,) and running_var is None:
        instance = True  # torch runs InstanceNorm as a batch norm on a [1, N*C, ...] view
    ndim = len(x.shape)
    spec = NormSpec(
        scope=Scope.INSTANCE if instance and training else Scope.BATCH,
        axes=tuple(range(2 - ndim, 0)) if instance and training else (-ndim, *range(2 - ndim, 0)),
        center=True,
        statistic=Statistic.VARIANCE,
        eps=a.get("eps", 1e-5),
        weight=_weight(graph, weight),
        bias=bias is not None,
        stats_dtype=_stats_dtype(graph, op),
        running=running_var is not None,
        momentum=a.get("momentum") if running_var is not None else None,
    )
    note = (
        both(
            "an instance norm that uses running statistics here: it acts as a batch norm",
            "此处使用运行统计量的实例归一化：其作用同批归一化",
        )
        if instance and not training
        else None
    )
    return NativeNorm(
        spec=spec,
        weight=weight,
        bias=bias,
        running_mean=running_mean,
        running_var=running_var,
        uses_batch=training,
        note=note,
    )


NATIVE: dict[str, Callable[[Graph, Op], NativeNorm]] = {
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "_fused_rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "native_group_norm": _group_norm,
    **dict.fromkeys(_BATCH_ARGUMENTS, _batch_norm),
}


def row_count(graph: Graph, op: Op, norm: NativeNorm) -> int:
    """Return the number of elements that one statistic is taken over."""
    shape = graph.values[op.inputs[0]].shape
    count = math.prod(shape[a] for a in norm.spec.axes)
    return count // norm.spec.groups if norm.spec.groups else count
