"""Norms over the hidden axes of one position: LayerNorm, RMSNorm, ScaleNorm and their relatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from normwise import kernels
from normwise.functional._checks import (
    axes_of,
    check_broadcast,
    check_floating,
    check_groups,
    check_parameter,
    check_trailing,
    shape_of,
)
from normwise.spec import Cast, Form, Gate, Modulation, NormSpec, Statistic, Weight

__all__ = [
    "LAYER",
    "RMS",
    "add_layer_norm",
    "add_residual",
    "add_rms_norm",
    "centered_rms_norm",
    "gated_rms_norm",
    "l2_norm",
    "layer_norm",
    "modulated_layer_norm",
    "modulated_rms_norm",
    "partial_rms_norm",
    "rms_norm",
    "scale_norm",
    "trailing",
]

LAYER = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True, form=Form.TORCH)
RMS = NormSpec(eps=None, cast=Cast.AFTER_WEIGHT)


def trailing(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of a normalized shape: (-2, -1) for two sizes."""
    return tuple(range(-len(shape), 0))


def _serve(
    spec: NormSpec,
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    who: str,
    **operands: torch.Tensor | None,
) -> torch.Tensor:
    check_floating(x, who)
    shape = shape_of(normalized_shape, who)
    check_trailing(x, shape, who)
    if spec.weight is not Weight.SCALAR:
        check_parameter(weight, shape, "weight", who)
    check_parameter(bias, shape, "bias", who)
    for name, operand in operands.items():
        check_broadcast(operand, x, name, who)
    return kernels.forward(replace(spec, axes=trailing(shape)), x, weight, bias, **operands)


def layer_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Return weight * (x - mean) / sqrt(var + eps) + bias over the trailing axes, as ``F.layer_norm``.

    The variance is biased. Values equal torch's kernel to the bit; in half precision the gradients of weight and
    bias are summed in float32, where torch's CPU kernel sums in half precision.

    Args:
        input: x [..., *normalized_shape].
        normalized_shape: sizes of the axes that share one statistic.
        weight: gain, shaped ``normalized_shape``.
        bias: shift, shaped ``normalized_shape``.
        eps: added to the variance.

    References:
        Ba et al. 2016, arxiv.org/abs/1607.06450

    Examples:
        >>> layer_norm(torch.tensor([1.0, 2.0, 3.0]), 3)
        tensor([-1.2247,  0.0000,  1.2247])
    """
    return _serve(replace(LAYER, eps=eps), input, normalized_shape, weight, bias, "layer_norm()")


def rms_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps) over the trailing axes, as ``F.rms_norm``.

    Args:
        input: x [..., *normalized_shape].
        normalized_shape: sizes of the axes that share one statistic.
        weight: gain, shaped ``normalized_shape``.
        eps: added to the mean square; None is the machine epsilon of float32 (of float64 for float64).

    References:
        Zhang and Sennrich 2019, arxiv.org/abs/1910.07467

    Examples:
        >>> rms_norm(torch.tensor([3.0, 4.0]), 2)
        tensor([0.8485, 1.1314])
    """
    return _serve(replace(RMS, eps=eps), input, normalized_shape, weight, None, "rms_norm()")


def scale_norm(input: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5) -> torch.Tensor:
    """Return weight * x / max(|x|, eps) over the last axis, with one scalar gain.

    Args:
        input: x [..., H].
        weight: a scalar gain.
        eps: smallest norm to divide by.

    References:
        Nguyen and Salazar 2019, arxiv.org/abs/1910.05895

    Examples:
        >>> scale_norm(torch.tensor([3.0, 4.0]), torch.tensor(5.0))
        tensor([3., 4.])
    """
    if weight is not None and weight.numel() != 1:
        raise ValueError(
            f"scale_norm() has one scalar gain, given a weight of shape {list(weight.shape)}; "
            "use rms_norm() for a gain per feature"
        )
    return l2_norm(input, -1, eps, weight=weight)


def l2_norm(
    input: torch.Tensor, dim: int | Sequence[int] = -1, eps: float = 1e-12, *, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x / max(|x|, eps), as ``F.normalize``, times a scalar gain if one is given.

    Args:
        input: any shape.
        dim: the axis or axes that share one norm.
        eps: smallest norm to divide by.
        weight: a scalar gain.

    Examples:
        >>> l2_norm(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    check_floating(input, "l2_norm()")
    axes = axes_of(dim, input, "l2_norm()")
    spec = NormSpec(
        axes=axes,
        statistic=Statistic.L2,
        eps=eps,
        eps_inside=False,
        eps_clamp=True,
        weight=Weight.NONE if weight is None else Weight.SCALAR,
        cast=Cast.AFTER_WEIGHT,
    )
    return kernels.forward(spec, input, weight)


def partial_rms_norm(
    input: torch.Tensor, weight: torch.Tensor | None = None, p: float = 0.0625, eps: float = 1e-8
) -> torch.Tensor:
    """Return weight * x / sqrt(mean(x_p^2) + eps), x_p the first int(H * p) features (pRMSNorm).

    Args:
        input: x [..., H].
        weight: gain [H].
        p: fraction of the features that the statistic is taken over, (0, 1].
        eps: added to the mean square.

    References:
        Zhang and Sennrich 2019, arxiv.org/abs/1910.07467

    Examples:
        >>> partial_rms_norm(torch.tensor([2.0, 2.0, 8.0, 8.0]), p=0.5)
        tensor([1., 1., 4., 4.])
    """
    check_floating(input, "partial_rms_norm()")
    size = input.shape[-1] if input.ndim else 0
    if int(size * p) < 1 or p > 1:
        raise ValueError(
            f"partial_rms_norm() takes its statistic over int(H * p) features, given H = {size} and p = {p}; "
            "pass a p in (0, 1] that leaves at least one"
        )
    return _serve(replace(RMS, eps=eps, partial=p), input, size, weight, None, "partial_rms_norm()")


def centered_rms_norm(input: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """Return weight * x / sqrt((sum(x^2) + sum(x)^2) / (n + 1) + eps) (CRMSNorm).

    It is RMSNorm of a zero-sum vector of n + 1 features stored without the last one, which is -sum(x).

    Args:
        input: x [..., n].
        weight: gain [n].
        eps: added to the mean square.

    References:
        Jiang et al. 2023, arxiv.org/abs/2305.14858

    Examples:
        >>> centered_rms_norm(torch.tensor([1.0, 1.0]), eps=0.0)  # of (1, 1, -2)
        tensor([0.7071, 0.7071])
    """
    check_floating(input, "centered_rms_norm()")
    spec = replace(RMS, eps=eps, statistic=Statistic.COMPLETED)
    return _serve(spec, input, input.shape[-1] if input.ndim else 0, weight, None, "centered_rms_norm()")


def gated_rms_norm(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm_before_gate: bool = True,
    groups: int | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """Return RMSNorm(x) * act(z), or RMSNorm(x * act(z)) with ``norm_before_gate=False`` (Mamba-2).

    Args:
        input: x [..., H].
        gate: z [..., H].
        weight: gain [H].
        eps: added to the mean square.
        norm_before_gate: whether the norm comes first.
        groups: groups of features with a statistic each.
        activation: ``silu`` or ``sigmoid``.

    Examples:
        >>> gated_rms_norm(torch.tensor([3.0, 4.0]), torch.zeros(2))
        tensor([0., 0.])
    """
    who = "gated_rms_norm()"
    check_floating(input, who)
    if gate.shape != input.shape:
        raise ValueError(
            f"{who} gates an input of shape {list(input.shape)}, given a gate of shape {list(gate.shape)}; "
            "expand the gate to the input's shape"
        )
    size = input.shape[-1] if input.ndim else 0
    if groups is not None:
        check_groups(groups, size, "groups", who)
    spec = NormSpec(
        eps=eps,
        groups=groups,
        gate=Gate.AFTER if norm_before_gate else Gate.BEFORE,
        gate_activation=activation,
        cast=Cast.AFTER_WEIGHT,
    )
    return _serve(spec, input, size, weight, None, who, gate=gate)


def modulated_layer_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Return LayerNorm(x) * (1 + scale) + shift, rounded once (AdaLN, FiLM).

    Args:
        input: x [..., *normalized_shape].
        normalized_shape: sizes of the axes that share one statistic.
        scale: broadcastable to x, such as [B, 1, H].
        shift: broadcastable to x.
        weight: gain of the norm, often absent.
        bias: shift of the norm, often absent.
        eps: added to the variance.

    Examples:
        >>> modulated_layer_norm(torch.tensor([1.0, 3.0]), 2, torch.ones(2), torch.ones(2), eps=0.0)
        tensor([-1.,  3.])
    """
    spec = replace(LAYER, eps=eps, cast=Cast.AFTER_WEIGHT, modulation=_modulation(shift))
    return _serve(spec, input, normalized_shape, weight, bias, "modulated_layer_norm()", scale=scale, shift=shift)


def modulated_rms_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Return RMSNorm(x) * (1 + scale) + shift, rounded once; arguments as in ``modulated_layer_norm``.

    Examples:
        >>> modulated_rms_norm(torch.tensor([3.0, 4.0]), 2, torch.ones(2))
        tensor([1.6971, 2.2627])
    """
    spec = replace(RMS, eps=eps, modulation=_modulation(shift))
    return _serve(spec, input, normalized_shape, weight, None, "modulated_rms_norm()", scale=scale, shift=shift)


def _modulation(shift: torch.Tensor | None) -> Modulation:
    return Modulation.SCALE if shift is None else Modulation.SCALE_SHIFT


def add_layer_norm(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return LayerNorm(x + residual) in the dtype of x, and x + residual; the rest as in ``add_rms_norm``.

    Args:
        input: x, the output of a sublayer.
        residual: the stream so far, or None at its start.
        normalized_shape: sizes of the axes that share one statistic.
        weight: gain.
        bias: shift.
        eps: added to the variance.
        residual_dtype: as in ``add_rms_norm``.

    Examples:
        >>> y, residual = add_layer_norm(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]), 2)
        >>> y, residual
        (tensor([-1.0000,  1.0000]), tensor([1., 3.]))
    """
    summed = add_residual(input, residual, residual_dtype, "add_layer_norm()")
    return layer_norm(summed, normalized_shape, weight, bias, eps).to(input.dtype), summed


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    residual_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RMSNorm(x + residual) in the dtype of x, and x + residual, the new residual stream.

    Args:
        input: x, the output of a sublayer.
        residual: the stream so far, or None at its start.
        normalized_shape: sizes of the axes that share one statistic.
        weight: gain.
        eps: as in ``rms_norm``.
        residual_dtype: dtype of the stream, such as torch.float32 beside bfloat16 sublayers; None keeps the
            wider of the two.

    Examples:
        >>> y, residual = add_rms_norm(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0]), 2)
        >>> y, residual
        (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    summed = add_residual(input, residual, residual_dtype, "add_rms_norm()")
    return rms_norm(summed, normalized_shape, weight, eps).to(input.dtype), summed


def add_residual(x: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype | None, who: str) -> torch.Tensor:
    """Return x + residual in ``dtype``, or in the wider dtype of the two; x alone at the start of a stream."""
    check_floating(x, who)
    if residual is None:
        return x if dtype is None else x.to(dtype)
    if residual.shape != x.shape:
        raise ValueError(
            f"{who} adds a residual of shape {list(residual.shape)} to an input of shape {list(x.shape)}; "
            "expand one to the shape of the other"
        )
    dtype = dtype or torch.promote_types(x.dtype, residual.dtype)
    return x.to(dtype) + residual.to(dtype)
