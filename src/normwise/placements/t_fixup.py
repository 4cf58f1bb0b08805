"""T-Fixup: no norm and no warm-up, but an initialisation that is smaller by depth.

Of N encoder layers the MLP and out are multiplied by 0.67 N^(-1/4), v by sqrt(2) times that (for its Xavier bound is
that of q, k and v together); of M decoder layers by (9 M)^(-1/4) and sqrt(2) times that, attention over the encoder
included. Embeddings are N(0, 1/d) times (9 N)^(-1/4), N the depth of their stack.

References: Huang et al. 2020, proceedings.mlr.press/v119/huang20f.html
"""

from __future__ import annotations

from collections.abc import Mapping

from normwise.placements._stack import LINEAR, Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = False
INIT = "xavier"
ALIASES = ("tfixup", "fixup")


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return no norm."""
    return Wiring()


def gains(layer: int, stack: Stack, sublayer: str) -> Mapping[str, float]:
    """Return the factors of the stack's depth."""
    by = 0.67 * stack.depth**-0.25 if stack.side == "encoder" else (9 * stack.depth) ** -0.25
    return {**dict.fromkeys(LINEAR, by), "v": 2**0.5 * by}


def embedding_gain(stack: Stack) -> float:
    """Return the factor of the embeddings' N(0, 1/d)."""
    return float((9 * stack.depth) ** -0.25)
