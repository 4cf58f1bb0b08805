from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.checkup.rules.judging import findings, why_not

IMAGE = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()


def with_value(buffer: str, value: float, channels: int = 1) -> nn.Sequential:
    made = model()
    made[1].get_buffer(buffer)[:channels] = value
    return made


@pytest.mark.parametrize(
    ("buffer", "value", "key"),
    [
        ("running_var", -0.25, "channels_negative"),
        ("running_var", math.nan, "channels_not_finite"),
        ("running_var", math.inf, "channels_not_finite"),
        ("running_mean", math.nan, "channels_not_finite"),
        ("running_mean", -math.inf, "channels_not_finite"),
    ],
)
def test_impossible_statistics_are_errors_counted_by_channel(buffer: str, value: float, key: str) -> None:
    (found,) = findings("BNS011", with_value(buffer, value, channels=2), IMAGE)
    assert found.severity == "error"
    assert found.path == "1"
    assert found.evidence[key] == 2


def test_a_variance_of_zero_is_a_warning_unless_the_gain_is_zero_too() -> None:
    zero = with_value("running_var", 0.0)
    (found,) = findings("BNS011", zero, IMAGE)
    assert found.severity == "warning"
    assert found.evidence["channels_zero"] == 1
    with torch.no_grad():
        zero[1].get_parameter("weight")[0] = 0.0
    assert findings("BNS011", zero, IMAGE) == []


@pytest.mark.parametrize(("spread", "severity"), [(0.0, "info"), (1e-4, "info"), (1.0, "warning")])
def test_a_variance_of_zero_is_no_fault_in_a_channel_that_is_dead_on_the_data_too(spread: float, severity: str) -> None:
    zero = with_value("running_var", 0.0)
    conv, mean = zero[0], zero[1].get_buffer("running_mean")
    with torch.no_grad():
        conv.get_parameter("weight")[0] *= spread
        mean[0] = conv.get_parameter("bias")[0]
    (found,) = findings("BNS011", zero, IMAGE)
    assert found.severity == severity


def test_a_dead_channel_far_from_its_running_mean_is_amplified() -> None:
    zero = with_value("running_var", 0.0)
    with torch.no_grad():
        zero[0].get_parameter("weight")[0] = 0.0
        zero[1].get_buffer("running_mean")[0] = 1.0 + float(zero[0].get_parameter("bias")[0])
    (found,) = findings("BNS011", zero, IMAGE)
    assert (found.severity, found.evidence["channels_amplified"]) == ("warning", 1)


@pytest.mark.parametrize("variance", [1e-12, 1.0, 1e6])
def test_any_positive_finite_variance_passes(variance: float) -> None:
    assert findings("BNS011", with_value("running_var", variance, 4), IMAGE) == []


def test_norms_that_no_run_reaches_are_judged_too() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.BatchNorm1d(3)
            self.unused.get_buffer("running_var")[1] = -1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    assert [f.path for f in findings("BNS011", Unused(), torch.ones(2, 3))] == ["unused"]


def test_norms_without_running_statistics_are_none_of_its_business() -> None:
    assert findings("BNS011", nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)), IMAGE) == []


def test_a_model_without_numbers_is_not_judged() -> None:
    assert "meta" in why_not("BNS011", nn.Sequential(nn.BatchNorm1d(3)).to("meta"), torch.ones(2, 3, device="meta"))
