from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normwise as nw
from normwise.checkup import Finding
from normwise.rendering import in_language
from tests.checkup.rules.judging import findings


def one(model: nn.Module, *inputs: Any) -> Finding:
    (found,) = findings("NUM009", model.eval(), *inputs)
    return found


class Of(nn.Module):
    """A model made of one function."""

    def __init__(self, function: Any, *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*self.parts, *inputs)


class Rms(nn.Module):
    def __init__(self, gain: float = 1.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.full((8,), gain)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * y).to(x.dtype)


class Block(nn.Module):
    def __init__(self, size: float, gain: float = 1.0) -> None:
        super().__init__()
        self.norm, self.map, self.post = Rms(), nn.Linear(8, 8, bias=False), Rms(gain)
        with torch.no_grad():
            self.map.weight.copy_(torch.eye(8) * size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.post(self.map(self.norm(x)))


ROWS = torch.tensor([[1.0, -1.0, 0.5, 0.2, 3.0, -2.0, 0.1, 0.7], [0.3, 0.1, 2.0, 1.0, -1.0, 0.4, 0.2, 0.9]])


def test_the_linear_map_that_overflows_is_blamed_and_the_norm_after_it_is_the_victim() -> None:
    first = nn.Linear(8, 8, bias=False)
    nn.init.constant_(first.weight, 2e4)
    found = one(nn.Sequential(first, Rms(), nn.Linear(8, 2)).half(), ROWS.half())
    assert (found.path, found.evidence["kind"], found.evidence["norm_is"]) == ("0", "overflow", "victim")
    assert in_language(found.evidence["norm_is"], "zh") == "受害者"
    assert found.evidence["float32_peak"] > 65504
    assert found.evidence["surfaces_as_nan_in"] == "1"
    assert found.counterfactual is not None
    assert (found.counterfactual["before"] > 0, found.counterfactual["after"]) == (True, 0)


def test_the_same_model_in_bfloat16_or_float32_is_left_in_peace() -> None:
    first = nn.Linear(8, 8, bias=False)
    nn.init.constant_(first.weight, 2e4)
    model = nn.Sequential(first, Rms(), nn.Linear(8, 2))
    assert findings("NUM009", model, ROWS) == []
    assert findings("NUM009", model.bfloat16(), ROWS.bfloat16()) == []


def test_gains_on_the_branches_are_named_where_a_residual_add_overflows() -> None:
    blocks = [Block(1.0, gain=15000.0) for _ in range(4)]
    found = one(nn.Sequential(nn.Linear(8, 8), *blocks, Rms(), nn.Linear(8, 2)).half(), ROWS.half())
    assert found.evidence["op"] == "aten.add"
    named = found.evidence["largest_contributors"]
    assert {row["path"] for row in named} <= {f"{i}.post" for i in range(1, 5)}
    assert named[0]["max_gain"] == pytest.approx(15000, rel=1e-2)


def test_a_norm_without_eps_that_divides_zero_by_zero_is_the_origin() -> None:
    model = nn.Sequential(Of(lambda x: x / x.norm(dim=-1, keepdim=True)), nn.Linear(8, 2))
    found = one(model, torch.cat([ROWS, torch.zeros(1, 8)]))
    assert (found.severity, found.evidence["kind"], found.evidence["norm_is"]) == ("error", "0/0", "origin")


def test_a_norm_that_another_rule_explains_is_only_worth_knowing() -> None:
    model = nn.Sequential(Of(lambda x: F.normalize(x, dim=-1)), nn.Linear(8, 2)).half()
    report = nw.check(model, torch.cat([ROWS, torch.zeros(1, 8)]).half(), select="NUM003,NUM009")
    assert [(f.code, str(f.severity)) for f in report.findings] == [("NUM003", "error"), ("NUM009", "info")]


def test_running_statistics_are_the_matter_of_another_rule() -> None:
    norm = nn.BatchNorm1d(8)
    assert norm.running_var is not None
    norm.running_var[2] = -1.0
    found = one(nn.Sequential(norm, nn.Linear(8, 2)), ROWS)
    assert (str(found.severity), found.evidence["kind"]) == ("info", "domain")


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda lin, x: lin(x.log()), "domain"),
        (lambda lin, x: lin(x - x / torch.zeros(1)), "x/0"),
        (lambda lin, x: lin((x * 1e30) * (x * 1e30)), "overflow"),
        (lambda lin, x: lin(x.sqrt()), "domain"),
    ],
)
def test_kinds_in_float32(function: Any, kind: str) -> None:
    assert one(Of(function, nn.Linear(8, 2)), ROWS).evidence["kind"] == kind


def test_inputs_and_parameters_that_hold_nan_are_named() -> None:
    bad = ROWS.clone()
    bad[0, 0] = math.nan
    assert one(nn.Sequential(nn.Linear(8, 2)), bad).evidence["op"] == "given: 0"
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan  # type: ignore[index]
    found = one(model, ROWS)
    assert (found.path, found.evidence["op"]) == ("1", "given: 1.weight")


def test_a_row_masked_everywhere_is_named() -> None:
    def attend(lin: nn.Module, x: Tensor) -> Tensor:
        scores = (x @ x.T).masked_fill(torch.ones(2, 2, dtype=torch.bool), -math.inf)
        return lin(scores.softmax(-1) @ x)

    assert one(Of(attend, nn.Linear(8, 2)), ROWS).evidence["kind"] == "row masked everywhere"


def masked_attention(lin: nn.Module, x: Tensor) -> Tensor:
    mask = torch.full((2, 2), -math.inf, dtype=x.dtype).triu(1)
    return lin((x @ x.T + mask).softmax(-1) @ x)


def lowest_number_as_mask(lin: nn.Module, x: Tensor) -> Tensor:
    mask = torch.full((2, 2), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
    return lin((x @ x.T * 40 - 400 + mask).softmax(-1) @ x)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        masked_attention,
        lowest_number_as_mask,
        lambda lin, x: torch.log(torch.relu(lin(x)) * 0),  # log of 0: -inf stays what it is
        lambda lin, x: lin(x).masked_fill(lin(x) > 0, -math.inf),  # masked logits
        lambda lin, x: lin(torch.where(x > 0, x.log(), 0.0)),  # NaN that nobody takes
        lambda lin, x: lin(1 / (1 + torch.exp(x * 1e4))),  # exp overflows, the quotient is 0
    ],
)
def test_infinity_that_was_meant_or_never_arrives_is_no_fault(function: Any, *, half: bool) -> None:
    model, rows = Of(function, nn.Linear(8, 2)), ROWS
    model, rows = (model.half(), rows.half()) if half else (model, rows)
    assert findings("NUM009", model.eval(), rows) == []


def test_a_buffer_of_minus_infinity_and_a_mask_given_by_the_user_are_no_fault() -> None:
    class Masked(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))

        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            return (x @ x.T + self.mask + given).softmax(-1) @ x

    mask = torch.tensor([[0.0, 0.0], [0.0, -math.inf]])
    assert findings("NUM009", Masked(), ROWS, mask) == []
