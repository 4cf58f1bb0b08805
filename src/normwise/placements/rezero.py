"""ReZero: x <- x + a F(x), a one learned number for each layer that starts at 0; no norm at all.

Both sublayers of a layer share a. Every layer starts as the identity.

References: Bachlechner et al. 2020, arxiv.org/abs/2003.04887
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Gain, Wiring

NEEDS_FINAL_NORM = False
INIT = "xavier"


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return no norm, and one learned factor for the branches of a layer."""
    return Wiring(branch_gain=Gain(initial=0.0, shared=True))
