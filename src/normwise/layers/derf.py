"""Derf: the error function with learned slope and shift in the place of a norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from normwise.functional.pointwise import derf
from normwise.layers._pointwise_module import PointwiseModule

__all__ = ["Derf"]


class Derf(PointwiseModule):
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

    shift: torch.nn.Parameter

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
        super().__init__(normalized_shape, {"alpha": alpha, "shift": shift}, elementwise_affine, bias, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Squash ``input`` [..., *normalized_shape]."""
        self._check(input)
        return derf(input, self.alpha, self.shift, self.weight, self.bias)
