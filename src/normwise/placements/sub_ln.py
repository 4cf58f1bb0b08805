"""Sub-LN: x <- x + W N(inner(N(x))), a second norm inside the sublayer, before its last matrix.

Magneto. v, out and the MLP start larger by gamma = sqrt(ln 2L) in one stack of L layers; in a pair of N encoder and M
decoder layers by sqrt(ln(3M) ln(2N) / 3) in the encoder and sqrt(ln 3M) in the decoder, where attention over the
encoder is not scaled and has the first norm alone.

References: Wang et al. 2022, arxiv.org/abs/2210.06423
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from normwise.placements._stack import LINEAR, Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = True
INIT = "xavier"
ALIASES = ("magneto",)


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return a norm before the sublayer and one before its last matrix."""
    return Wiring(before=True, inner=sublayer != "cross")


def gains(layer: int, stack: Stack, sublayer: str) -> Mapping[str, float]:
    """Return gamma for the matrices that a branch is linear in."""
    if sublayer == "cross":
        return {}
    if stack.alone:
        squared = math.log(2 * stack.depth)
    elif stack.side == "encoder":
        squared = math.log(3 * stack.decoder) * math.log(2 * stack.encoder) / 3
    else:
        squared = math.log(3 * stack.decoder)
    return dict.fromkeys(LINEAR, math.sqrt(squared))
