from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkup.rules.judging import findings, severities, why_not

X = torch.ones(2, 6)


class Offset(nn.Module):
    """An RMSNorm whose gain is 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return ((1 + self.weight) * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def model(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3)).eval()


def adamw(made: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(made.parameters(), **{"lr": 1e-3, "weight_decay": 0.1, **options})


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8)], ids=["layer", "rms"])
def test_a_decayed_gain_is_a_warning_with_its_arithmetic(norm: nn.Module) -> None:
    made = model(norm)
    (found,) = findings("PAR001", made, X, optimizer=adamw(made))
    assert found.severity == "warning"
    assert found.evidence["gains"] == ["1.weight"]
    assert found.evidence["kept_after_1000_steps"] == pytest.approx(math.exp(-0.1))


def test_the_arithmetic_is_what_the_optimizer_does() -> None:
    made = model(nn.LayerNorm(8))
    optimizer = adamw(made)
    (found,) = findings("PAR001", made, X, optimizer=optimizer)
    gain = made.get_parameter("1.weight")
    gain.grad = torch.zeros_like(gain)
    for _ in range(1000):
        optimizer.step()
    assert gain[0].item() == pytest.approx(found.evidence["kept_after_1000_steps"], rel=1e-3)


def test_a_zero_centred_gain_passes() -> None:
    made = model(Offset())
    assert findings("PAR001", made, X, optimizer=adamw(made)) == []


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.GroupNorm(2, 8)], ids=["batch", "group"])
def test_gains_that_many_recipes_decay_are_worth_knowing(norm: nn.Module) -> None:
    made = model(norm)
    assert severities("PAR001", made, X, optimizer=adamw(made)) == ["info"]


def test_no_decay_no_finding() -> None:
    made = model(nn.LayerNorm(8))
    assert findings("PAR001", made, X, optimizer=adamw(made, weight_decay=0.0)) == []


def test_a_gain_that_the_optimizer_does_not_hold_passes() -> None:
    made = model(nn.LayerNorm(8))
    optimizer = torch.optim.AdamW([made.get_parameter("0.weight")], weight_decay=0.1)
    assert findings("PAR001", made, X, optimizer=optimizer) == []


def test_gains_are_found_in_the_graph_whatever_their_names() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.kernel * nn.functional.layer_norm(x, (8,))

    made = model(Odd())
    (found,) = findings("PAR001", made, X, optimizer=adamw(made))
    assert found.evidence["gains"] == ["1.kernel"]


def test_a_warm_up_that_starts_at_a_rate_of_zero_counts_with_its_full_rate() -> None:
    made = model(nn.LayerNorm(8))
    optimizer = adamw(made)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    (found,) = findings("PAR001", made, X, optimizer=optimizer)
    assert found.evidence["lr"] == 1e-3


def test_a_norm_that_runs_many_times_is_one_gain() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(x) * 2)

    made = Twice()
    (found,) = findings("PAR001", made, X, optimizer=adamw(made))
    assert found.evidence["gains"] == ["norm.weight"]


def test_without_an_optimizer_it_says_what_it_needs() -> None:
    assert why_not("PAR001", model(nn.LayerNorm(8)), X) == "needs the optimizer: pass optimizer=..."
