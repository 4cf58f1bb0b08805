"""What the tests of fold-batch-norm share: weights and statistics drawn anew, and one fold in every way there is."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from torch import nn

from normwise.conversions import Plan, apply_to_model, apply_to_state, plan

EXACT = 1e-12


def redrawn(model: nn.Module, seed: int = 0) -> Any:
    """Return a model in float64 and eval mode, whose weights, gains, shifts and statistics are all drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.double().eval().state_dict().items():
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(drawn.square() + 0.1 if name.endswith("var") else drawn * 0.7)
    return model


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference relative to the largest element."""
    assert a.shape == b.shape
    return float((a - b).abs().max() / a.abs().max())


def planned(model: nn.Module, *inputs: Any, **options: Any) -> Plan:
    """Return the plan, written to JSON and read again."""
    return Plan.from_json(json.dumps(plan("fold-batch-norm", model, inputs, **options).to_json()))


def folded(model: nn.Module, *shape: int, **options: Any) -> tuple[Plan, Any]:
    """Fold the norms of a model whose numbers are drawn anew, and check all that must hold of every fold.

    A copy computes the same, and so does a fresh model that is edited and loads the converted state dict; a second
    run finds nothing to fold; the model itself is as it was.
    """
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    redrawn(model)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    made = planned(model, x, **options)
    assert made.changes, [str(r) for r in made.refused]

    converted = copy.deepcopy(model)
    apply_to_model(made, converted)
    with torch.no_grad():
        expected, got = model(x), converted(x)
    assert difference(expected, got) <= EXACT

    fresh = redrawn(copy.deepcopy(model), seed=5)
    for edit in made.edits:
        edit.apply(fresh)
    fresh.load_state_dict(apply_to_state(made, model.state_dict()), strict=True)
    with torch.no_grad():
        assert torch.equal(fresh(x), got)

    again = plan("fold-batch-norm", converted, (x,), **options)
    assert not again.changes
    assert again.refused
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    gone = set(before) - set(converted.state_dict())
    assert gone == set(made.dropped)
    assert set(converted.state_dict()) - set(before) == set(made.created)
    return made, converted


def reasons(model: nn.Module, *shape: int, **options: Any) -> dict[str, str]:
    """Return why each norm of a model stays, by path; nothing of the plan changes the function of the model."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    made = planned(model, x, **options)
    converted = copy.deepcopy(model)
    apply_to_model(made, converted)
    with torch.no_grad():
        assert difference(model.eval()(x), converted.eval()(x)) <= EXACT
    return {refusal.path: str(refusal) for refusal in made.refused}
