"""NormFormer: Pre-Norm with a gain for each attention head, a norm after attention, and one inside the MLP.

Attention: x <- x + N(Attn(N(x))), where head h is multiplied by a learned number that starts at 1; MLP: x <- x +
W_2 N(phi(W_1 N(x))). All of it starts neutral. The learned gain on the skip of small models is left out.

References: Shleifer et al. 2021, arxiv.org/abs/2110.09456
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = True
INIT = "gpt-2"


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return Pre-Norm with its second norm after attention, or inside the MLP."""
    return (
        Wiring(before=True, inner=True)
        if sublayer == "mlp"
        else Wiring(before=True, after_branch=True, head_gains=True)
    )
