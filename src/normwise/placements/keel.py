"""KEEL: x <- N(alpha x + F(N'(x))), alpha the number of sublayers.

Post-Norm with a second norm before the sublayer and a stream so heavy that a thousand layers train. The paper ties
alpha to depth; whether to layers or sublayers is not settled by public code: sublayers are taken here.

References: arxiv.org/abs/2601.19895
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = False
INIT = "xavier"


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return a norm before the sublayer, one after the add, and alpha on the stream."""
    return Wiring(before=True, after_add=True, skip_scale=2.0 * stack.depth)
