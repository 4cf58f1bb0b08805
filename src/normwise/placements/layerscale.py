"""LayerScale: x <- x + lambda * F(N(x)), lambda a learned gain for each feature that starts small.

CaiT: 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond. Every layer starts close to the identity.

References: Touvron et al. 2021, arxiv.org/abs/2103.17239
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Gain, Wiring

NEEDS_FINAL_NORM = True
INIT = "normal"
ALIASES = ("cait", "layer-scale")


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return Pre-Norm with a small learned gain on the branch."""
    return Wiring(before=True, branch_gain=Gain(initial=_initial(stack.depth), vector=True))


def _initial(depth: int) -> float:
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6
