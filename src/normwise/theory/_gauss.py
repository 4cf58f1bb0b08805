"""Moments of activation functions of normal numbers, by Gauss-Hermite quadrature.

For z ~ N(0, a), z' ~ N(0, b) with covariance c: E[f(z) f(z')], for whole matrices of such pairs at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import combinations_with_replacement

import torch

__all__ = ["Function", "covariance", "slope"]

Function = Callable[[torch.Tensor], torch.Tensor]
_POINTS = 48  # a kink (ReLU) converges slowly: 48 points give three digits
# angles at which pairs of one size are computed; between them E is taken as straight, to (pi / 256)^2 / 8 = 2e-5
_ANGLES = 257
# sizes so near each other that each counts by the root of its E[f(z)^2]; a norm's eps leaves them so. What that leaves
# out is up to 3e-2 of the largest, where theory is right to several (tests/theory/test_gauss.py).
_ALIKE = 0.04


@cache
def _nodes() -> tuple[torch.Tensor, torch.Tensor]:
    """Return points and weights of E[f(z)], z ~ N(0, 1): Golub and Welsch 1969, from the recurrence's matrix."""
    off = torch.arange(1, _POINTS, dtype=torch.float64).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return values, vectors[0].pow(2)


def slope(function: Function) -> Function:
    """Return the derivative of a function of single numbers."""

    def derivative(z: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            at = z.detach().clone().requires_grad_()
            return torch.autograd.grad(function(at).sum(), at)[0]

    return derivative


def covariance(function: Function, moments: torch.Tensor) -> torch.Tensor:
    """Return E[f(z_i) f(z_j)] for z with second moments [T, T].

    Args:
        function: f, elementwise.
        moments: [T, T], symmetric, positive semidefinite.
    """
    scale = moments.diagonal().clamp_min(0).sqrt()
    rho = (moments / (scale[:, None] * scale[None, :]).clamp_min(1e-300)).clamp(-1, 1)
    squares = _squares(function, scale)
    bins, sizes = _binned(scale)
    count = len(scale)
    if count**2 > _ANGLES * len(sizes) * (len(sizes) + 1) / 2:
        each = (squares / _squares(function, sizes)[bins].clamp_min(1e-300)).sqrt()
        found = torch.empty_like(rho)
        for one, other in combinations_with_replacement(range(len(sizes)), 2):
            rows, columns = bins == one, bins == other
            block = _by_angle(function, sizes[one], sizes[other], rho[rows][:, columns])
            found[rows.nonzero(), columns.nonzero().T] = block
            found[columns.nonzero(), rows.nonzero().T] = block.T
        found = found * each[:, None] * each[None, :]
    else:
        found = torch.stack([_pairs(function, scale[i], scale, rho[i]) for i in range(count)])
    found.diagonal().copy_(squares)
    return (found + found.T) / 2


def _binned(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each size the number of its bin, and the sizes in the middle of the bins."""
    least = scale.max().clamp_min(1e-300) * 1e-6  # below, a token counts for nothing
    _, bins = (scale.clamp_min(least).log() / math.log1p(2 * _ALIKE)).round().unique(return_inverse=True)
    middle = torch.stack([scale[bins == each].mean() for each in range(int(bins.max()) + 1)])
    return bins, middle


def _squares(function: Function, scale: torch.Tensor) -> torch.Tensor:
    """Return E[f(z)^2] for z of each size."""
    points, weights = _nodes()
    return (function(scale[:, None] * points).pow(2) * weights).sum(-1)


def _pairs(function: Function, one: torch.Tensor, others: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """Return E[f(z) f(z_n)] for z of one size and N others: E over what z does not know of z_n first, then over z."""
    points, weights = _nodes()
    first = rho[:, None, None] * points[:, None]  # [N, P, 1]
    rest = (1 - rho[:, None, None].pow(2)).clamp_min(0).sqrt() * points  # [N, 1, P]
    inner = function(others[:, None, None] * (first + rest)) @ weights  # [N, P]
    return (inner * function(one * points) * weights).sum(-1)


def _by_angle(function: Function, one: torch.Tensor, other: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """Return the same for pairs of two sizes, between whose angles little is worth computing."""
    angles = torch.linspace(0, math.pi, _ANGLES, dtype=torch.float64)
    table = _pairs(function, one, other.expand(_ANGLES), angles.cos())
    at = rho.arccos() * ((_ANGLES - 1) / math.pi)
    below = at.floor().long().clamp(max=_ANGLES - 2)
    return torch.lerp(table[below], table[below + 1], at - below)
