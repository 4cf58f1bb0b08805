"""Norms over the hidden axes of one position: LayerNorm, RMSNorm, ScaleNorm and their relatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling

from normwise import kernels
from normwise.functional._checks import axes_of, check_floating, check_groups
from normwise.functional._hidden import LAYER as LAYER
from normwise.functional._hidden import RMS as RMS
from normwise.functional._hidden import (
    completed_spec,
    gated_spec,
    l2_spec,
    layer_spec,
    layer_way,
    made,
    modulated_layer_spec,
    modulated_rms_spec,
    partial_spec,
    rms_spec,
    rms_way,
    serve_added,
    serve_spec,
)
from normwise.functional._hidden import trailing as trailing
from normwise.spec import Gate, Modulation, Weight

__all__ = [
    "LAYER",
    "RMS",
    "add_layer_norm",
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


def layer_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    kernel: str = "auto",
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
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    References:
        Ba et al. 2016, arxiv.org/abs/1607.06450

    Examples:
        >>> layer_norm(torch.tensor([1.0, 2.0, 3.0]), 3)
        tensor([-1.2247,  0.0000,  1.2247])
    """
    size = normalized_shape[0] if type(normalized_shape) is tuple and len(normalized_shape) == 1 else normalized_shape
    if type(size) is int and kernel == "auto" and not is_dynamo_compiling():
        y = layer_way(eps, size)(input, weight, bias)
        if y is not None:
            return y
    return serve_spec(made(layer_spec, eps), input, normalized_shape, weight, bias, "layer_norm()", kernel)


def rms_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    kernel: str = "auto",
) -> torch.Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps) over the trailing axes, as ``F.rms_norm``.

    Args:
        input: x [..., *normalized_shape].
        normalized_shape: sizes of the axes that share one statistic.
        weight: gain, shaped ``normalized_shape``.
        eps: added to the mean square; None is the machine epsilon of float32 (of float64 for float64).
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    References:
        Zhang and Sennrich 2019, arxiv.org/abs/1910.07467

    Examples:
        >>> rms_norm(torch.tensor([3.0, 4.0]), 2)
        tensor([0.8485, 1.1314])
    """
    size = normalized_shape[0] if type(normalized_shape) is tuple and len(normalized_shape) == 1 else normalized_shape
    if type(size) is int and kernel == "auto" and not is_dynamo_compiling():
        y = rms_way(eps, size)(input, weight, None)
        if y is not None:
            return y
    return serve_spec(made(rms_spec, eps), input, normalized_shape, weight, None, "rms_norm()", kernel)


def scale_norm(
    input: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5, *, kernel: str = "auto"
) -> torch.Tensor:
    """Return weight * x / max(|x|, eps) over the last axis, with one scalar gain.

    Args:
        input: x [..., H].
        weight: a scalar gain.
        eps: smallest norm to divide by.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

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
    return l2_norm(input, -1, eps, weight=weight, kernel=kernel)


def l2_norm(
    input: torch.Tensor,
    dim: int | Sequence[int] = -1,
    eps: float = 1e-12,
    *,
    weight: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """Return x / max(|x|, eps), as ``F.normalize``, times a scalar gain if one is given.

    Args:
        input: any shape.
        dim: the axis or axes that share one norm.
        eps: smallest norm to divide by.
        weight: a scalar gain.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Examples:
        >>> l2_norm(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    check_floating(input, "l2_norm()")
    axes = axes_of(dim, input, "l2_norm()")
    spec = made(l2_spec, axes, eps, Weight.NONE if weight is None else Weight.SCALAR)
    return kernels.forward(spec, input, weight, kernel=kernel)


def partial_rms_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None = None,
    p: float = 0.0625,
    eps: float = 1e-8,
    *,
    kernel: str = "auto",
) -> torch.Tensor:
    """Return weight * x / sqrt(mean(x_p^2) + eps), x_p the first int(H * p) features (pRMSNorm).

    Args:
        input: x [..., H].
        weight: gain [H].
        p: fraction of the features that the statistic is taken over, (0, 1].
        eps: added to the mean square.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

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
    return serve_spec(made(partial_spec, eps, p), input, size, weight, None, "partial_rms_norm()", kernel)


def centered_rms_norm(
    input: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, kernel: str = "auto"
) -> torch.Tensor:
    """Return weight * x / sqrt((sum(x^2) + sum(x)^2) / (n + 1) + eps) (CRMSNorm).

    It is RMSNorm of a zero-sum vector of n + 1 features stored without the last one, which is -sum(x).

    Args:
        input: x [..., n].
        weight: gain [n].
        eps: added to the mean square.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    References:
        Jiang et al. 2023, arxiv.org/abs/2305.14858

    Examples:
        >>> centered_rms_norm(torch.tensor([1.0, 1.0]), eps=0.0)  # of (1, 1, -2)
        tensor([0.7071, 0.7071])
    """
    check_floating(input, "centered_rms_norm()")
    size = input.shape[-1] if input.ndim else 0
    return serve_spec(made(completed_spec, eps), input, size, weight, None, "centered_rms_norm()", kernel)


def gated_rms_norm(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm_before_gate: bool = True,
    groups: int | None = None,
    activation: str = "silu",
    kernel: str = "auto",
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
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

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
    spec = made(gated_spec, eps, groups, Gate.AFTER if norm_before_gate else Gate.BEFORE, activation)
    return serve_spec(spec, input, size, weight, None, who, kernel, gate=gate)


def modulated_layer_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    kernel: str = "auto",
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
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Examples:
        >>> modulated_layer_norm(torch.tensor([1.0, 3.0]), 2, torch.ones(2), torch.ones(2), eps=0.0)
        tensor([-1.,  3.])
    """
    spec, who = made(modulated_layer_spec, eps, _modulation(shift)), "modulated_layer_norm()"
    return serve_spec(spec, input, normalized_shape, weight, bias, who, kernel, scale=scale, shift=shift)


def modulated_rms_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    kernel: str = "auto",
) -> torch.Tensor:
    """Return RMSNorm(x) * (1 + scale) + shift, rounded once; arguments as in ``modulated_layer_norm``.

    Examples:
        >>> modulated_rms_norm(torch.tensor([3.0, 4.0]), 2, torch.ones(2))
        tensor([1.6971, 2.2627])
    """
    spec, who = made(modulated_rms_spec, eps, _modulation(shift)), "modulated_rms_norm()"
    return serve_spec(spec, input, normalized_shape, weight, None, who, kernel, scale=scale, shift=shift)


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
    kernel: str = "auto",
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
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Examples:
        >>> y, residual = add_layer_norm(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]), 2)
        >>> y, residual
        (tensor([-1.0000,  1.0000]), tensor([1., 3.]))
    """
    operands = (input, residual, normalized_shape, weight, bias)
    return serve_added(layer_spec, layer_way, eps, *operands, residual_dtype, "add_layer_norm()", kernel)


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    residual_dtype: torch.dtype | None = None,
    kernel: str = "auto",
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
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Examples:
        >>> y, residual = add_rms_norm(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0]), 2)
        >>> y, residual
        (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    operands = (input, residual, normalized_shape, weight, None)
    return serve_added(rms_spec, rms_way, eps, *operands, residual_dtype, "add_rms_norm()", kernel)
