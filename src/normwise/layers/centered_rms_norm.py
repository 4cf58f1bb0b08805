"""CRMSNorm: RMSNorm of a zero-sum vector that is stored without its last feature."""

from __future__ import annotations

from dataclasses import replace

import torch

from normwise.functional.hidden import RMS
from normwise.layers._norm_module import HiddenModule
from normwise.spec import Statistic

__all__ = ["CenteredRMSNorm"]

_CENTERED = replace(RMS, statistic=Statistic.COMPLETED)


class CenteredRMSNorm(HiddenModule):
    """Compute x / sqrt((sum(x^2) + sum(x)^2) / (n + 1) + eps) over the n stored features.

    A vector of n + 1 features that sum to 0 is stored without the last, which is -sum(x): what is left of a
    LayerNorm network after its streams were centred.

    Args:
        normalized_shape: n, size of the last axis as stored.
        eps: added to the mean square.
        elementwise_affine: whether there is a gain; the paper has none.
        device: of the gain.
        dtype: of the gain.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        [..., n] -> the same

    Raises:
        ValueError: an input with another last axis.
        TypeError: an input that is not floating point.

    Examples:
        >>> CenteredRMSNorm(2, eps=0.0)(torch.tensor([1.0, 1.0]))  # of (1, 1, -2)
        tensor([0.7071, 0.7071])

    References:
        Jiang et al. 2023, arxiv.org/abs/2305.14858
    """

    usual = _CENTERED

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-6,
        elementwise_affine: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str = "auto",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, False, device, dtype, spec=_CENTERED, kernel=kernel)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input`` [..., n]."""
        return self._normalize(input)
