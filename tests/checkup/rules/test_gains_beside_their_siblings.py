"""Gains far larger than those of their siblings, single channels of 0, and one norm at several places."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normwise as nw
from normwise.checkup.rules import scale_blow_up
from tests.checkup.rules.gain_models import WIDTH, X, chain, gains, plain, stored
from tests.checkup.rules.judging import findings, severities


def scaled(times: float, count: int = 6) -> tuple[nn.Sequential, dict[str, Tensor]]:
    model = plain(count)
    checkpoint = stored(model, 1.0, 0.05)
    checkpoint["5.weight"] *= times
    model.load_state_dict(checkpoint)
    return model, checkpoint


def test_a_gain_far_above_its_siblings_is_worth_knowing() -> None:
    model, checkpoint = scaled(20.0)
    (found,) = findings("PAR004", model, X, checkpoint=checkpoint)
    assert (found.severity, found.path) == ("info", "5")
    assert found.evidence["value"] == pytest.approx(20, rel=0.1)


def test_a_gain_that_alone_saturates_an_attention_is_a_warning_and_the_attention_is_not_blamed() -> None:
    report = nw.check(scale_blow_up.bad(), select=["PAR004", "PLC010"])
    (found,) = report.findings
    assert (found.code, found.severity, found.path) == ("PAR004", "warning", "2.norm")
    assert found.counterfactual is not None
    assert found.counterfactual["before"] > 8 > found.counterfactual["after"]


def test_an_attention_saturated_by_its_own_matrices_is_not_the_gains_doing() -> None:
    target = scale_blow_up.bad()
    with torch.no_grad():
        target.model.get_parameter("4.qkv.weight")[:32] *= 30
    found = {f.code: f for f in nw.check(target, select=["PAR004", "PLC010"]).findings}
    assert (found["PLC010"].path, found["PLC010"].severity) == ("4", "warning")
    assert found["PAR004"].path == "2.norm"


def test_gains_that_are_all_large_are_a_design() -> None:
    model = plain(6)
    checkpoint = stored(model, 30.0, 3.0)
    model.load_state_dict(checkpoint)
    assert findings("PAR004", model, X, checkpoint=checkpoint) == []


def test_few_siblings_and_fresh_models_are_not_judged() -> None:
    model, checkpoint = scaled(20.0, count=4)
    assert findings("PAR004", model, X, checkpoint=checkpoint) == []
    assert findings("PAR004", scaled(20.0)[0], X) == []


def holed(model: nn.Sequential, names: list[str]) -> dict[str, Tensor]:
    checkpoint = stored(model, 1.0, 0.05)
    for name in names:
        checkpoint[name][:2] = 0.0
    model.load_state_dict(checkpoint)
    return checkpoint


def test_single_dead_channels_of_a_trained_norm_are_a_warning() -> None:
    model = plain()
    (found,) = findings("PAR005", model, X, checkpoint=holed(model, ["3.weight"]))
    assert found.severity == "warning"
    assert found.evidence["value"] == pytest.approx(2 / WIDTH)


def test_channels_that_are_zero_everywhere_are_padding_of_the_width() -> None:
    model = plain()
    assert severities("PAR005", model, X, checkpoint=holed(model, gains(model))) == ["info"]


def test_pruned_batch_norms_are_worth_knowing() -> None:
    model = chain(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH))
    assert severities("PAR005", model, X, checkpoint=holed(model, ["3.weight"])) == ["info"]


def test_a_whole_vector_of_zeros_is_a_closed_branch() -> None:
    model = plain()
    nn.init.zeros_(model.get_parameter("3.weight"))
    assert findings("PAR005", model, X) == []


class Shared(nn.Module):
    """One norm at two places."""

    def __init__(self, norm: nn.Module, *, series: bool, factor: float = 4.0) -> None:
        super().__init__()
        self.norm, self.first, self.second = norm, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.series, self.factor = series, factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        return self.norm(self.factor * self.second(y if self.series else x) + self.factor - 1) + y


LARGE = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(5))


def test_one_batch_norm_at_two_depths_with_other_data_is_a_warning() -> None:
    (found,) = findings("PAR008", Shared(nn.BatchNorm1d(WIDTH), series=True), LARGE)
    assert found.severity == "warning"
    assert found.path == "norm"
    assert found.evidence["calls"] == 2


def test_calls_beside_each_other_and_shared_layer_norms_are_worth_knowing() -> None:
    assert severities("PAR008", Shared(nn.BatchNorm1d(WIDTH), series=False), LARGE) == ["info"]
    assert severities("PAR008", Shared(nn.LayerNorm(WIDTH), series=True), LARGE) == ["info"]


def test_norms_of_their_own_are_sound() -> None:
    assert findings("PAR008", chain(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)), LARGE) == []


class ScaledFirst(nn.Module):
    """The norm of the Annotated Transformer: the gain multiplies before the division."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.bias


def test_a_gain_that_multiplies_before_the_division_is_read() -> None:
    model = chain(*[ScaledFirst() for _ in range(6)])
    checkpoint = stored(model, 1.0, 0.05)
    checkpoint["5.weight"] *= 20.0
    model.load_state_dict(checkpoint)
    (found,) = findings("PAR004", model, X, checkpoint=checkpoint)
    assert found.path == "5"
    assert findings("PAR009", model, X, checkpoint=checkpoint) == []
