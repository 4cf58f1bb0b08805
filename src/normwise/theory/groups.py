"""Parameter groups: weight decay for matrices, none for gains and shifts of norms, found in the graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from normwise import targets
from normwise.facts import Facts

__all__ = ["param_groups"]


def param_groups(model: nn.Module, weight_decay: float, inputs: Any = None) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: parameters that decay, and those that do not.

    Without decay are gains and shifts of norms, whatever their names and shapes, and every other vector or number:
    shifts of matrices, learned factors. Decay pulls a gain to 0, and a gain of 1 is neutral. Which parameters belong
    to norms is read from the model's dataflow, not from their names.

    Args:
        model: what is trained; it is left as it was found.
        weight_decay: of the matrices.
        inputs: one call's inputs, as for ``check``; inferred where the model says enough.

    Returns:
        [{"params": ..., "weight_decay": weight_decay}, {"params": ..., "weight_decay": 0.0}], each parameter that
        takes a gradient once, in the model's order; a group without parameters is left out.

    Raises:
        TargetError: the model cannot be fed; pass ``inputs``.
        TraceError: its forward raised.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
        >>> decayed, spared = param_groups(model, 0.1, torch.randn(2, 4))
        >>> [tuple(p.shape) for p in decayed["params"]], [tuple(p.shape) for p in spared["params"]]
        ([(8, 4)], [(8,), (8,), (8,)])
    """
    facts = Facts(targets.target(model, inputs))
    rows = [site.row for site in facts.sites]
    names = {name for row in rows for name in (row.weight_path, row.bias_path) if name}
    parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    of_norms = {id(parameters[name]) for name in names if name in parameters}
    decayed, spared = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (spared if id(parameter) in of_norms or parameter.ndim < 2 else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
