"""Pre-Norm: x <- x + F(N(x)), with a norm after the last layer.

GPT-2, Llama and most of what followed. The stream grows by one branch a sublayer, q_0 + sum of v, so gradients of
late layers are smaller by 1 / sqrt(q), and deep layers turn the stream less and less. The last matrix of each branch
starts smaller by sqrt(2 L), as in GPT-2.

References: Wang et al. 2019, arxiv.org/abs/1906.01787; Xiong et al. 2020, arxiv.org/abs/2002.04745
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = True
INIT = "gpt-2"
ALIASES = ("pre-ln", "pre-norm")


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return one norm before the sublayer."""
    return Wiring(before=True)
