"""DyT: tanh with a learned slope in the place of a norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from normwise.functional._checks import check_floating, check_trailing, shape_of
from normwise.functional.pointwise import dynamic_tanh

__all__ = ["DynamicTanh"]


class DynamicTanh(nn.Module):
    """Compute weight * tanh(alpha * x) + bias, with one learned slope alpha: no statistics at all.

    Args:
        normalized_shape: sizes of the trailing axes that weight and bias follow.
        alpha: first value of the slope; 0.5 in general, for LLaMA 7B 0.8 before attention and 0.2 elsewhere.
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
        >>> DynamicTanh(3)(torch.tensor([-1.0, 0.0, 9.0])).detach()
        tensor([-0.4621,  0.0000,  0.9998])

    References:
        Zhu et al. 2025, arxiv.org/abs/2503.10622
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        alpha: float = 0.5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = shape_of(normalized_shape, "DynamicTanh")
        self.alpha_init_value = alpha
        self.alpha = nn.Parameter(torch.full((1,), alpha, device=device, dtype=dtype))
        shape = self.normalized_shape
        self.weight = nn.Parameter(torch.ones(shape, device=device, dtype=dtype)) if elementwise_affine else None
        has_bias = elementwise_affine and bias
        self.bias = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype)) if has_bias else None

    def reset_parameters(self) -> None:
        """Return slope, gain and shift to their first values."""
        nn.init.constant_(self.alpha, self.alpha_init_value)
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Squash ``input`` [..., *normalized_shape]."""
        check_floating(input, "DynamicTanh")
        check_trailing(input, self.normalized_shape, "DynamicTanh")
        return dynamic_tanh(input, self.alpha, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return shape and first slope."""
        affine = self.weight is not None
        return f"{self.normalized_shape}, alpha={self.alpha_init_value}, elementwise_affine={affine}"
