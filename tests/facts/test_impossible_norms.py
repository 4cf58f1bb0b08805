"""A norm with numbers that no norm can have is named by target, module and number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normwise as nw
from normwise.errors import TargetError


class WrittenOut(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.spare = nn.LayerNorm(8), nn.LayerNorm(8, eps=float("nan"))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (nn.LayerNorm(8, eps=float("nan")), "eps=nan must be a finite number"),
        (nn.RMSNorm(8, eps=float("inf")), "eps=inf must be a finite number"),
        (nn.BatchNorm1d(8, eps=float("nan")), "eps=nan must be a finite number"),
        (WrittenOut(-1.0), r"eps=-1\.0 must be a finite number, 0 or more"),
    ],
    ids=["layer norm", "rms norm", "batch norm", "written out"],
)
def test_the_target_the_module_and_the_number_are_named(norm: nn.Module, said: str) -> None:
    with pytest.raises(TargetError, match=rf"^Sequential: 1: no norm is like this: {said}"):
        nw.check(nn.Sequential(nn.Linear(8, 8), norm), torch.randn(4, 8))


def test_the_name_of_the_module_cannot_steer_a_terminal() -> None:
    model = nn.Module()
    model.add_module("a\x1b[2Jb", norm := nn.LayerNorm(8, eps=float("nan")))
    model.forward = lambda x: norm(x)
    with pytest.raises(TargetError, match=r"^Module: a[^\x1b]+b: no norm"):
        nw.check(model, torch.randn(4, 8))


def test_one_that_is_never_run_is_no_reason_not_to_check_the_others() -> None:
    report = nw.check(Unused(), torch.randn(4, 8))
    assert [norm.path for norm in report.norms] == ["norm"]
