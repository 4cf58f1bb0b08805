"""Moments of softmax weights over n keys whose scores are independent normal numbers.

With Z = sum_j e^(l_j), 1 / Z^k is the integral of t^(k-1) e^(-t Z) / (k-1)! over t, which parts into one factor a key:
E[sum a^2] = n int psi_2 psi_0^(n-1) d tau and so on, with psi_k(tau) = E[exp(k y - e^y)], y ~ N(tau, s^2), tau = log t.
"""

from __future__ import annotations

import math

import torch

__all__ = ["weight_moments"]

_SPREAD = 6.0  # deviations of a score that count
_SCORES, _TIMES = 91, 128  # points of the integrals over a score and over tau
_SIZE = 8.0  # deviation of the scores from which on one key has it all but 1/s: Derrida 1981, the frozen phase
_SMALL = 0.05  # variance below which e^(s^2) / (n - 1 + e^(s^2)) and A (1 - A) are right to 1e-3


def weight_moments(variance: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A = E[sum_j a_j^2] and E[sum_j a_j^2 (1 - 2 a_j + sum_k a_k^2)], the energy of a score's gradient.

    Args:
        variance: s^2, [T].
        count: n, [T].
    """
    if float(variance.max()) < _SMALL:
        same = variance.exp() / (count - 1 + variance.exp())
        return same, same * (1 - same)
    deviation = variance.clamp(0, _SIZE**2).sqrt()
    z = torch.linspace(-_SPREAD, _SPREAD, _SCORES, dtype=torch.float64)
    weight = torch.softmax(-z.square() / 2, 0)
    low, high = -_SPREAD * deviation - count.log() - 8, _SPREAD * deviation + 4
    tau = low[:, None] + (high - low)[:, None] * torch.linspace(0, 1, _TIMES, dtype=torch.float64)  # [T, S]
    # exp(k y - e^y) is 0 from y = 6 on, and e^y is cut there so that no infinity meets it
    grown = (tau[..., None] + deviation[:, None, None] * z).clamp(max=6).exp()
    kept = (-grown).exp() * weight
    psi = [(kept * grown**k).sum(-1) for k in range(5)]
    n, step = count[:, None], (high - low) / (_TIMES - 1)

    def integral(integrand: torch.Tensor, factorial: int) -> torch.Tensor:
        return integrand.sum(-1) * step / math.factorial(factorial)

    others = psi[0] ** (n - 1)
    square = integral(n * psi[2] * others, 1)
    cube = integral(n * psi[3] * others, 2)
    fourth = integral(n * psi[4] * others, 3) + integral(n * (n - 1) * psi[2] ** 2 * psi[0] ** (n - 2).clamp_min(0), 3)
    shrunk = (_SIZE / variance.clamp_min(_SIZE**2).sqrt()).clamp(max=1.0)
    return 1 - (1 - square).clamp_min(0) * shrunk, (square - 2 * cube + fourth).clamp_min(0) * shrunk
