"""B2T: Post-Norm whose last norm of a layer also gets the layer's input: N(x_in + x + F(x)).

The bottom-to-top connection passes around the inner norms of a layer, so that gradients do, too.

References: Takase et al. 2022, arxiv.org/abs/2206.00330
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = False
INIT = "xavier"
ALIASES = ("bottom-to-top",)


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return Post-Norm, with the layer's input added again before its last norm."""
    return Wiring(after_add=True, adds_block_input=sublayer == "mlp")
