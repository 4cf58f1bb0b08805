"""What the replacements of norms share: a learned slope, gain and shift, no statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from normwise.functional._checks import check_floating, check_trailing, shape_of

__all__ = ["PointwiseModule"]


class PointwiseModule(nn.Module):
    """Computes weight * f(alpha * x) + bias; abstract."""

    alpha: nn.Parameter
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        first: dict[str, float],
        elementwise_affine: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Make a parameter of one element for each name in ``first``, and gain and shift."""
        super().__init__()
        self.normalized_shape, self.first = shape_of(normalized_shape, type(self).__name__), first
        for name in first:
            self.register_parameter(name, nn.Parameter(torch.empty(1, device=device, dtype=dtype)))
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            made = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Return all parameters to their first values."""
        for name, value in {**self.first, "weight": 1.0, "bias": 0.0}.items():
            parameter = getattr(self, name)
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def _check(self, input: torch.Tensor) -> None:
        check_floating(input, type(self).__name__)
        check_trailing(input, self.normalized_shape, type(self).__name__)

    def extra_repr(self) -> str:
        """Return the shape and the first values."""
        first = ", ".join(f"{name}={value}" for name, value in self.first.items())
        return f"{self.normalized_shape}, {first}, elementwise_affine={self.weight is not None}"
