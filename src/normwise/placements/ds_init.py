"""DS-Init: Post-Norm whose weights start smaller by 1 / sqrt(l), l = 1, 2, ... the number of the layer.

Every matrix of layer l is drawn from U(-b, b) with b its Xavier bound divided by sqrt(l). The authors' code gives
l^(-1/4); this is what the paper says.

References: Zhang et al. 2019, aclanthology.org/D19-1083
"""

from __future__ import annotations

from collections.abc import Mapping

from normwise.placements._stack import ROLES, Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = False
INIT = "xavier-uniform"


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return one norm after the add."""
    return Wiring(after_add=True)


def gains(layer: int, stack: Stack, sublayer: str) -> Mapping[str, float]:
    """Return 1 / sqrt(l) for every matrix."""
    return dict.fromkeys(ROLES, (layer + 1) ** -0.5)
