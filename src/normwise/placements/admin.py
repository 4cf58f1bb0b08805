"""Admin: x <- N(omega * x + F(x)), omega a learned gain for each feature on the skip.

omega starts at sqrt(sum of the variances of all branches before), found by a pass over one batch
(``models.profile_admin``), so that the output depends on no branch too much; unprofiled it starts at 1, which is
Post-Norm. After training omega folds into the norm before it.

References: Liu et al. 2020, arxiv.org/abs/2004.08249
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Gain, Wiring

NEEDS_FINAL_NORM = False
INIT = "xavier"


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return a norm after the add, and a learned gain on the stream."""
    return Wiring(after_add=True, skip_gain=Gain(vector=True))
