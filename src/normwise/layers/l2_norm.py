"""L2Norm: a vector divided by its length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from normwise import kernels
from normwise.functional.hidden import l2_norm
from normwise.layers._norm_module import told_kernel

__all__ = ["L2Norm"]


class L2Norm(nn.Module):
    """Compute x / max(|x|, eps) over one axis or several, as ``F.normalize``; it learns nothing.

    Args:
        dim: the axis or axes that share one length.
        eps: smallest length to divide by.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        any -> the same

    Raises:
        ValueError: an input that lacks the axes.
        TypeError: an input that is not floating point.

    Examples:
        >>> L2Norm()(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """

    kernel: str = "auto"

    def __init__(self, dim: int | Sequence[int] = -1, eps: float = 1e-12, *, kernel: str = "auto") -> None:
        super().__init__()
        self.dim = dim if isinstance(dim, int) else tuple(dim)
        self.eps = eps
        self.kernel = kernels.check_name(kernel)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input`` over ``dim``."""
        return l2_norm(input, self.dim, self.eps, kernel=self.kernel)

    def extra_repr(self) -> str:
        """Return axes and eps."""
        return ", ".join([f"dim={self.dim}, eps={self.eps}", *told_kernel(self.kernel)])
