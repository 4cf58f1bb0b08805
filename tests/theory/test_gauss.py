"""Moments of activation functions against closed forms, and the short way against the long one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from normwise.theory import _gauss
from normwise.theory._gauss import covariance, slope

Function = Callable[[torch.Tensor], torch.Tensor]


def moments_of(sizes: torch.Tensor) -> torch.Tensor:
    """Return second moments of tokens of these sizes that point anywhere."""
    torch.manual_seed(0)
    ways = functional.normalize(torch.randn(len(sizes), 6, dtype=torch.float64), dim=1)
    return ways @ ways.T * sizes[:, None] * sizes[None, :]


@pytest.mark.parametrize("spread", [0.0, 0.019, 0.5])
def test_relu_has_the_arc_cosine_kernel(spread: float) -> None:
    sizes = 1 + spread * torch.linspace(-1, 1, 24, dtype=torch.float64)
    moments = moments_of(sizes)
    rho = (moments / sizes[:, None] / sizes[None, :]).clamp(-1, 1)
    # Cho and Saul 2009: (sin t + (pi - t) cos t) / (2 pi) times both sizes
    kernel = ((1 - rho.square()).sqrt() + (math.pi - rho.arccos()) * rho) / (2 * math.pi)
    found = covariance(functional.relu, moments)
    torch.testing.assert_close(found, kernel * sizes[:, None] * sizes[None, :], rtol=0, atol=8e-3)


@pytest.mark.parametrize("spread", [0.0, 0.039, 0.1])
@pytest.mark.parametrize("size", [0.02, 1.0, 5.0])
@pytest.mark.parametrize("function", [functional.gelu, functional.silu], ids=lambda f: f.__name__)
def test_sizes_in_bins_share_tables(
    function: Function, size: float, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = moments_of(size * (1 + spread * torch.linspace(-1, 1, 64, dtype=torch.float64)))
    for each in function, slope(function):
        monkeypatch.undo()
        short = covariance(each, moments)
        monkeypatch.setattr(_gauss, "_ANGLES", 10**9)
        long = covariance(each, moments)
        assert not torch.equal(short, long)  # two ways
        assert float((short - long).abs().max() / long.diagonal().max()) < 3e-2
