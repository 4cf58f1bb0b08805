"""Running statistics that are not those of the data, of the averaged weights, or of a dtype that can follow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import normwise as nw
from normwise.targets import Target, Weights
from tests.checkup.rules.judging import findings, severities, why_not


def batch(samples: int = 64, shift: float = 1.0) -> torch.Tensor:
    return torch.randn(samples, 4) * 2 + shift


def net(batches: int = 60, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16, **options), nn.ReLU(), nn.Linear(16, 2))
    with torch.no_grad():
        for _ in range(batches):
            model(batch())
    return model.eval()


def loader(shift: float) -> DataLoader[Any]:
    return DataLoader(TensorDataset(batch(256, shift)), batch_size=64)


# -- against data -----------------------------------------------------------------------------------


def test_data_of_another_kind_is_a_warning_that_recalibration_repairs() -> None:
    (found,) = findings("BNS004", net(), batch(), loader=loader(8.0))
    assert str(found.severity) == "warning"
    assert found.counterfactual is not None
    assert found.counterfactual["after"] < 0.1 < found.counterfactual["before"]


def test_data_of_the_same_kind_passes() -> None:
    assert severities("BNS004", net(), batch(), loader=loader(1.0)) == []


def test_one_example_batch_only_informs() -> None:
    assert severities("BNS004", net(), batch(shift=8.0)) == ["info"]


def test_a_model_in_the_middle_of_training_only_informs() -> None:
    assert severities("BNS004", net().train(), batch(), loader=loader(8.0)) == ["info"]


def test_statistics_that_are_still_warming_up_only_inform() -> None:
    assert severities("BNS004", net(2), batch(), loader=loader(8.0)) == ["info"]
    assert severities("BNS005", net(2), batch()) == ["info"]


def test_a_fresh_norm_is_not_judged() -> None:
    assert severities("BNS004", net(0), batch(), loader=loader(8.0)) == []
    assert severities("BNS005", net(0), batch()) == []


def test_a_plain_average_has_no_warming_up() -> None:
    assert severities("BNS005", net(2, momentum=None), batch()) == []


def test_few_samples_or_random_weights_say_nothing() -> None:
    assert "8 samples" in why_not("BNS004", net(), batch(4))
    built = Target(model=net(), args=(batch(),), weights=Weights.RANDOM)
    (unjudged,) = nw.check(built, select="BNS004").not_checked
    assert "trained" in unjudged.why


@pytest.mark.parametrize("tracked", [True, False])
def test_an_instance_norm_that_is_a_fixed_map_in_eval_mode(tracked: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4, track_running_stats=tracked), nn.Conv1d(4, 2, 1))
    with torch.no_grad():
        for _ in range(40):
            model(torch.rand(4, 3, 16))
    assert severities("BNS004", model, torch.rand(1, 3, 16) * 0.2) == (["warning"] if tracked else [])


# -- averaged weights -------------------------------------------------------------------------------


def averaged(online: nn.Sequential, *, counted: bool) -> nn.Sequential:
    """Other weights with the online model's statistics, or with none."""
    model = copy.deepcopy(online)
    with torch.no_grad():
        model[0].get_parameter("bias").add_(6.0)
        if not counted:
            model[1].get_buffer("running_mean").zero_()
            model[1].get_buffer("running_var").fill_(1)
            model[1].get_buffer("num_batches_tracked").zero_()
    return model


def test_statistics_that_were_never_estimated_are_an_error() -> None:
    online = net()
    (found,) = findings("BNS013", averaged(online, counted=False), batch(), online=online)
    assert (str(found.severity), str(found.basis)) == ("error", "proof")
    assert severities("BNS003", averaged(online, counted=False), batch(), online=online) == []


def test_statistics_of_other_weights_are_a_warning() -> None:
    online = net()
    (found,) = findings("BNS013", averaged(online, counted=True), batch(), online=online)
    assert (str(found.severity), str(found.basis)) == ("warning", "measured")


def test_an_averaged_model_with_its_own_statistics_passes() -> None:
    online = net()
    assert severities("BNS013", copy.deepcopy(online), batch(), online=online) == []
    assert severities("BNS013", AveragedModel(online).eval(), batch(), online=online) == []


def test_data_on_which_the_online_model_is_off_as_well_proves_nothing() -> None:
    online = net()
    assert severities("BNS013", copy.deepcopy(online), batch(shift=9.0), online=online) == []


def test_an_online_model_of_another_make_is_not_checked() -> None:
    assert "same paths" in why_not("BNS013", net(), batch(), online=nn.Sequential(nn.Linear(4, 2)))
    assert "online" in why_not("BNS013", net(), batch())


def test_few_samples_are_not_enough_to_compare() -> None:
    online = net()
    assert "8 samples" in why_not("BNS013", averaged(online, counted=True), batch(4), online=online)


# -- half precision ---------------------------------------------------------------------------------


def half(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD(model.bfloat16().train().parameters(), 0.1)}


def test_half_statistics_in_training_lose_updates() -> None:
    model = net(600, momentum=0.01)
    (found,) = findings("BNS012", model, batch().bfloat16(), **half(model))
    assert str(found.severity) == "warning"
    assert found.counterfactual is not None
    assert found.counterfactual["before"] > 0.1


def test_half_statistics_do_no_harm_in_inference_or_without_training() -> None:
    model = net().bfloat16()
    assert severities("BNS012", model, batch().bfloat16()) == []
    assert severities("BNS012", model.train(), batch().bfloat16()) == ["info"]


# -- what stands before a norm ----------------------------------------------------------------------


def test_a_bias_before_a_norm_is_worth_knowing() -> None:
    (found,) = findings("BNS014", net(), batch())
    assert (str(found.severity), found.evidence["biases"]) == ("info", ["0.bias"])


def test_a_bias_that_somebody_else_reads_is_of_use() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up(x)
            return hidden + self.norm(hidden)

    assert severities("BNS014", Two().eval(), batch()) == []


def test_a_layer_norm_does_not_make_a_bias_useless() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    assert severities("BNS014", model, batch()) == []


def test_dropout_before_a_norm_is_worth_knowing_and_after_it_is_not() -> None:
    before = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 2))
    after = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
    assert [f.path for f in findings("BNS014", before.eval(), batch())] == ["2"]
    assert severities("BNS014", after.eval(), batch()) == []
