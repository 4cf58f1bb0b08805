"""LayerNorm scaling: x <- x + F(N(x) / sqrt(l)), l = 1, 2, ... the number of the layer.

Pre-Norm whose norms are divided by the root of the depth reached, so that the stream grows as q_0 + v H_l, with the
logarithm of the depth. The norm after the last layer is not scaled. Not to be combined with an initialisation that is
smaller by depth.

References: Sun et al. 2025, arxiv.org/abs/2502.05795
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = True
INIT = "normal"
ALIASES = ("lns", "curse-of-depth")


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return Pre-Norm with a smaller input in later layers."""
    return Wiring(before=True, input_scale=(layer + 1) ** -0.5)
