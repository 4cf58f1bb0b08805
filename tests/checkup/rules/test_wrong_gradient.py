from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from normwise.layers import LayerNorm, RMSNorm
from tests.checkup.rules.judging import findings


def layer_norm(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:])


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Written(torch.autograd.Function):
    """An RMSNorm with a backward by hand; ``fault`` says what is wrong with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, fault: str) -> Tensor:
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, w, r)
        ctx.fault = fault
        return x * r * w

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        (dy,), (x, w, r) = grads, ctx.saved_tensors
        n = x * r
        dw = (dy * n).flatten(0, -2).sum(0)
        g = dy * w
        dx = r * (g - n * (g * n).mean(-1, keepdim=True))
        if ctx.fault == "weight":
            dw = dw * 0.5
        if ctx.fault == "projection":
            dx = r * g
        if ctx.fault == "not finite":
            dx = dx / torch.zeros(1)
        return (dy.copy_(dx) if ctx.fault == "overwrites" else dx), dw, None


class Twice(Written):
    """The same, differentiable again: but the saved reciprocal is a constant to autograd."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,), (x, w, r) = grads, ctx.saved_tensors
        r = r.detach()
        g = dy * w
        return r * (g - x * r * (g * x * r).mean(-1, keepdim=True)), (dy * x * r).sum(0), None


class Norm(nn.Module):
    def __init__(self, fault: str = "", function: Any = Written) -> None:
        super().__init__()
        self.weight, self.fault, self.function = nn.Parameter(torch.linspace(0.5, 1.5, 16)), fault, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight, self.fault)


class Inside(Norm):
    """The norm within a module that does more."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(fault)
        self.map = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(self.map(x))


class Around(nn.Module):
    """The norm as a module of its own whose output joins a residual add."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(16, 16), norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.map(x))


def severities(*blocks: nn.Module) -> list[str]:
    model = nn.Sequential(nn.Linear(16, 16), *blocks, nn.Linear(16, 2))
    return [str(f.severity) for f in findings("NUM012", model, X)]


@pytest.mark.parametrize("fault", ["weight", "projection", "not finite"])
def test_a_backward_that_is_not_the_derivative_is_found(fault: str) -> None:
    assert severities(Norm(fault)) == ["error"]
    assert severities(Inside(fault)) == ["error"]


def test_the_parameter_whose_gradient_is_wrong_is_named() -> None:
    (found,) = findings("NUM012", nn.Sequential(nn.Linear(16, 16), Norm("weight")), X)
    assert (found.path, found.evidence["of"]) == ("1", "weight")
    assert found.evidence["value"] == pytest.approx(0.5, abs=1e-3)


def test_overwriting_a_gradient_that_an_add_shares_is_an_error_and_a_remark_where_nobody_does() -> None:
    assert severities(Inside("overwrites")) == ["error"]
    assert severities(Around(Norm("overwrites"))) == ["error"]
    assert severities(Norm("overwrites")) == ["info"]


def test_a_right_backward_passes_alone_and_in_a_block() -> None:
    assert severities(Norm()) == []
    assert severities(Inside(), Around(Norm())) == []


def test_a_second_derivative_that_is_silently_another_is_worth_knowing() -> None:
    assert severities(Norm(function=Twice)) == ["info"]


class Cut(Twice):
    """A backward on tensors without history: the second derivative is cut, and nothing says so."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            return Twice.backward(ctx, *grads)


def test_a_second_derivative_that_is_silently_cut_is_worth_knowing() -> None:
    (found,) = findings("NUM012", nn.Sequential(nn.Linear(16, 16), Norm(function=Cut)), X)
    assert (found.severity, "second derivative" in found.message) == ("info", True)


class Formula(nn.Module):
    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _scaled_first(x: Tensor) -> Tensor:
    return rms(x / x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-6))


def _adanorm(x: Tensor) -> Tensor:
    y = rms(x)
    return y * (1 - 0.1 * y).detach()


@pytest.mark.parametrize(
    "formula",
    [_scaled_first, _adanorm, lambda x: rms(x) + (rms(x).round() - rms(x)).detach(), lambda x: x + rms(x.detach())],
    ids=["a scale that cancels", "a factor behind", "straight-through", "a stopped norm"],
)
def test_a_detach_that_leaves_the_gradient_of_the_norm_passes(formula: Callable[[Tensor], Tensor]) -> None:
    assert severities(Formula(formula)) == []


def _detached_layer_norm(x: Tensor) -> Tensor:
    s = x.detach()
    return (x - s.mean(-1, keepdim=True)) * torch.rsqrt(s.var(-1, keepdim=True, correction=0) + 1e-5)


def test_a_detached_mean_and_variance_are_found_in_a_norm_that_is_no_module_of_its_own() -> None:
    block = Formula(lambda x: x + _detached_layer_norm(x.tanh()).tanh())
    (found,) = findings("NUM012", nn.Sequential(nn.Linear(16, 16), block), X)
    assert found.severity == "warning"
    x = torch.randn(64, 16, dtype=torch.float64, requires_grad=True)
    g = torch.randn(64, 16, dtype=torch.float64)
    cut, true = (torch.autograd.grad(f(x), x, g)[0] for f in (_detached_layer_norm, layer_norm))
    assert found.evidence["value"] == pytest.approx(float((cut - true).norm() / true.norm()), abs=0.2)


def test_statistics_under_no_grad_or_detached_are_a_warning() -> None:
    class Frozen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            return x * r

    class Detached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-6)

    assert severities(Frozen()) == ["warning"]
    assert severities(Detached()) == ["warning"]


def test_another_function_beside_the_norm_is_not_blamed_on_it() -> None:
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    class Quantized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = Through.apply(x)
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    assert severities(Quantized()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_own_layers_pass(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 16), RMSNorm(16), nn.Linear(16, 16), LayerNorm(16)).to(dtype)
    assert findings("NUM012", model, X.to(dtype)) == []


def test_a_float32_stream_in_a_bfloat16_model_is_judged_by_bfloat16() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            y = x.float()
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
            return self.weight * y.to(self.weight.dtype)

    model = nn.Sequential(nn.Linear(16, 16), Wide().bfloat16())
    assert findings("NUM012", model, torch.randn(300, 16)) == []
