"""Moments of softmax weights beside a simulation: few keys and many, scores alike and far apart."""

from __future__ import annotations

import pytest
import torch

from normwise.theory._softmax import weight_moments


@pytest.mark.parametrize("keys", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("deviation", [0.1, 0.5, 1.0, 2.0, 5.0, 8.0, 20.0])
def test_moments_beside_a_simulation(keys: int, deviation: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(20_000, keys, generator=generator, dtype=torch.float64) * deviation).softmax(-1)
    squares = weights.square().sum(-1, keepdim=True)
    energy = (weights.square() * (1 - 2 * weights + squares)).sum(-1).mean()
    told = weight_moments(*(torch.full((1,), float(n), dtype=torch.float64) for n in (deviation**2, keys)))
    assert float(told[0]) == pytest.approx(float(squares.mean()), rel=0.02)
    # above 8 deviations the energy is continued as 1/s
    assert float(told[1]) == pytest.approx(float(energy), rel=0.08 if deviation <= 8 else 0.2, abs=1e-9)
