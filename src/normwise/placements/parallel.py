"""Parallel: x <- x + A(N(x)) + M(N'(x)), attention and MLP from one stream, each with its norm.

GPT-NeoX. Both branches are added at once: half the depth, and one matrix product where projections are fused.

References: Black et al. 2022, arxiv.org/abs/2204.06745
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = True
INIT = "gpt-2"
ALIASES = ("gpt-neox",)


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return a norm of its own before a parallel sublayer."""
    return Wiring(before=True, parallel=True)
