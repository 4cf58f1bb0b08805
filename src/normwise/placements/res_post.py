"""Res-post-norm: x <- x + N(F(x)), with a norm after the last layer.

Swin v2 calls it so, and starts with a gain of 0; OLMo 2 calls it reordered norm. The branch reads the stream as it is,
so without a norm on query and key the attention logits grow with the stream.

References: Liu et al. 2021, arxiv.org/abs/2111.09883; OLMo et al. 2025, arxiv.org/abs/2501.00656
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = True
INIT = "gpt-2"
ALIASES = ("reordered", "res-post-norm", "olmo2", "swin-v2")


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return one norm on the branch."""
    return Wiring(after_branch=True)
