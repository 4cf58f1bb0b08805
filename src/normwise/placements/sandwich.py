"""Sandwich: x <- x + N(F(N(x))), with a norm after the last layer.

Every branch adds a unit, whatever its weights are: the stream is q_0 + 2 l after l layers. CogView adds to it a
division by the largest element, which couples the samples of a batch and is not part of this placement. Peri-LN is the
same wiring; Gemma 2 and 3 use it.

References: Ding et al. 2021, arxiv.org/abs/2105.13290; Kim et al. 2025, arxiv.org/abs/2502.02732
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = True
INIT = "gpt-2"
ALIASES = ("peri-ln", "peri", "sandwich-ln")


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return a norm before the sublayer and one on the branch."""
    return Wiring(before=True, after_branch=True)
