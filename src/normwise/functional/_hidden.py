"""What the norms over hidden axes share: their specs, each made once, and the checks before a kernel is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from normwise import kernels
from normwise.functional._checks import check_broadcast, check_floating, check_parameter, check_trailing, shape_of
from normwise.spec import Cast, Form, Gate, Modulation, NormSpec, Statistic, Weight

__all__ = [
    "LAYER",
    "RMS",
    "added",
    "check_residual",
    "completed_spec",
    "gated_spec",
    "l2_spec",
    "layer_spec",
    "layer_way",
    "made",
    "modulated_layer_spec",
    "modulated_rms_spec",
    "partial_spec",
    "rms_spec",
    "rms_way",
    "serve_added",
    "serve_spec",
    "trailing",
    "variant",
]

LAYER = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True, form=Form.TORCH)
RMS = NormSpec(eps=None, cast=Cast.AFTER_WEIGHT)


def trailing(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of a normalized shape: (-2, -1) for two sizes."""
    return tuple(range(-len(shape), 0))


# Making a spec takes longer than normalizing a short row: each is made once. Typed, for 1 equals 1.0 and True.
_kept = lru_cache(maxsize=1024, typed=True)


@_kept
def layer_spec(eps: float) -> NormSpec:
    return replace(LAYER, eps=eps)


@_kept
def rms_spec(eps: float | None) -> NormSpec:
    return replace(RMS, eps=eps)


@_kept
def layer_way(eps: float, size: int) -> kernels.Way:
    return kernels.short_way(layer_spec(eps), size)


@_kept
def rms_way(eps: float | None, size: int) -> kernels.Way:
    return kernels.short_way(rms_spec(eps), size)


@_kept
def l2_spec(axes: tuple[int, ...], eps: float, weight: Weight) -> NormSpec:
    return NormSpec(
        axes=axes,
        statistic=Statistic.L2,
        eps=eps,
        eps_inside=False,
        eps_clamp=True,
        weight=weight,
        cast=Cast.AFTER_WEIGHT,
    )


@_kept
def partial_spec(eps: float, p: float) -> NormSpec:
    return replace(RMS, eps=eps, partial=p)


@_kept
def completed_spec(eps: float) -> NormSpec:
    return replace(RMS, eps=eps, statistic=Statistic.COMPLETED)


@_kept
def gated_spec(eps: float, groups: int | None, gate: Gate, activation: str) -> NormSpec:
    return NormSpec(eps=eps, groups=groups, gate=gate, gate_activation=activation, cast=Cast.AFTER_WEIGHT)


@_kept
def modulated_layer_spec(eps: float, modulation: Modulation) -> NormSpec:
    return replace(LAYER, eps=eps, cast=Cast.AFTER_WEIGHT, modulation=modulation)


@_kept
def modulated_rms_spec(eps: float | None, modulation: Modulation) -> NormSpec:
    return replace(RMS, eps=eps, modulation=modulation)


def made(make: Callable[..., NormSpec], *arguments: object) -> NormSpec:
    """Return the spec that ``make`` has kept; torch.compile, which looks through caches, makes its own."""
    return make.__wrapped__(*arguments) if torch.compiler.is_compiling() else make(*arguments)  # type: ignore[attr-defined]


_VARIANTS: dict[tuple[int, str, object], tuple[NormSpec, NormSpec]] = {}


def variant(spec: NormSpec, field: str, value: object) -> NormSpec:
    """Return ``spec`` with another value of a field, the same object each time."""
    if getattr(spec, field) == value:
        return spec
    if torch.compiler.is_compiling():
        return replace(spec, **{field: value})  # type: ignore[arg-type]
    known = _VARIANTS.get((id(spec), field, value))  # a hash of all the fields takes as long as making it
    if known is None or known[0] is not spec:
        if len(_VARIANTS) >= 4096:
            _VARIANTS.clear()
        known = _VARIANTS[id(spec), field, value] = (spec, replace(spec, **{field: value}))  # type: ignore[arg-type]
    return known[1]


def serve_spec(
    spec: NormSpec,
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    who: str,
    kernel: str,
    **operands: torch.Tensor | None,
) -> torch.Tensor:
    check_floating(x, who)
    shape = shape_of(normalized_shape, who)
    check_trailing(x, shape, who)
    check_parameter(weight, shape, "weight", who)
    check_parameter(bias, shape, "bias", who)
    for name, operand in operands.items():
        check_broadcast(operand, x, name, who)
    return kernels.forward(variant(spec, "axes", trailing(shape)), x, weight, bias, kernel=kernel, **operands)


def serve_added(
    make: Callable[[Any], NormSpec],
    way: Callable[[Any, int], kernels.Way],
    eps: float | None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual_dtype: torch.dtype | None,
    who: str,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    size = normalized_shape[0] if type(normalized_shape) is tuple and len(normalized_shape) == 1 else normalized_shape
    if type(size) is int and kernel == "auto" and residual_dtype is None and not torch.compiler.is_dynamo_compiling():
        both = way(eps, size)(x, weight, bias, residual)
        if both is not None:
            return both
    check_residual(x, residual, who)
    shape = shape_of(normalized_shape, who)
    check_trailing(x, shape, who)
    check_parameter(weight, shape, "weight", who)
    check_parameter(bias, shape, "bias", who)
    spec = variant(made(make, eps), "axes", trailing(shape))
    return added(spec, x, residual, weight, bias, residual_dtype, kernel)


def check_residual(x: torch.Tensor, residual: torch.Tensor | None, who: str) -> None:
    """Raise unless the two can be added."""
    check_floating(x, who)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"{who} adds a residual of shape {list(residual.shape)} to an input of shape {list(x.shape)}; "
            "expand one to the shape of the other"
        )


def added(
    spec: NormSpec,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x + residual in the dtype of x, and the sum in ``dtype`` or the wider dtype of the two."""
    if residual is None:  # the start of a stream
        summed = x if dtype is None else x.to(dtype)
    else:
        wider = torch.promote_types(x.dtype, residual.dtype)
        if dtype is None or dtype is wider or dtype is torch.promote_types(wider, torch.float32):
            wide = dtype is not None and dtype is not wider
            return kernels.forward_added(spec, x, residual, weight, bias, wide=wide, kernel=kernel)
        summed = x.to(dtype) + residual.to(dtype)
    return kernels.forward(spec, summed, weight, bias, kernel=kernel).to(x.dtype), summed
