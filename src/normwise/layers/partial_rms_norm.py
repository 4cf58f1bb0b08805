"""pRMSNorm: RMSNorm whose statistic is taken over the first features only."""

from __future__ import annotations

from dataclasses import replace

import torch

from normwise.functional._checks import size_of
from normwise.functional.hidden import RMS
from normwise.layers._norm_module import HiddenModule

__all__ = ["PartialRMSNorm"]


class PartialRMSNorm(HiddenModule):
    """Compute weight * x / sqrt(mean(x_p^2) + eps), x_p the first int(H * p) features.

    Args:
        normalized_shape: H, size of the last axis.
        p: fraction of the features that the statistic is taken over, (0, 1]; 0.0625 in the paper.
        eps: added to the mean square.
        elementwise_affine: whether there is a gain.
        device: of the gain.
        dtype: of the gain.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        [..., H] -> the same

    Raises:
        ValueError: a ``p`` that leaves no feature, or an input with another last axis.
        TypeError: an input that is not floating point.

    Examples:
        >>> PartialRMSNorm(4, p=0.5)(torch.tensor([2.0, 2.0, 8.0, 8.0])).detach()
        tensor([1., 1., 4., 4.])

    References:
        Zhang and Sennrich 2019, arxiv.org/abs/1910.07467
    """

    usual = RMS

    def __init__(
        self,
        normalized_shape: int,
        p: float = 0.0625,
        eps: float = 1e-8,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str = "auto",
    ) -> None:
        normalized_shape = size_of(normalized_shape, "normalized_shape", "PartialRMSNorm")
        if not 0 < p <= 1 or int(normalized_shape * p) < 1:
            raise ValueError(
                f"PartialRMSNorm takes its statistic over int(H * p) features, given H = {normalized_shape} "
                f"and p = {p}; pass a p in (0, 1] that leaves at least one"
            )
        spec = replace(RMS, partial=p)
        super().__init__(normalized_shape, eps, elementwise_affine, False, device, dtype, spec=spec, kernel=kernel)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input`` [..., H]."""
        return self._normalize(input)
