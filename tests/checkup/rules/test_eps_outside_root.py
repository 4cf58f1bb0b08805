from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.checkup.rules.judging import findings

Formula = Callable[[Tensor], Tensor]


def after_the_root(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5)


def rms_after_the_root(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-5)


def l2_after_the_root(x: Tensor) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True).sqrt() + 1e-8)


def root_of_var(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True).sqrt() + 1e-5)


def clamped_root(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-5)


def clamped_at_zero(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True).clamp(min=0).sqrt() + 1e-5)


def chosen_where_zero(x: Tensor) -> Tensor:
    root = x.square().mean(-1, keepdim=True).sqrt()
    return x / torch.where(root == 0, 1.0, root)


def clamped_inside(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).clamp(min=1e-10).sqrt()


def inside(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def std_plus_eps(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def norm_plus_eps(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + 1e-6)


def cosine(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


class Hand(nn.Module):
    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x)


def model(formula: Formula, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), Hand(formula), nn.Linear(width, 2))


@pytest.mark.parametrize("width", [2, 7, 8, 48])
@pytest.mark.parametrize(
    "formula",
    [
        after_the_root,
        rms_after_the_root,
        l2_after_the_root,
        root_of_var,
        clamped_root,
        clamped_at_zero,
        chosen_where_zero,
    ],
)
def test_a_root_without_eps_is_found_at_every_width(formula: Formula, width: int) -> None:
    (found,) = findings("NUM004", model(formula, width), torch.ones(3, 4))
    assert found.basis == "proof"
    assert 0.0 in found.evidence["rows_without_finite_gradient"]


@pytest.mark.parametrize("formula", [after_the_root, rms_after_the_root])
def test_the_finding_is_true_of_the_model_forward_finite_and_gradient_not(formula: Formula) -> None:
    x = torch.zeros(3, 8, requires_grad=True)
    y = formula(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad is not None
    assert not x.grad.isfinite().any()


@pytest.mark.parametrize("formula", [inside, clamped_inside, std_plus_eps, norm_plus_eps, cosine])
def test_what_torch_masks_or_guards_passes(formula: Formula) -> None:
    assert findings("NUM004", model(formula), torch.ones(3, 4)) == []


def test_a_root_mean_square_without_centring_fails_on_zeros_only() -> None:
    (found,) = findings("NUM004", model(rms_after_the_root), torch.ones(3, 4))
    assert found.evidence["rows_without_finite_gradient"] == [0.0]


def test_a_std_whose_eps_float16_cannot_divide_by_is_found() -> None:
    half = model(lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)).half()
    assert len(findings("NUM004", half, torch.ones(3, 4).half())) == 1
