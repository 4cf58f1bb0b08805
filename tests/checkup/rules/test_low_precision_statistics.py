from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.checkup.rules.judging import findings, severities

Formula = Callable[[Tensor], Tensor]


class Hand(nn.Module):
    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula, self.weight = formula, nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.formula(x)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def rms_float(x: Tensor) -> Tensor:
    return rms(x.float()).to(x.dtype)


def t5(x: Tensor) -> Tensor:
    return (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def standardize(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def by_var(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)


def by_std(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3)


def cosine(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=1e-3)


def model(formula: Formula, dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), Hand(formula), nn.Linear(16, 3)).to(dtype).eval()


def x(dtype: torch.dtype) -> Tensor:
    return torch.ones(2, 16, dtype=dtype)


@pytest.mark.parametrize("formula", [rms, standardize])
def test_squares_in_float16_are_an_error(formula: Formula) -> None:
    (found,) = findings("NUM001", model(formula, torch.float16), x(torch.float16))
    assert found.severity == "error"
    assert found.basis == "proof"
    assert found.evidence["relative_error_spike_rows"] > 0.5


@pytest.mark.parametrize("formula", [rms, standardize])
def test_squares_in_bfloat16_are_worth_knowing(formula: Formula) -> None:
    (found,) = findings("NUM001", model(formula, torch.bfloat16), x(torch.bfloat16))
    assert found.severity == "info"
    assert 1e-4 < found.evidence["relative_error_ordinary_rows"] < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("formula", [rms_float, t5])
def test_statistics_in_float32_are_silent(formula: Formula, dtype: torch.dtype) -> None:
    assert findings("NUM001", model(formula, dtype), x(dtype)) == []


@pytest.mark.parametrize("formula", [rms, standardize, by_var, cosine])
def test_a_model_in_float32_is_silent(formula: Formula) -> None:
    assert findings("NUM001", model(formula, torch.float32), x(torch.float32)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.RMSNorm(16), nn.GroupNorm(2, 16)], ids=["layer", "rms", "group"])
def test_torchs_own_norms_are_silent(norm: nn.Module, dtype: torch.dtype) -> None:
    assert findings("NUM001", nn.Sequential(nn.Linear(16, 16), norm).to(dtype), x(dtype)) == []


def test_a_fused_variance_that_overflows_only_on_large_rows_is_worth_knowing() -> None:
    (found,) = findings("NUM001", model(by_var, torch.float16), x(torch.float16))
    assert found.severity == "info"
    assert "overflow the variance" in found.message


def squared(x: Tensor) -> Tensor:
    return x / x.pow(2).sum(-1, keepdim=True).sqrt()


def test_a_cosine_similarity_off_the_stream_is_worth_knowing() -> None:
    similarity = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), Hand(squared)).half()
    assert severities("NUM001", similarity, x(torch.float16)) == ["info"]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Hand(squared), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def test_an_l2_norm_on_the_stream_is_an_error() -> None:
    stack = nn.Sequential(Residual(), Residual(), nn.LayerNorm(16)).half()
    assert severities("NUM001", stack, x(torch.float16)[None]) == ["error"]


@pytest.mark.parametrize("formula", [by_std, cosine])
def test_fused_reductions_that_hold_are_silent(formula: Formula) -> None:
    assert findings("NUM001", model(formula, torch.float16), x(torch.float16)) == []


def test_the_dtype_it_will_run_in_is_what_counts() -> None:
    found = findings("NUM001", model(rms, torch.float32), x(torch.float32), dtype=torch.float16)
    assert [str(f.severity) for f in found] == ["error"]


def test_sixty_four_layers_are_one_finding() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), Hand(rms)) for _ in range(64))).half()
    (found,) = findings("NUM001", layers, x(torch.float16))
    assert len(found.paths) == 64
    assert found.path == "0.1"


def test_your_own_rows_count_where_their_mean_is_large_against_their_spread() -> None:
    class Centred(nn.Module):
        def __init__(self, *, float32: bool) -> None:
            super().__init__()
            self.float32 = float32

        def forward(self, x: Tensor) -> Tensor:
            y = x.float() if self.float32 else x
            y = y - y.mean(-1, keepdim=True)
            return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    rows = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) + 60).bfloat16()
    (found,) = findings("NUM001", nn.Sequential(Centred(float32=False)), rows)
    assert (str(found.severity), found.evidence["relative_error_given_rows"] > 0.03) == ("warning", True)
    assert found.counterfactual is not None
    assert found.counterfactual["after"] < 0.01
    assert findings("NUM001", nn.Sequential(Centred(float32=True)), rows) == []
    (fine,) = findings("NUM001", nn.Sequential(Centred(float32=False)), rows - 60)
    assert str(fine.severity) == "info"
