"""ResiDual: a Post-Norm stream and, beside it, the plain sum of all branches; out = p + N(r).

p <- N(p + F(p)) and r <- r + F(p), starting from the same input. Two streams: what one residual stream cannot express,
so it has a stack of its own. The last norm has eps 1e-7 and stands on r.

References: Xie et al. 2023, arxiv.org/abs/2304.14802
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = True
INIT = "xavier"
ALIASES = ("resi-dual",)
STREAMS = 2


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return the wiring of the first stream; the second adds up the branches."""
    return Wiring(after_add=True)
