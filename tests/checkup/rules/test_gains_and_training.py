"""Gains that never moved, and steps that rounding throws away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import normwise as nw
from normwise.checkup.rules._examples import Float32RMSNorm
from tests.checkup.rules.gain_models import WIDTH, X, chain, plain, stored, train
from tests.checkup.rules.judging import findings, why_not


def half(dtype: torch.dtype) -> nn.Module:
    return chain(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)).to(dtype)


def stepping(model: nn.Module, rate: float, kind: Any = torch.optim.Adam) -> dict[str, Any]:
    optimizer = kind(model.parameters(), lr=rate)

    def train_step(trained: nn.Module, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        trained(x).float().square().mean().backward()
        optimizer.step()

    return {"optimizer": optimizer, "train_step": train_step}


def test_gains_of_one_that_the_checkpoint_holds_are_worth_knowing() -> None:
    made = plain()
    (found,) = findings("PAR009", made, X, checkpoint=dict(made.state_dict()))
    assert found.severity == "info"
    assert found.evidence["equal_in_checkpoint"] == 3
    assert "3 of 3" in found.message


def test_a_fixed_factor_behind_a_norm_does_not_move_its_gain() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(16, 16), Float32RMSNorm()
            self.second, self.last, self.head = nn.Linear(16, 16), Float32RMSNorm(), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.last(self.second(self.norm(self.first(x)))) * 0.125)

    made = Scaled()
    (found,) = findings("PAR009", made, X, checkpoint=dict(made.state_dict()))
    assert "2 of 2" in found.message


def test_trained_gains_and_fresh_models_are_silent() -> None:
    made = plain()
    checkpoint = stored(made, 1.0, 0.05)
    made.load_state_dict(checkpoint)
    assert findings("PAR009", made, X, checkpoint=checkpoint) == []
    assert findings("PAR009", plain(), X) == []
    assert findings("PAR009", train(plain()), X) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_that_rounding_throws_away_is_a_warning(dtype: torch.dtype, kind: Any) -> None:
    model = half(dtype)
    rate = 1e-3 if dtype is torch.bfloat16 else 1e-4
    (found,) = findings("PAR007", model, X.to(dtype), **stepping(model, rate, kind))
    assert found.severity == "warning"
    assert found.evidence["value"] == 1.0
    assert found.evidence["learning_rate"] == rate


def test_a_rate_that_moves_the_gains_is_sound() -> None:
    model = half(torch.bfloat16)
    assert findings("PAR007", model, X.bfloat16(), **stepping(model, 1e-2)) == []


def test_float32_frozen_gains_and_a_rate_of_zero_are_sound() -> None:
    model = half(torch.float32)
    assert findings("PAR007", model, X, **stepping(model, 1e-6)) == []
    frozen = half(torch.bfloat16)
    for name in ("1.weight", "3.weight"):
        frozen.get_parameter(name).requires_grad_(False)
    assert findings("PAR007", frozen, X.bfloat16(), **stepping(frozen, 1e-3)) == []
    resting = half(torch.bfloat16)
    assert findings("PAR007", resting, X.bfloat16(), **stepping(resting, 0.0)) == []


def test_a_step_that_raises_or_never_steps_is_not_judged() -> None:
    def broken(model: nn.Module, x: torch.Tensor) -> None:
        raise ValueError("no labels")

    def idle(model: nn.Module, x: torch.Tensor) -> None:
        model(x).float().sum().backward()

    x = X.bfloat16()
    assert "no labels" in why_not("PAR007", half(torch.bfloat16), x, train_step=broken)
    assert "steps its optimizer" in why_not("PAR007", half(torch.bfloat16), x, train_step=idle)
    assert "train_step=" in why_not("PAR007", half(torch.bfloat16), x)


def test_gains_in_half_precision_that_steps_with_a_gradient_left_at_one_are_a_warning() -> None:
    model = half(torch.bfloat16)
    how = stepping(model, 1e-3)
    for _ in range(2):
        how["train_step"](model, X.bfloat16())
    (found,) = findings("PAR009", model, X.bfloat16(), optimizer=how["optimizer"])
    assert (found.severity, found.basis) == ("warning", "proof")


class Twice(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def of_parameters(model: nn.Module, *, matrices: bool, steps: int = 0, biases: bool = False) -> torch.optim.Optimizer:
    gains = [m.weight for m in model.modules() if isinstance(m, nn.LayerNorm)]
    given = [p for p in model.parameters() if (p.ndim > 1 and matrices) or (p.ndim == 1 and biases)]
    optimizer = torch.optim.AdamW([p for p in given if not any(p is g for g in gains)], 1e-3)
    for _ in range(steps):
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    model.zero_grad()
    return optimizer


INPUT = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def test_gains_in_no_group_beside_matrices_that_are_trained_are_a_warning() -> None:
    model = Twice()
    for optimizer in (of_parameters(model, matrices=True, biases=True), of_parameters(model, matrices=True, steps=3)):
        (found,) = findings("PAR009", model, INPUT, optimizer=optimizer)
        assert (found.severity, found.basis, found.paths) == ("warning", "proof", ("one.1", "two.1"))
        assert "no group" in found.message


def test_an_optimizer_for_matrices_alone_may_have_another_beside_it() -> None:
    model = Twice()
    (found,) = findings("PAR009", model, INPUT, optimizer=of_parameters(model, matrices=True))
    assert found.severity == "info"


def test_frozen_gains_and_a_network_that_another_optimizer_trains_are_sound() -> None:
    model = Twice()
    optimizer = torch.optim.AdamW(model.one.parameters(), 1e-3)
    assert "no group" not in str(nw.check(model, INPUT, optimizer=optimizer, select=["PAR009"]))
    for norm in (model.one[1], model.two[1]):
        norm.requires_grad_(False)
    optimizer = of_parameters(model, matrices=True, biases=True)
    assert "no group" not in str(nw.check(model, INPUT, optimizer=optimizer, select=["PAR009"]))
