"""L2Norm: a vector divided by its length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from normwise.functional.hidden import l2_norm

__all__ = ["L2Norm"]


class L2Norm(nn.Module):
    """Compute x / max(|x|, eps) over one axis or several, as ``F.normalize``; it learns nothing.

    Args:
        dim: the axis or axes that share one length.
        eps: smallest length to divide by.

    Shape:
        any -> the same

    Raises:
        ValueError: an input that lacks the axes.
        TypeError: an input that is not floating point.

    Examples:
        >>> L2Norm()(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """

    def __init__(self, dim: int | Sequence[int] = -1, eps: float = 1e-12) -> None:
        super().__init__()
        self.dim = dim if isinstance(dim, int) else tuple(dim)
        self.eps = eps

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input`` over ``dim``."""
        return l2_norm(input, self.dim, self.eps)

    def extra_repr(self) -> str:
        """Return axes and eps."""
        return f"dim={self.dim}, eps={self.eps}"
