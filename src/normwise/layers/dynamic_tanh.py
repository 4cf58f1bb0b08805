"""DyT: tanh with a learned slope in the place of a norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from normwise.functional.pointwise import dynamic_tanh
from normwise.layers._pointwise_module import PointwiseModule

__all__ = ["DynamicTanh"]


class DynamicTanh(PointwiseModule):
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
        super().__init__(normalized_shape, {"alpha": alpha}, elementwise_affine, bias, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Squash ``input`` [..., *normalized_shape]."""
        self._check(input)
        return dynamic_tanh(input, self.alpha, self.weight, self.bias)
