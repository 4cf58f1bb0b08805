"""Mix-LN: Post-Norm in the first quarter of the layers, Pre-Norm in the rest, with a norm after the last layer.

The first ceil(a L) layers are Post-Norm, a = 0.25 (0.0625 was used for 7 billion parameters).

References: Li et al. 2024, arxiv.org/abs/2412.13795
"""

from __future__ import annotations

import math

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = True
INIT = "gpt-2"
SHARE = 0.25  # of the layers, Post-Norm


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return Post-Norm in the first layers, Pre-Norm in the others."""
    return Wiring(after_add=True) if layer < math.ceil(SHARE * stack.depth) else Wiring(before=True)
