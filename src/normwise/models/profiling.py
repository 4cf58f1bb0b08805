"""Admin's start: the factor on each skip, found by a pass over one batch.

References: Liu et al. 2020, arxiv.org/abs/2004.08249
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from normwise.blocks import Layer, Residual, Stack

__all__ = ["profile_admin"]


@dataclass(slots=True)
class _Walk:
    """How far a stack was profiled: omega^2 of the sublayer to come, and the variance of what it is given."""

    square: float = 1.0
    given: float = 1.0


@torch.no_grad()
def profile_admin(model: nn.Module, *inputs: Any, **options: Any) -> None:
    """Set omega of every sublayer of a model of placement "admin": omega_1 = 1, then sqrt(omega^2 Var x + Var F).

    x is what the sublayer before was given and F what it returned, on this batch, with the omegas found so far: as if
    the stream had never been normalized. The pass runs without dropout.

    Args:
        model: one of ``normwise.models``, just initialised.
        inputs: a batch, as the model is called.
        options: keyword arguments of the call.

    Raises:
        ValueError: no stack of the model has the placement.

    Examples:
        >>> from normwise.models import Decoder
        >>> model = Decoder(vocab_size=16, hidden_size=8, num_layers=2, num_heads=2, placement="admin")
        >>> profile_admin(model, torch.arange(16).reshape(2, 8))
        >>> [name for name, p in model.named_parameters() if name.endswith("skip_gain") and (p == 1).all()]
        ['stack.layers.0.attention.skip_gain']
    """
    stacks = [each for each in model.modules() if isinstance(each, Stack) and each.placement.name == "admin"]
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no stack of placement 'admin'; build it with placement='admin'")
    handles = []
    for stack in stacks:
        walk = _Walk()
        for layer in stack.layers:
            assert isinstance(layer, Layer)
            for _, residual in layer.residuals():
                handles.append(residual.register_forward_pre_hook(partial(_enter, walk)))
                handles.append(residual.sublayer.register_forward_hook(partial(_leave, walk)))
    training = {each: each.training for each in model.modules()}
    model.eval()
    try:
        model(*inputs, **options)
    finally:
        for handle in handles:
            handle.remove()
        for each, mode in training.items():
            each.training = mode


def _enter(walk: _Walk, residual: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    assert isinstance(residual, Residual)
    assert residual.skip_gain is not None
    residual.skip_gain.fill_(walk.square**0.5)
    walk.given = float(inputs[0].double().var(correction=0))


def _leave(walk: _Walk, sublayer: nn.Module, inputs: tuple[torch.Tensor, ...], returned: torch.Tensor) -> None:
    walk.square = walk.square * walk.given + float(returned.double().var(correction=0))
