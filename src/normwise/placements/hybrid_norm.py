"""HybridNorm: attention without an input norm but with norms on q, k and v; N(x) after its add; the MLP unnormalized.

x <- N(x + Attn(x)), then x <- x + MLP(x), and a norm after the last layer: the stream is reset in every layer.
The variant with a star has Pre-Norm in the first layer.

References: Zhuo et al. 2025, arxiv.org/abs/2503.04598
"""

from __future__ import annotations

from normwise.placements._stack import Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = True
INIT = "gpt-2"


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return a norm after attention's add, with q, k and v normalized."""
    return Wiring() if sublayer == "mlp" else Wiring(after_add=True, qkv="qkv")
