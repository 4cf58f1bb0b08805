"""Derf: the error function with learned slope and shift in the place of a norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from normwise.functional._checks import check_floating, check_trailing, shape_of
from normwise.functional.pointwise import derf

__all__ = ["Derf"]


class Derf(nn.Module):
    """Compute weight * erf(alpha * x + shift) + bias, with one learned slope and one shift: no statistics at all.

    Args:
        normalized_shape: sizes of the trailing axes that weight and bias follow.
        alpha: first value of the slope.
        shift: first value of the shift inside erf.
        elementwise_affine: whether there are a gain and a shift.
        bias: whether there is a shift.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        [..., *normalized_shape] -> the same

    Raises:
        ValueError: an empty shape, or an input with other trailing axes.
        TypeError: an input that is not floating point.

    Examples:
        >>> Derf(3)(torch.tensor([-1.0, 0.0, 9.0])).detach()
        tensor([-0.5205,  0.0000,  1.0000])

    References:
        arxiv.org/abs/2512.10938
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        alpha: float = 0.5,
        shift: float = 0.0,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = shape_of(normalized_shape, "Derf")
        self.alpha_init_value, self.shift_init_value = alpha, shift
        self.alpha = nn.Parameter(torch.full((1,), alpha, device=device, dtype=dtype))
        self.shift = nn.Parameter(torch.full((1,), shift, device=device, dtype=dtype))
        shape = self.normalized_shape
        self.weight = nn.Parameter(torch.ones(shape, device=device, dtype=dtype)) if elementwise_affine else None
        has_bias = elementwise_affine and bias
        self.bias = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype)) if has_bias else None

    def reset_parameters(self) -> None:
        """Return all parameters to their first values."""
        nn.init.constant_(self.alpha, self.alpha_init_value)
        nn.init.constant_(self.shift, self.shift_init_value)
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Squash ``input`` [..., *normalized_shape]."""
        check_floating(input, "Derf")
        check_trailing(input, self.normalized_shape, "Derf")
        return derf(input, self.alpha, self.shift, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return shape, first slope and first shift."""
        affine = self.weight is not None
        first = f"alpha={self.alpha_init_value}, shift={self.shift_init_value}"
        return f"{self.normalized_shape}, {first}, elementwise_affine={affine}"
