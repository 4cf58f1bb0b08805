"""Replacements of norms that take no statistics: y = weight * f(alpha * x + s) + bias, f = tanh or erf."""

from __future__ import annotations

from collections.abc import Callable

import torch

from normwise.functional._checks import check_floating, check_parameter
from normwise.kernels._arithmetic import affine, no_autocast

__all__ = ["derf", "dynamic_tanh"]


def dynamic_tanh(
    input: torch.Tensor,
    alpha: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return weight * tanh(alpha * x) + bias, computed in float32 or wider (DyT).

    Args:
        input: x [..., H].
        alpha: a scalar.
        weight: gain [H].
        bias: shift [H].

    Returns:
        A tensor like ``input``.

    References:
        Zhu et al. 2025, arxiv.org/abs/2503.10622

    Examples:
        >>> dynamic_tanh(torch.tensor([-1.0, 0.0, 9.0]), torch.tensor(0.5))
        tensor([-0.4621,  0.0000,  0.9998])
    """
    return _pointwise(torch.tanh, input, alpha, None, weight, bias, "dynamic_tanh()")


def derf(
    input: torch.Tensor,
    alpha: torch.Tensor,
    shift: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return weight * erf(alpha * x + shift) + bias, computed in float32 or wider (Derf).

    Args:
        input: x [..., H].
        alpha: a scalar.
        shift: a scalar, inside erf.
        weight: gain [H].
        bias: shift [H].

    Returns:
        A tensor like ``input``.

    References:
        arxiv.org/abs/2512.10938

    Examples:
        >>> derf(torch.tensor([-1.0, 0.0, 9.0]), torch.tensor(0.5), torch.tensor(0.0))
        tensor([-0.5205,  0.0000,  1.0000])
    """
    return _pointwise(torch.erf, input, alpha, shift, weight, bias, "derf()")


def _pointwise(
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    alpha: torch.Tensor,
    shift: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    who: str,
) -> torch.Tensor:
    check_floating(x, who)
    for name, parameter in (("weight", weight), ("bias", bias)):
        check_parameter(parameter, tuple(x.shape[x.ndim - (1 if parameter is None else parameter.ndim) :]), name, who)
    with no_autocast(x):
        wide = torch.promote_types(x.dtype, torch.float32)
        inner = alpha.to(wide) * x.to(wide)
        y = function(inner if shift is None else inner + shift.to(wide))
        return affine(y, weight, bias).to(x.dtype)
