"""Batch norms are folded into the layers behind them, with both repairs of zero padding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from normwise.conversions import apply_to_model, plan
from normwise.errors import ConversionRefused
from tests.conversions.folding import EXACT, difference, folded, reasons, redrawn

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_norm_goes_into_a_convolution_behind_it_that_does_not_pad(n: int, groups: int, bias: bool) -> None:
    model = nn.Sequential(NORMS[n](8), CONVS[n](8, 16, 3, stride=2, groups=groups, bias=bias))
    made, converted = folded(model, 2, 8, *[6] * n)
    assert isinstance(converted[0], nn.Identity)
    assert made.created == (() if bias else ("1.bias",))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_with_what_is_there_is_exact(mode: Any) -> None:
    folded(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode)), 2, 4, 6, 6)


@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_goes_into_a_linear_map_behind_it(bias: bool) -> None:
    folded(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 7, bias=bias)), 4, 5)


def test_a_norm_goes_through_flattening_into_a_linear_map() -> None:
    made, _ = folded(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 20, 7)), 2, 3, 4, 5)
    norms = made.recipes[0].steps[0].numbers["norms"]
    assert norms[0]["index"] == [channel for channel in range(3) for _ in range(20)]


class _ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm2d(3), nn.Linear(3 * 20, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x).permute(0, 2, 3, 1).flatten(1))


def test_the_order_of_flattened_channels_is_followed() -> None:
    folded(_ChannelsLast(), 2, 3, 4, 5)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_a_norm_goes_through_an_interpolation(mode: str) -> None:
    folded(nn.Sequential(nn.BatchNorm2d(3), nn.Upsample(scale_factor=2, mode=mode), nn.Conv2d(3, 4, 3)), 2, 3, 5, 4)


class _AskedForItsShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.conv(x)
        return self.norm(made) + torch.ones_like(made)


def test_who_asks_a_layer_for_the_shape_of_its_output_does_not_mind() -> None:
    folded(_AskedForItsShape(), 2, 3, 5, 4)


def test_a_norm_goes_through_average_pooling_into_a_classifier() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(3, 7))
    folded(model, 2, 3, 4, 5)


def test_several_norms_in_a_row_go_into_the_layer_behind_them() -> None:
    made, _ = folded(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), 2, 3, 6, 6)
    assert [change.path for change in made.changes] == ["0", "1"]


def test_one_layer_takes_over_norms_on_both_sides() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), nn.BatchNorm2d(6))
    made, converted = folded(model, 2, 4, 6, 6)
    assert len(made.changes) == 3
    assert set(converted.state_dict()) == {"1.weight", "1.bias"}


class _Branches(nn.Module):
    """One norm for several readers, and a norm in one of the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.a, self.b, self.c = (nn.Conv2d(4, 6, 1, bias=i != 1) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.a(x) + self.b(x).relu() * self.c(self.inner(x))


def test_every_reader_takes_the_norm_over() -> None:
    made, _ = folded(_Branches(), 2, 4, 6, 6)
    assert [change.path for change in made.changes] == ["norm", "inner"]


class _MeanOfChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(1, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.norm(x).mean(1, keepdim=True))


def test_a_mean_of_channels_is_none_of_them() -> None:
    why = reasons(redrawn(_MeanOfChannels()), 2, 3, 4, 5)["norm"]
    assert "do not lie along the feature axis" in why


# -- zero padding -------------------------------------------------------------------------------------


def test_zero_padding_is_refused_with_both_ways_out() -> None:
    model = redrawn(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1)))
    why = reasons(model, 2, 4, 6, 6)["0"]
    assert "pads with zeros" in why
    assert "border='pad'" in why
    assert "border='map'" in why


def test_zero_padding_would_change_the_borders() -> None:
    """What is refused is wrong indeed: the plan for a layer that does not pad, on one that does."""
    padded = redrawn(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1)))
    wrong, x = copy.deepcopy(padded), torch.randn(2, 4, 6, 6).double()
    made = plan("fold-batch-norm", redrawn(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3))), x)
    apply_to_model(made, wrong)
    with torch.no_grad():
        expected, got = padded(x), wrong(x)
    assert difference(expected[..., 1:-1, 1:-1], got[..., 1:-1, 1:-1]) <= EXACT
    assert difference(expected, got) > 0.01


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("border", ["pad", "map"])
def test_both_repairs_are_exact_at_the_borders(border: str, n: int, groups: int, bias: bool) -> None:
    conv = CONVS[n](8, 16, 3, padding=2, stride=2, groups=groups, bias=bias)
    made, _ = folded(nn.Sequential(NORMS[n](8), conv), 2, 8, *[6] * n, border=border)
    assert not made.refused
    assert made.notes


@pytest.mark.parametrize("border", ["pad", "map"])
@pytest.mark.parametrize(("kernel", "dilation"), [(3, 1), (4, 1), ((2, 3), (1, 2))])
def test_both_repairs_serve_padding_that_is_named(border: str, kernel: int, dilation: int) -> None:
    conv = nn.Conv2d(4, 6, kernel, padding="same", dilation=dilation)
    folded(nn.Sequential(nn.BatchNorm2d(4), conv), 2, 4, 7, 8, border=border)


@pytest.mark.parametrize("border", ["pad", "map"])
def test_a_one_by_one_convolution_that_pads_has_borders_too(border: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 1, padding=(1, 0)))
    assert "pads with zeros" in reasons(redrawn(model), 2, 4, 6, 6)["0"]
    folded(model, 2, 4, 6, 6, border=border)


@pytest.mark.parametrize("border", ["pad", "map"])
def test_repairs_hold_with_norms_on_both_sides_and_several_in_a_row(border: str) -> None:
    conv = nn.Conv2d(4, 6, 3, padding=1, bias=False)
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4), conv, nn.BatchNorm2d(6))
    made, _ = folded(model, 2, 4, 6, 6, border=border)
    assert len(made.changes) == 3


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_transposed_convolution_behind_a_norm_takes_a_map(groups: int, n: int) -> None:
    conv = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[n - 1]
    model = redrawn(nn.Sequential(NORMS[n](8), conv(8, 16, 3, stride=2, padding=1, groups=groups, bias=False)))
    why = reasons(model, 2, 8, *[5] * n)["0"]
    assert "border='map'" in why
    assert "border='pad'" not in why
    folded(model, 2, 8, *[5] * n, border="map")


@pytest.mark.parametrize(("kernel", "stride", "more"), [(3, 1, 0), (2, 2, 0), (1, 2, 0), (1, 2, 1)])
def test_a_window_of_a_transposed_convolution_makes_borders_without_padding(
    kernel: int, stride: int, more: int
) -> None:
    conv = nn.ConvTranspose2d(4, 6, kernel, stride=stride, output_padding=more)
    model = redrawn(nn.Sequential(nn.BatchNorm2d(4), conv))
    assert "border='map'" in reasons(model, 2, 4, 5, 5)["0"]
    folded(model, 2, 4, 5, 5, border="map")


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_without_a_window_takes_a_norm_over(groups: int) -> None:
    folded(nn.Sequential(nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 1, groups=groups)), 2, 4, 5, 5)


def test_a_map_serves_one_size_and_says_so() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1))
    made, converted = folded(model, 2, 4, 6, 7, border="map")
    assert made.notes == ("1 takes only inputs of 6 x 7 positions now.",)
    with pytest.raises(ValueError, match=r"outputs of \[6, 7\] positions, given \[6, 6\]"):
        converted(torch.randn(2, 4, 6, 6).double())


def test_padding_with_values_serves_every_size() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1))
    _, converted = folded(model, 2, 4, 6, 7, border="pad")
    x = torch.randn(3, 4, 9, 5).double()
    with torch.no_grad():
        assert difference(model(x), converted(x)) <= EXACT


def test_a_gain_of_zero_has_no_padding_value() -> None:
    model = redrawn(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1)))
    model[0].weight.data[2] = 0
    assert "gain is zero" in reasons(model, 2, 4, 6, 6, border="pad")["0"]
    made = plan("fold-batch-norm", model, torch.randn(2, 4, 6, 6).double(), border="map")
    assert made.changes


def test_a_gain_of_zero_is_found_when_the_numbers_come_later() -> None:
    model = redrawn(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1)))
    made = plan("fold-batch-norm", model, torch.randn(2, 4, 6, 6).double(), border="pad")
    model[0].weight.data[2] = 0
    with pytest.raises(ConversionRefused, match="gain is zero"):
        apply_to_model(made, model)


def test_another_border_is_refused() -> None:
    with pytest.raises(ValueError, match="border='zero' is none of 'refuse', 'pad', 'map'"):
        plan("fold-batch-norm", nn.BatchNorm2d(4).eval(), torch.randn(2, 4, 6, 6), border="zero")


class _PadsItself(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(input, self.weight, self.bias, padding=1)


def test_a_convolution_that_ignores_its_attribute_is_not_padded_for() -> None:
    model = redrawn(nn.Sequential(nn.BatchNorm2d(4), _PadsItself(4, 6, 3)))
    assert "pads in a way of its own" in reasons(model, 2, 4, 6, 6, border="pad")["0"]
    folded(model, 2, 4, 6, 6, border="map")


def test_zeros_that_another_module_pads_with_are_refused() -> None:
    model = redrawn(nn.Sequential(nn.BatchNorm2d(4), nn.ZeroPad2d(1), nn.Conv2d(4, 6, 3)))
    assert "pad in 1 reads its output" in reasons(model, 2, 4, 6, 6, border="pad")["0"]
