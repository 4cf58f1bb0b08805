"""Folds gains and biases of models whose every number was drawn anew, and measures in float64 what that changed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from normwise.conversions import Plan, apply_to_model, apply_to_state, fold_affine
from normwise.conversions.proof.compare import floats_in, gap
from normwise.conversions.proof.double import double, doubled, in_double
from normwise.facts.facts import Facts
from normwise.targets import Target, load, target

EXACT = 1e-12


def drawn(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter, matrices with a mean: what is small or neutral in a new model hides mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            mean, size = (0.3 if name.endswith("bias") else 0.9), 0.4
            if parameter.dim() > 1:
                mean, size = 0.02, max(parameter[:1].numel(), 1) ** -0.5
            parameter.copy_(mean + size * noise)
    return model.eval()


def family(name: str) -> Target:
    """Return a small model of transformers with its inputs, drawn anew."""
    found = load(f"hf:{name}")
    drawn(found.model)
    return found


def run(model: nn.Module, found: Target) -> dict[str, torch.Tensor]:
    """Return what a model in float64 computes."""
    args, kwargs = in_double((found.args, dict(found.kwargs)))
    with double():
        return floats_in(model(*args, **kwargs))


def applied(plan: Plan, found: Target) -> nn.Module:
    """Return a converted copy in float64."""
    converted = doubled(copy.deepcopy(found.model)).eval()
    apply_to_model(plan, converted)
    return converted


def difference(plan: Plan, found: Target) -> float:
    """Return how far the converted outputs lie from the original ones, relative to their largest."""
    return gap(run(doubled(copy.deepcopy(found.model)).eval(), found), run(applied(plan, found), found))


def folded(model: nn.Module | Target, *inputs: Any, **options: Any) -> tuple[Plan, nn.Module]:
    """Plan, apply to a model and to its state dict, and check that function and tensors are what they must be."""
    found = model if isinstance(model, Target) else target(drawn(model), inputs)
    plan = Plan.from_json(fold_affine.plan(Facts(found, effort="full"), **options).to_json())
    assert plan.changes, [str(refusal) for refusal in plan.refused]
    assert difference(plan, found) <= EXACT
    converted = applied(plan, found)
    state = apply_to_state(plan, doubled(copy.deepcopy(found.model)).state_dict())
    expected = converted.state_dict()
    assert set(state) == set(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    return plan, converted


def reasons(model: nn.Module | Target, *inputs: Any, **options: Any) -> dict[str, str]:
    """Return why each norm is refused, by path; nothing is folded."""
    found = model if isinstance(model, Target) else target(drawn(model), inputs)
    plan = fold_affine.plan(Facts(found, effort="full"), **options)
    assert not plan.changes
    assert not plan.recipes
    assert not plan.edits
    return {refusal.path: str(refusal) for refusal in plan.refused}
