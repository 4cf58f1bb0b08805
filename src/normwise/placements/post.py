"""Post-Norm: x <- N(x + F(x)).

The transformer as it was first published, and BERT. The stream is normalized after every add, so its size is 1
everywhere; what a layer adds is not diluted, and of a deep stack with Xavier's initialisation the gradient of a token
falls by 2^(-1/2) for each attention sublayer, which warm-up or small branches (a smaller initialisation) repair.

References: Vaswani et al. 2017, arxiv.org/abs/1706.03762; Xiong et al. 2020, arxiv.org/abs/2002.04745
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = False
INIT = "xavier"
ALIASES = ("post-ln", "post-norm")


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return one norm after the add."""
    return Wiring(after_add=True)
