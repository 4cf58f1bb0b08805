"""Moments of activation functions of normal numbers, by Gauss-Hermite quadrature.

For z ~ N(0, a), z' ~ N(0, b) with covariance c: E[f(z) f(z')], for whole matrices of such pairs at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.func import grad, vmap

__all__ = ["covariance", "slope"]

Function = Callable[[torch.Tensor], torch.Tensor]
_POINTS = 48  # a kink (ReLU) converges slowly: 48 points give three digits


def _nodes() -> tuple[torch.Tensor, torch.Tensor]:
    """Return points and weights of E[f(z)], z ~ N(0, 1): Golub and Welsch 1969, from the recurrence's matrix."""
    off = torch.arange(1, _POINTS, dtype=torch.float64).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return values, vectors[0].pow(2)


def slope(function: Function) -> Function:
    """Return the derivative of a function of single numbers."""
    return lambda z: vmap(grad(function))(z.flatten()).reshape(z.shape)


def covariance(function: Function, moments: torch.Tensor) -> torch.Tensor:
    """Return E[f(z_i) f(z_j)] for z with second moments [T, T].

    Args:
        function: f, elementwise.
        moments: [T, T], symmetric, positive semidefinite.
    """
    points, weights = _nodes()
    scale = moments.diagonal().clamp_min(0).sqrt()
    rho = (moments / (scale[:, None] * scale[None, :]).clamp_min(1e-300)).clamp(-1, 1)
    # f(z_i) at all points, and the part of z_j that z_i does not know: E over it first, then over z_i
    known = function(scale[:, None] * points)  # [T, P]
    size = len(scale)
    found = torch.empty_like(moments)
    for i in range(size):  # a row at a time: T * P * P numbers
        first = rho[i, :, None, None] * points[:, None]  # [T, P, 1]
        rest = (1 - rho[i, :, None, None].pow(2)).clamp_min(0).sqrt() * points  # [T, 1, P]
        other = function(scale[:, None, None] * (first + rest)) @ weights  # [T, P]
        found[i] = (other * known[i] * weights).sum(-1)
    found.diagonal().copy_((known.pow(2) * weights).sum(-1))
    return (found + found.T) / 2
