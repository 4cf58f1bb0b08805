"""DeepNorm: x <- N(alpha x + F(x)), with v, out and the MLP smaller by beta at the start.

Post-Norm whose updates stay bounded at a thousand layers. N encoder and M decoder layers:

- one stack of L layers: alpha = (2 L)^(1/4), beta = (8 L)^(-1/4);
- encoder of a pair: alpha = 0.81 (N^4 M)^(1/16), beta = 0.87 (N^4 M)^(-1/16);
- decoder of a pair: alpha = (3 M)^(1/4), beta = (12 M)^(-1/4).

beta multiplies Xavier's initialisation of v, out and both matrices of the MLP; q and k keep it. Some published code
has beta inverted, or one alpha for every depth: the baselines measured with it are not DeepNorm.

References: Wang et al. 2022, arxiv.org/abs/2203.00555
"""

from __future__ import annotations

from collections.abc import Mapping

from normwise.placements._stack import LINEAR, Stack
from normwise.spec import Wiring

NEEDS_FINAL_NORM = False
INIT = "xavier"
ALIASES = ("deepnet",)


def wire(layer: int, stack: Stack, sublayer: str) -> Wiring:
    """Return a norm after the add, and alpha on the stream."""
    return Wiring(after_add=True, skip_scale=_alpha(stack))


def gains(layer: int, stack: Stack, sublayer: str) -> Mapping[str, float]:
    """Return beta for the matrices that a branch is linear in."""
    return dict.fromkeys(LINEAR, _beta(stack))


def _alpha(stack: Stack) -> float:
    if stack.alone:
        return float((2 * stack.depth) ** 0.25)
    return 0.81 * stack.mixed if stack.side == "encoder" else float((3 * stack.decoder) ** 0.25)


def _beta(stack: Stack) -> float:
    if stack.alone:
        return float((8 * stack.depth) ** -0.25)
    return 0.87 / stack.mixed if stack.side == "encoder" else float((12 * stack.decoder) ** -0.25)
