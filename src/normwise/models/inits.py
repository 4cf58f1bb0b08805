"""Initialisations: how large the matrices of a model start, before a placement's gains.

The size of the branches at the start decides what a placement does more than the placement itself: with N(0, 0.02) and
128 features Post-Norm and Pre-Norm cannot be told apart, with Xavier's they can.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from normwise.blocks import Layer, Stack
from normwise.placements._asked import advice, kebab
from normwise.placements._stack import OUTPUTS

__all__ = ["INITS", "initialise"]

# Draws a matrix in place, given what it is: its role, the number of its layer and the depth of its stack.
Draw = Callable[[torch.Tensor, str, int, int], None]


def _normal(weight: torch.Tensor, role: str, layer: int, depth: int) -> None:
    """N(0, 0.02^2): BERT."""
    nn.init.normal_(weight, std=0.02)


def _gpt_2(weight: torch.Tensor, role: str, layer: int, depth: int) -> None:
    """N(0, 0.02^2), and what writes to the stream smaller by sqrt(2 L): GPT-2, Megatron."""
    nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * depth) if role in OUTPUTS else 1.0))


def _mitchell(weight: torch.Tensor, role: str, layer: int, depth: int) -> None:
    """N(0, 1 / fan_in), and what writes to the stream smaller by sqrt(2 (l + 1)), cut at 3 deviations: OLMo 1."""
    std = (weight.shape[1] * (2 * (layer + 1) if role in OUTPUTS else 1)) ** -0.5
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


def _small(weight: torch.Tensor, role: str, layer: int, depth: int) -> None:
    """N(0, 2 / (5 H)), H the smaller side: Nguyen and Salazar 2019."""
    nn.init.normal_(weight, std=math.sqrt(2 / (5 * min(weight.shape))))


def _fan_in(weight: torch.Tensor, role: str, layer: int, depth: int) -> None:
    """N(0, 1 / fan_in): a matrix keeps the second moment."""
    nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def _xavier(weight: torch.Tensor, role: str, layer: int, depth: int) -> None:
    """N(0, 2 / (fan_in + fan_out)): Glorot and Bengio 2010."""
    nn.init.xavier_normal_(weight)


def _xavier_uniform(weight: torch.Tensor, role: str, layer: int, depth: int) -> None:
    """The same variance, uniform."""
    nn.init.xavier_uniform_(weight)


INITS: dict[str, Draw] = {
    "fan-in": _fan_in,
    "gpt-2": _gpt_2,
    "mitchell": _mitchell,
    "normal": _normal,
    "small": _small,
    "xavier": _xavier,
    "xavier-uniform": _xavier_uniform,
}


@torch.no_grad()
def initialise(stack: Stack, init: str | None = None) -> None:
    """Draw the matrices of a stack anew: by ``init``, or by its placement's, times the placement's gains.

    Shifts start at 0; norms and learned factors are left as they are.

    Raises:
        ValueError: an unknown initialisation.
    """
    name = stack.placement.init if init is None else kebab(init)
    if name not in INITS:
        raise ValueError(f"init={init!r} is unknown; {advice(init, INITS)}")
    depth = len(stack.layers)
    for index, layer in enumerate(stack.layers):
        assert isinstance(layer, Layer)
        for sublayer, residual in layer.residuals():
            gains = stack.placement.gains(
                index, depth, side=stack.side, other_depth=stack.other_depth, sublayer=sublayer
            )
            for role, linear in residual.sublayer.named_children():
                if isinstance(linear, nn.Linear):
                    INITS[name](linear.weight, role, index, depth)
                    linear.weight.mul_(gains.get(role, 1.0))
                    if linear.bias is not None:
                        linear.bias.zero_()
