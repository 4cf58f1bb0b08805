from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.checkup.rules.gain_models import WIDTH, Offset, X, chain, offset, plain
from tests.checkup.rules.judging import findings


class Residual(nn.Module):
    """x + norm(f(x)), or x + f(norm(x))."""

    def __init__(self, norm: nn.Module, *, pre: bool) -> None:
        super().__init__()
        self.norm, self.f, self.pre = norm, nn.Linear(WIDTH, WIDTH), pre

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.f(self.norm(x)) if self.pre else self.norm(self.f(x)))


def zeroed() -> nn.LayerNorm:
    norm = nn.LayerNorm(WIDTH)
    nn.init.zeros_(norm.weight)
    return norm


def stack(*, pre: bool, last: nn.Module) -> nn.Module:
    return nn.Sequential(*[Residual(zeroed(), pre=pre) for _ in range(3)], last)


def test_a_unit_offset_of_ones_doubles_and_its_repair_halves() -> None:
    (found,) = findings("PAR010", offset(weight=1.0), X)
    assert found.severity == "warning"
    assert found.evidence["value"] == 2.0
    assert found.counterfactual is not None
    assert found.counterfactual["before"] == pytest.approx(2 * found.counterfactual["after"], rel=1e-4)


def test_one_norm_of_many_is_enough() -> None:
    (found,) = findings("PAR010", chain(Offset(), Offset(), Offset(1.0)), X)
    assert found.paths == ("5",)


def test_ones_with_some_noise_double_as_well() -> None:
    made = offset()
    torch.manual_seed(0)
    for name in ("1.weight", "3.weight", "5.weight"):
        nn.init.normal_(made.get_parameter(name), 1.0, 0.02)
    assert len(findings("PAR010", made, X)) == 1
    assert findings("PAR010", made, X, checkpoint=dict(made.state_dict())) == []


def test_plain_norms_of_one_and_offset_norms_of_zero_are_sound() -> None:
    assert findings("PAR010", plain(), X) == []
    assert findings("PAR010", offset(), X) == []


def test_a_silent_last_norm_lets_nothing_pass() -> None:
    made = nn.Sequential(*[Residual(nn.LayerNorm(WIDTH), pre=True) for _ in range(3)], zeroed())
    (found,) = findings("PAR010", made, X)
    assert found.path == "3"
    assert found.counterfactual is not None
    assert found.counterfactual["before"] == 0.0
    assert found.counterfactual["after"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("pre", [False, True])
def test_branches_that_start_closed_are_sound(pre: bool) -> None:
    assert findings("PAR010", stack(pre=pre, last=nn.LayerNorm(WIDTH)), X) == []


def test_plain_norms_that_all_hold_zeros_are_no_intention() -> None:
    assert len(findings("PAR010", chain(zeroed(), zeroed()), X)) == 1


class Conditional(nn.Module):
    """A norm scaled and shifted by a matrix of zeros; ``one`` is what is added to the scale."""

    def __init__(self, one: float) -> None:
        super().__init__()
        self.one, self.film = one, nn.Linear(4, 2 * WIDTH)
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.film(condition).chunk(2, -1)
        return nn.functional.layer_norm(x, x.shape[-1:]) * (self.one + scale[:, None]) + shift[:, None]


class Conditioned(nn.Module):
    """Residual blocks behind a conditional norm, and one at the end; or the gates of adaLN-Zero."""

    def __init__(self, block: float, last: float, *, gated: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Conditional(block) for _ in range(2)])
        self.maps = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.gates = nn.ModuleList([nn.Linear(4, WIDTH) for _ in range(2)]) if gated else None
        for gate in self.gates or ():
            nn.init.zeros_(gate.get_parameter("weight"))
            nn.init.zeros_(gate.get_parameter("bias"))
        self.last, self.out = Conditional(last), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for i in range(2):
            y = self.maps[i](self.norms[i](x, condition)).tanh()
            x = x + (y if self.gates is None else self.gates[i](condition)[:, None] * y)
        return self.out(self.last(x, condition))


TOKENS = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("model", "condition", "expected"),
    [
        (Conditioned(0.0, 0.0), torch.ones(2, 4), ["warning"]),
        (Conditioned(0.0, 1.0), torch.ones(2, 4), ["info"]),
        (Conditioned(1.0, 1.0), torch.ones(2, 4), []),
        (Conditioned(1.0, 1.0, gated=True), torch.ones(2, 4), []),
        (Conditioned(0.0, 0.0), torch.zeros(2, 4), []),
    ],
    ids=["all", "in branches", "1 + scale", "gates", "the condition is 0"],
)
def test_a_computed_scale_of_zero_silences_what_has_no_way_around(
    model: nn.Module, condition: Tensor, expected: list[str]
) -> None:
    assert [str(f.severity) for f in findings("PAR010", model, TOKENS, condition)] == expected


class KeyScale(nn.Module):
    """Attention whose keys are normalized and scaled by one learned number a head."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.scale = nn.Parameter(torch.full((2,), start))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)) for t in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = (t / t.norm(dim=-1, keepdim=True).clamp_min(1e-6) for t in (q, k))
        k = k * self.scale[None, None, :, None]
        attended = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return x + attended.transpose(1, 2).flatten(2)


def test_keys_scaled_by_0_start_a_uniform_attention() -> None:
    tokens = torch.randn(2, 5, WIDTH)
    assert findings("PAR010", nn.Sequential(KeyScale(0.0), KeyScale(0.0), nn.LayerNorm(WIDTH)), tokens) == []
