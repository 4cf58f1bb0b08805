"""What training needs: groups of parameters by what they do, and schedules that start low."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from torch import nn

from normwise.errors import NormwiseError
from normwise.models import Decoder
from normwise.theory import SCHEDULES, param_groups, warm_up


class Oddly(nn.Module):
    """A norm that no name betrays, with a gain of two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.temperature = nn.Parameter(torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).unflatten(-1, (2, 3))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.temperature
        return self.b(h.flatten(-2))


def test_gains_are_found_in_the_graph_whatever_their_name_and_shape() -> None:
    model = Oddly()
    decayed, spared = param_groups(model, 0.1, torch.randn(4, 6))
    assert [id(p) for p in decayed["params"]] == [id(model.a.weight), id(model.b.weight)]
    assert id(model.temperature) in {id(p) for p in spared["params"]}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)


def test_every_trained_parameter_is_in_one_group_and_the_optimizer_takes_them() -> None:
    model = Decoder(32, 16, 2, 2)
    model.stack.layers[0].requires_grad_(False)
    groups = param_groups(model, 0.1, torch.zeros(2, 5, dtype=torch.long))
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    torch.optim.AdamW(groups, lr=1e-3)


def test_what_cannot_be_run_is_said() -> None:
    with pytest.raises(NormwiseError):
        param_groups(Oddly(), 0.1, torch.randn(4, 5))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_rise_to_one_and_do_not_rise_again(name: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    schedule, rates = warm_up(optimizer, 10, 100, schedule=name.replace("-", "_")), []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0] / 2)
        optimizer.step()
        schedule.step()
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(rates[9:]))
    assert rates[10] == pytest.approx(1.0)
    if name in ("linear", "cosine", "wsd"):
        assert 0 < rates[-1] < 0.11
    if name == "inverse-sqrt":
        assert rates[40] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("steps", "total", "name", "message"),
    [(1, 10, "sine", "choose from: constant, cosine"), (11, 10, "linear", "11 steps does not fit into 10 steps")],
)
def test_bad_schedules(steps: int, total: int, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        warm_up(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), steps, total, schedule=name)
