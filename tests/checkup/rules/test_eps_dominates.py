from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normwise as nw
from normwise.targets import Target, Weights
from tests.checkup.rules.judging import findings

ROWS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


def trained(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, norm.weight.numel()))  # type: ignore[operator, union-attr, arg-type]
    return nn.Sequential(norm, nn.Linear(8, 2)).eval()


def judged(norm: nn.Module, x: Tensor) -> list[tuple[str, float]]:
    return [(str(f.severity), f.evidence["value"]) for f in findings("NUM005", trained(norm), x)]


def test_the_share_is_that_of_the_rows() -> None:
    x = ROWS / ROWS.square().mean(-1, keepdim=True).sqrt() * 0.01  # mean square 1e-4 in every row
    ((severity, share),) = judged(nn.RMSNorm(8, eps=1e-4), x)
    assert (severity, share) == ("info", pytest.approx(0.5, rel=1e-3))


def test_a_trained_norm_that_divides_by_eps_is_a_warning_with_a_repair() -> None:
    (found,) = findings("NUM005", trained(nn.LayerNorm(8, eps=1e-2)), ROWS * 1e-3)
    assert str(found.severity) == "warning"
    assert found.counterfactual is not None
    assert found.counterfactual["after"] > 2 * found.counterfactual["before"]


def test_an_eps_of_100_beside_a_shift_is_a_warning() -> None:
    norm = nn.LayerNorm(8, eps=100.0)
    with torch.no_grad():
        norm.bias.copy_(torch.linspace(-1, 1, 8))
    (found,) = findings("NUM005", trained(norm), ROWS * 1e-2)
    assert str(found.severity) == "warning"


def test_a_fresh_norm_is_only_worth_knowing() -> None:
    (found,) = findings("NUM005", nn.Sequential(nn.LayerNorm(8, eps=1e-2), nn.Linear(8, 2)), ROWS * 1e-3)
    assert str(found.severity) == "info"


@pytest.mark.parametrize("norm", [nn.RMSNorm(8, eps=1e-6), nn.LayerNorm(8), nn.LayerNorm(8, eps=1e-3)], ids=str)
def test_ordinary_rows_pass_and_so_do_a_few_rows_of_padding(norm: nn.Module) -> None:
    padded = ROWS.clone()
    padded[:40] = 0.0
    assert judged(norm, ROWS) == []
    assert judged(norm, padded) == []


def test_constant_groups_are_rounding_noise_and_only_worth_knowing() -> None:
    (found,) = findings("NUM005", nn.Sequential(nn.GroupNorm(4, 4), nn.Flatten()), torch.full((2, 4, 6), 0.7))
    assert str(found.severity) == "info"
    assert found.evidence["noise_gain"] == pytest.approx(316, rel=0.01)


def test_a_model_built_small_with_random_weights_is_not_judged() -> None:
    target = Target(model=trained(nn.LayerNorm(8, eps=1e-2)), args=(ROWS * 1e-3,), weights=Weights.RANDOM)
    report = nw.check(target, select="NUM005")
    assert report.findings == ()
    assert "true weights" in report.not_checked[0].why
