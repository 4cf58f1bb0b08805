"""Residual multiplier: x <- x + m F(N(x)), m = 1.4 / sqrt(L).

MiniCPM: the stream grows by 1.96 v over any depth. Granite has the same with one m for a model family.

References: Hu et al. 2024, arxiv.org/abs/2404.06395
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = True
INIT = "normal"
ALIASES = ("minicpm", "granite")


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return Pre-Norm with a constant on the branch."""
    return Wiring(before=True, branch_scale=1.4 * stack.depth**-0.5)
