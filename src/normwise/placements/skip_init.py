"""SkipInit: x <- x + a F(x), a one learned number for each sublayer that starts at 0; no norm at all.

What batch norm does to a deep residual net at the start, done by one number.

References: De and Smith 2020, arxiv.org/abs/2002.10444
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Gain, Wiring

NEEDS_FINAL_NORM = False
INIT = "xavier"


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return no norm, and a learned factor on the branch."""
    return Wiring(branch_gain=Gain(initial=0.0))
