"""A vector divided by its p-norm, for any p above 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from normwise.functional._checks import axes_of, check_floating
from normwise.functional.hidden import l2_norm
from normwise.kernels._arithmetic import no_autocast

__all__ = ["lp_norm"]


def lp_norm(
    input: torch.Tensor, p: float = 2.0, dim: int | Sequence[int] = -1, eps: float = 1e-12, *, kernel: str = "auto"
) -> torch.Tensor:
    """Return x / max(|x|_p, eps) with |x|_p = sum(|x|^p)^(1/p), as ``F.normalize`` and ONNX's LpNormalization.

    A vector of zeros stays zeros. Norms are taken in float32 or wider, of vectors first divided by the power of
    two at their largest element, so that no |x|^p overflows. With p = 2 it is ``l2_norm``.

    Args:
        input: any shape.
        p: above 0; 1 for the sum of absolute values, ``math.inf`` for the largest.
        dim: the axis or axes that share one norm.
        eps: smallest norm to divide by, 0 or more.
        kernel: as in ``l2_norm``; another p is computed in plain torch.

    Returns:
        A tensor like ``input``.

    Raises:
        ValueError: a ``p`` that is not above 0, a negative ``eps``, or axes that the input does not have.
        TypeError: an input that is not floating point.

    Examples:
        >>> lp_norm(torch.tensor([3.0, -4.0, 1.0]), p=1)
        tensor([ 0.3750, -0.5000,  0.1250])
    """
    if not p > 0 or not 0 <= eps < math.inf:
        raise ValueError(
            f"lp_norm() divides by max(sum(|x|^p)^(1/p), eps), given p = {p} and eps = {eps}; "
            "pass a p above 0 and a finite eps of 0 or more"
        )
    if p == 2:
        return l2_norm(input, dim, eps, kernel=kernel)
    check_floating(input, "lp_norm()")
    axes = axes_of(dim, input, "lp_norm()")
    with no_autocast(input):
        return _normalize(input.to(torch.promote_types(input.dtype, torch.float32)), p, axes, eps).to(input.dtype)


def _normalize(h: torch.Tensor, p: float, dims: tuple[int, ...], eps: float) -> torch.Tensor:
    if h.numel() == 0:
        return h
    peak = torch.linalg.vector_norm(h.detach(), math.inf, dims, keepdim=True).clamp_min(torch.finfo(h.dtype).tiny)
    power = torch.exp2(peak.log2().floor())  # dividing by it rounds nothing
    h = h / power
    length = torch.linalg.vector_norm(h, p, dims, keepdim=True)
    return h / torch.where(length > 0, length, 1.0).maximum(eps / power)
