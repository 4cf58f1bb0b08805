"""Applies a plan to a live model or to a state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from normwise.conversions._arithmetic import holds_numbers, make
from normwise.conversions._plan import Plan

__all__ = ["apply_to_model", "apply_to_state", "has_storage", "tensors_of"]


def apply_to_model(plan: Plan, model: nn.Module) -> None:
    """Change a model in place: its tensors first, from what they were, then its modules."""
    tensors = tensors_of(model)
    made = {recipe.keys: make(recipe, _lookup(tensors)) for recipe in plan.recipes}
    for edit in plan.edits:
        edit.apply(model)
    tensors = tensors_of(model)
    with torch.no_grad():
        for keys, tensor in made.items():
            for held in {id(tensors[key]): tensors[key] for key in keys if key in tensors}.values():
                held.copy_(tensor)


def apply_to_state(plan: Plan, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the converted state dict of a state dict; tensors that do not change are shared."""
    lookup = _lookup(state, plan.ties)
    made: dict[str, torch.Tensor] = {}
    for recipe in plan.recipes:
        created = recipe.shape is not None or recipe.start is not None
        keys = recipe.keys if created else [key for key in recipe.keys if key in state]
        made.update(dict.fromkeys(keys, make(recipe, lookup)))
    for edit in plan.edits:
        made.update({key: lookup(source) for key, source in edit.copies.items() if key not in made})
    dropped = set(plan.dropped)
    return {**{key: tensor for key, tensor in state.items() if key not in dropped}, **made}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by every name it has."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def has_storage(model: nn.Module) -> bool:
    """Whether a model holds numbers: neither meta nor fake tensors."""
    return all(map(holds_numbers, tensors_of(model).values()))


def _lookup(tensors: Mapping[str, torch.Tensor], ties: Iterable[tuple[str, ...]] = ()) -> Callable[[str], torch.Tensor]:
    """Return what gives a tensor by its key, or by another key of the same tensor where that is all there is."""
    held = {key: next((k for k in keys if k in tensors), key) for keys in ties for key in keys}
    return lambda key: tensors[key if key in tensors else held.get(key, key)]
