"""What a model returns, and how far it moves when tensors of the model are others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.facts.runs import Run
from normwise.graph.capture import tensors_in
from normwise.rendering import both

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["MATTERS", "apart", "outputs_of", "outputs_with"]

MATTERS = 1e-3
"""A smaller relative change of the output is none: reordered sums make 1e-6, causes make 1e-2 to 0.9 (RULES 0.4)."""


def outputs_of(run: Run) -> list[torch.Tensor]:
    """Return the floating-point outputs of a run.

    Raises:
        NotKnown: there are none.
    """
    found = [run.of(v) for v in run.graph.outputs if run.graph.values[v].floating]
    if not found:
        raise NotKnown(both("the model returns no floating-point tensor", "模型不返回浮点张量"))
    return found


def outputs_with(facts: Facts, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs on the example inputs with other numbers in some parameters and buffers; a counterfactual.

    Raises:
        NotKnown: the model cannot be run so.
    """

    def prepare(model: nn.Module) -> None:
        model.eval()
        held = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
        with torch.no_grad():
            for name, tensor in tensors.items():
                if held[name].numel() != tensor.numel():
                    raise NotKnown(both(f"{name} has another size", f"{name} 的大小不同"))
                held[name].copy_(tensor.reshape(held[name].shape))

    trial = facts.trials.forward(prepare=prepare, repair=True)
    return [t for t in tensors_in(trial.output) if t.is_floating_point()]


def apart(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Return the distance of two lists of tensors relative to the second.

    Raises:
        NotKnown: they have other shapes.
    """
    if [t.shape for t in mine] != [t.shape for t in theirs]:
        raise NotKnown(both("the outputs have other shapes", "输出的形状不同"))
    pairs = [(a.detach().cpu().double(), b.detach().cpu().double()) for a, b in zip(mine, theirs, strict=True)]
    if any(bool((a.isfinite() != b.isfinite()).any()) for a, b in pairs):
        return float("inf")
    pairs = [(a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)) for a, b in pairs]
    size = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
    gap = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    return gap / size if size else (float("inf") if gap else 0.0)
