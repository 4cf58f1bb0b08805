from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normwise.rendering import in_language
from tests.checkup.rules.judging import findings


class RMS(nn.Module):
    def __init__(self, eps: float, *, float32: bool = False, outside: bool = False) -> None:
        super().__init__()
        self.eps, self.float32, self.outside = eps, float32, outside

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() if self.float32 else x
        square = y.pow(2).mean(-1, keepdim=True)
        root = square.sqrt() + self.eps if self.outside else (square + self.eps).sqrt()
        return (y / root).to(x.dtype)


class Cosine(nn.Module):
    def __init__(self, eps: float = 1e-12) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.eps)


def found(norm: nn.Module, dtype: torch.dtype = torch.float16) -> list[float]:
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 2)).to(dtype)
    return [f.evidence["eps"] for f in findings("NUM003", model, torch.ones(2, 8, dtype=dtype))]


@pytest.mark.parametrize("norm", [RMS(1e-12), RMS(1e-12, outside=True), Cosine(), RMS(1e-8)], ids=str)
def test_an_eps_that_float16_rounds_to_zero_is_found(norm: nn.Module) -> None:
    (eps,) = found(norm)
    assert eps == pytest.approx(norm.eps)


def test_the_evidence_says_what_is_left_of_eps() -> None:
    model = nn.Sequential(nn.Linear(8, 8), RMS(1e-12)).half()
    (finding,) = findings("NUM003", model, torch.ones(2, 8).half())
    assert finding.evidence["eps_in_dtype"] == 0.0
    assert finding.evidence["dtype"] == "float16"
    assert in_language(finding.evidence["zero_row"], "zh") == "非有限"


@pytest.mark.parametrize("norm", [RMS(1e-12, float32=True), RMS(1e-5), RMS(1e-6), Cosine(1e-4)], ids=str)
def test_an_eps_that_is_added_in_float32_or_is_large_enough_passes(norm: nn.Module) -> None:
    assert found(norm) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [RMS(1e-12), Cosine()], ids=str)
def test_dtypes_with_the_range_of_float32_hold_a_tiny_eps(norm: nn.Module, dtype: torch.dtype) -> None:
    assert found(norm, dtype) == []


def test_torchs_own_layer_norm_takes_its_eps_in_float32() -> None:
    assert found(nn.LayerNorm(8, eps=1e-12)) == []


def test_a_norm_that_never_had_an_eps_has_not_lost_it() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.norm(dim=-1, keepdim=True)

    assert found(Bare()) == []
