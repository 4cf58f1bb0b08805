"""Smaller rules of the numerics family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normwise.layers import LayerNorm
from tests.checkup.rules.judging import findings, severities

G = torch.Generator().manual_seed(0)
ROWS = torch.randn(6, 8, generator=G)


class Hand(nn.Module):
    def __init__(self, formula: Any) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def moments(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x.square().mean(-1, keepdim=True) - mean**2).clamp(min=0) + 1e-5)


def two_passes(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)


# -- rows that collapse to zero


def test_rows_lost_to_an_overflow_are_counted_in_any_dtype() -> None:
    spiked = ROWS.clone()
    spiked[1, 2], spiked[4, 0] = 300.0, 400.0
    (half,) = findings("NUM002", nn.Sequential(Hand(rms), nn.Linear(8, 2)).half(), spiked.half())
    assert (half.evidence["value"], half.evidence["rows"]) == (2, 6)
    assert half.counterfactual is not None
    assert half.counterfactual["after"] == 0
    (single,) = findings("NUM002", nn.Sequential(Hand(rms), nn.Linear(8, 2)), ROWS * 1e20)
    assert single.evidence["value"] == 6


@pytest.mark.parametrize("norm", [Hand(rms), Hand(two_passes), nn.LayerNorm(8), nn.GroupNorm(2, 8)], ids=str)
def test_rows_that_are_zero_by_right_pass(norm: nn.Module) -> None:
    by_right = ROWS.clone()
    by_right[0], by_right[1] = 0.0, 0.0
    if not isinstance(norm, Hand) or norm.formula is not rms:
        by_right[2] = 3.0  # constant: a norm that centres makes 0 of it
    assert severities("NUM002", nn.Sequential(norm, nn.Linear(8, 2)), by_right) == []


def test_a_gain_of_zero_is_no_collapse() -> None:
    norm = nn.LayerNorm(8)
    nn.init.zeros_(norm.weight)
    assert severities("NUM002", nn.Sequential(norm, nn.Linear(8, 2)), ROWS) == []


# -- a reciprocal that is saved


@pytest.mark.parametrize(
    ("eps", "dtype", "expected"),
    [
        (1e-12, torch.float16, ["info"]),
        (1e-6, torch.float16, []),
        (1e-12, torch.bfloat16, []),
        (1e-12, torch.float32, []),
    ],
)
def test_a_saved_reciprocal_overflows_in_float16_only(eps: float, dtype: torch.dtype, expected: list[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=eps)).to(dtype)
    assert severities("NUM006", model, ROWS.to(dtype)) == expected


# -- a variance that cancels


def test_a_difference_of_moments_is_a_warning_on_rows_that_show_it_and_else_a_remark() -> None:
    model = nn.Sequential(Hand(moments), nn.Linear(8, 2))
    assert severities("NUM007", model, ROWS + 2000) == ["warning"]
    assert severities("NUM007", model, ROWS) == ["info"]


def test_a_variance_that_turns_negative_is_said_not_to_be_finite() -> None:
    def unclamped(x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(x.square().mean(-1, keepdim=True) - mean**2 + 1e-5)

    model = nn.Sequential(Hand(unclamped), nn.Linear(8, 2)).bfloat16()
    (found,) = findings("NUM007", model, (ROWS + 20).bfloat16())
    assert found.evidence["value"] is None
    assert found.message.endswith("is not finite")


def test_two_passes_pass_on_the_same_rows() -> None:
    for norm in (Hand(two_passes), nn.LayerNorm(8)):
        assert severities("NUM007", nn.Sequential(norm, nn.Linear(8, 2)), ROWS + 2000) == []


# -- a stream near the end of float16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.map(self.norm(x))


@pytest.mark.parametrize(
    ("size", "dtype", "expected"),
    [
        (4e4, torch.float16, ["warning"]),
        (2e4, torch.float16, []),
        (4e4, torch.bfloat16, ["info"]),
        (4e4, torch.float32, []),
    ],
)
def test_a_stream_above_half_of_float16(size: float, dtype: torch.dtype, expected: list[str]) -> None:
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
    x = torch.linspace(-1, 1, 48).reshape(2, 3, 8) * size
    assert severities("NUM008", model.eval(), x.to(dtype)) == expected


def test_token_and_channel_of_the_largest_element_are_named() -> None:
    x = torch.randn(2, 3, 8, generator=G)
    x[1, 2, 5] = 5e4
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 2)).half()
    (found,) = findings("NUM008", model.eval(), x.half())
    assert (found.evidence["token"], found.evidence["channel"]) == ([1, 2], 5)


# -- dtypes that are promoted


class Post(nn.Module):
    """x + norm(f(x)), the norm's gain in a dtype of its own."""

    def __init__(self, gain: torch.dtype, *, back: bool) -> None:
        super().__init__()
        self.map, self.weight, self.back = nn.Linear(8, 8).bfloat16(), nn.Parameter(torch.ones(8, dtype=gain)), back

    def forward(self, x: Tensor) -> Tensor:
        y = rms(self.map(x.bfloat16()).float()).bfloat16() * self.weight
        return x + (y.bfloat16() if self.back else y)


@pytest.mark.parametrize(
    ("gain", "back", "expected"),
    [(torch.float32, False, ["warning"]), (torch.float32, True, []), (torch.bfloat16, False, [])],
)
def test_a_stream_that_a_gain_promotes(gain: torch.dtype, back: bool, expected: list[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8).bfloat16(), Post(gain, back=back), Post(gain, back=back))
    assert severities("NUM011", model, torch.randn(2, 3, 8, generator=G).bfloat16()) == expected


class CastMatrix(nn.Module):
    """A matrix that is cast to the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8, generator=G).bfloat16() / 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.w.to(x.dtype))


class Pre(nn.Module):
    """A pre-norm block whose branch runs in whatever dtype the norm gives out."""

    def __init__(self, *, back: bool) -> None:
        super().__init__()
        self.gain, self.up, self.down, self.back = nn.Parameter(torch.ones(8)), CastMatrix(), CastMatrix(), back

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(rms(x.float()).to(x.dtype) * self.gain).relu())
        return x + (y.to(x.dtype) if self.back else y)


@pytest.mark.parametrize(("back", "expected"), [(False, ["warning"]), (True, [])])
def test_a_stream_that_a_gain_promotes_behind_matrices(back: bool, expected: list[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8).bfloat16(), Pre(back=back), Pre(back=back))
    assert severities("NUM011", model, torch.randn(2, 3, 8, generator=G).bfloat16()) == expected


def test_a_stream_kept_in_float32_on_purpose_passes() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(8, 8).bfloat16(), nn.ModuleList([Post(torch.float32, back=False)] * 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).float()
            for block in self.blocks:
                x = block(x)
            return x

    assert severities("NUM011", Wide(), torch.randn(2, 3, 8, generator=G).bfloat16()) == []


# -- the order of gain and cast


class Scaled(nn.Module):
    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.linspace(0.5, 1.5, 8)), last

    def forward(self, x: Tensor) -> Tensor:
        y = rms(x.float())
        return (self.weight.float() * y).to(x.dtype) if self.last else self.weight * y.to(x.dtype)


@pytest.mark.parametrize(
    ("family", "last", "expected"),
    [("llama", True, ["info"]), ("llama", False, []), ("olmo2", True, []), ("olmo2", False, ["info"])],
)
def test_the_order_is_that_of_the_family(family: str, last: bool, expected: list[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Scaled(last=last), nn.Linear(8, 2)).bfloat16()
    assert severities("NUM010", model, ROWS.bfloat16(), config={"model_type": family}) == expected


# -- gradients summed in half precision


def test_training_in_half_precision_is_warned_of_and_inference_is_not() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    many = torch.randn(4, 256, 8, generator=G).bfloat16()
    assert severities("NUM013", model, many, optimizer=sgd) == ["warning"]
    assert severities("NUM013", model, many) == ["info"]


def test_a_batch_that_loses_nothing_is_told_from_how_many_rows_on_it_would() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    (found,) = findings("NUM013", model, torch.randn(8, 8, generator=G).bfloat16(), optimizer=sgd)
    assert found.severity == "info"
    assert 8 < found.evidence["matters_from_rows"] <= 1024


def test_the_loss_is_the_same_with_any_number_of_threads() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found += findings("NUM013", model, torch.ones(512, 8).bfloat16())
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)
    one, two = (f.evidence["value"] for f in found)
    assert one == pytest.approx(two, rel=1e-6)  # the true sums in float64 are rounded by threads


def test_float32_gains_and_our_layers_pass() -> None:
    mixed = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    ours = nn.Sequential(nn.Linear(8, 8), LayerNorm(8)).bfloat16()
    assert severities("NUM013", mixed, ROWS) == []
    assert severities("NUM013", ours, ROWS.bfloat16()) == []
