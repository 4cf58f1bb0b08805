"""ScaleNorm: a vector divided by its length, times one learned length."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from normwise.layers._norm_module import HiddenModule, told_kernel
from normwise.spec import Cast, NormSpec, Statistic, Weight

__all__ = ["SCALE", "ScaleNorm"]

SCALE = NormSpec(
    statistic=Statistic.L2, eps=1e-5, eps_inside=False, eps_clamp=True, weight=Weight.SCALAR, cast=Cast.AFTER_WEIGHT
)


class ScaleNorm(HiddenModule):
    """Compute weight * x / max(|x|, eps) over the trailing axes, with one scalar weight.

    The weight starts at sqrt(n), n the number of normalized elements: RMSNorm with one gain for all features.

    Args:
        normalized_shape: sizes of the trailing axes that share one length.
        eps: smallest length to divide by.
        device: of the weight.
        dtype: of the weight.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        [..., *normalized_shape] -> the same

    Raises:
        ValueError: an empty shape, or an input with other trailing axes.
        TypeError: an input that is not floating point.

    Examples:
        >>> ScaleNorm(2)(torch.tensor([3.0, 4.0])).detach()
        tensor([0.8485, 1.1314])

    References:
        Nguyen and Salazar 2019, arxiv.org/abs/1910.05895
    """

    usual = SCALE

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str = "auto",
    ) -> None:
        super().__init__(normalized_shape, eps, device=device, dtype=dtype, spec=SCALE, kernel=kernel)

    def reset_parameters(self) -> None:
        """Start at the length of a vector whose elements have a mean square of 1."""
        assert self.weight is not None
        nn.init.constant_(self.weight, math.sqrt(math.prod(self.normalized_shape)))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input`` [..., *normalized_shape]."""
        return self._normalize(input)

    def extra_repr(self) -> str:
        """Return the shape and eps."""
        return ", ".join([f"{self.normalized_shape}, eps={self.eps}", *told_kernel(self.kernel)])
