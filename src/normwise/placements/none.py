"""None: x <- x + F(x), nothing else.

The second moment of the stream multiplies by 1 + v with every sublayer: what all others are compared with.
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = False
INIT = "xavier"
ALIASES = ("no-norm",)


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return no norm."""
    return Wiring()
