"""The gradients of one call of the user's training step, by parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.facts.trials import completed
from normwise.rendering import both

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Gradients", "watched"]

Gradients = Mapping[str, tuple[float, float]]
"""The Euclidean norms of gradient and weight, by the parameter's name."""


def watched(facts: Facts) -> Gradients:
    """Call ``train_step`` once and note every gradient that reaches a parameter; nothing of it is left.

    Raises:
        NotKnown: there is no ``train_step``, it raises, or it brings no gradient.
    """
    seen: dict[str, tuple[float, float]] = {}
    handles: list[tuple[nn.Parameter, Any, Any]] = []

    def prepare(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not parameter.is_inference():
                before = parameter._backward_hooks
                handles.append((parameter, before, parameter.register_hook(_noting(seen, name, parameter))))

    try:
        trial = facts.trials.step_with(prepare)
    finally:
        for parameter, before, handle in handles:
            handle.remove()
            if before is None:
                parameter._backward_hooks = None
    completed(trial)
    if not seen:
        raise NotKnown(both("train_step brings no gradient to the model", "train_step 没有给模型带来梯度"))
    return seen


def _noting(seen: dict[str, tuple[float, float]], name: str, parameter: nn.Parameter) -> Any:
    def note(gradient: torch.Tensor) -> None:
        seen.setdefault(name, (_size(gradient), _size(parameter.detach())))

    return note


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().norm()) if tensor.layout is torch.strided else 0.0
