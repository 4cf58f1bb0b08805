"""The gain that a norm applies is measured, and drawn weights are told from trained ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from normwise.facts import Facts
from normwise.facts.gains import Gain, looks_drawn
from normwise.targets import Target

WIDTH = 8
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """An RMSNorm whose gain is made from its parameter."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH)), make

    def forward(self, x: Tensor) -> Tensor:
        return self.make(self.weight) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "weight": lambda w: w,
    "1 + weight": lambda w: 1 + w,
    "sigmoid(weight)": torch.sigmoid,
    "2 * weight": lambda w: 2 * w,
}


def gain_of(norm: nn.Module) -> Gain:
    (gain,) = Facts(Target(model=nn.Sequential(norm), args=(X,))).gains.all
    return gain


@pytest.mark.parametrize("how", MAKERS)
def test_the_effective_gain_is_what_a_row_of_ones_becomes(how: str) -> None:
    norm = Scaled(MAKERS[how])
    gain = gain_of(norm)
    assert torch.allclose(gain.effective, MAKERS[how](norm.weight.detach().double()), atol=1e-6)
    assert gain.direct is (how in ("weight", "1 + weight"))


@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.BatchNorm1d(WIDTH)], ids=str)
def test_torchs_norms_start_at_exactly_one(norm: nn.Module) -> None:
    assert gain_of(norm).constant == 1.0


DRAWS: dict[str, Callable[[Tensor], object]] = {
    "normal": lambda t: nn.init.normal_(t, 0.0, 0.02),
    "truncated": lambda t: nn.init.trunc_normal_(t, 0.0, 1.0, -2.0, 2.0),
    "kaiming": lambda t: nn.init.kaiming_uniform_(t, 5**0.5),
    "xavier": nn.init.xavier_normal_,
    "orthogonal": nn.init.orthogonal_,
}


@pytest.mark.parametrize("how", DRAWS)
@pytest.mark.parametrize("shape", [(16, 16), (64, 256), (256, 64)], ids=str)
def test_usual_draws_look_drawn(how: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrices = [torch.empty(shape, dtype=torch.float64) for _ in range(10)]
    for matrix in matrices:
        DRAWS[how](matrix)
    assert all(looks_drawn(m) for m in matrices)


def test_outliers_a_low_rank_and_uneven_rows_do_not_look_drawn() -> None:
    torch.manual_seed(0)
    drawn = torch.randn(64, 64, dtype=torch.float64)
    assert looks_drawn(drawn)
    assert not looks_drawn(drawn + 3 * torch.outer(torch.randn(64), torch.randn(64)) / 4)
    assert not looks_drawn(drawn * torch.linspace(0.2, 3.0, 64)[:, None])
    assert not looks_drawn(drawn.pow(3))


def test_a_trained_network_is_told_from_a_fresh_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    x = torch.randn(32, 64)
    facts = Facts(Target(model=model, args=(x,)))
    assert facts.gains.trained is False
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
    assert Facts(Target(model=model, args=(x,))).gains.trained is True
    assert Facts(Target(model=nn.Sequential(nn.LayerNorm(64)), args=(x,))).gains.trained is None
