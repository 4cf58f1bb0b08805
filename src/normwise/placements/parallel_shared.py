"""Parallel with one norm: x <- x + A(N(x)) + M(N(x)).

GPT-J, Phi, Cohere, PaLM.

References: Wang and Komatsuzaki 2021, github.com/kingoflolz/mesh-transformer-jax; Chowdhery et al. 2022,
arxiv.org/abs/2204.02311
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = True
INIT = "gpt-2"
ALIASES = ("gpt-j", "palm")


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return the norm that all parallel sublayers of a layer read."""
    return Wiring(before=True, parallel=True, shares_norm=True)
