"""The eager kernel is the definition: equal to `reference` for every spec, safe at the ends of the range."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from normwise import kernels
from normwise.kernels import eager
from normwise.spec import Cast, Form, Gate, NormSpec, Scope, Statistic, Weight, reference
from tests.strategies import float64_tensors, hidden_specs, seeds

LAYER = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True, form=Form.TORCH)
RMS = NormSpec(cast=Cast.AFTER_WEIGHT)
HALVES = (torch.bfloat16, torch.float16)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def channel_spec(scope: Scope, ndim: int, **fields: object) -> NormSpec:
    first = {Scope.BATCH: 0, Scope.INSTANCE: 2, Scope.GROUP: 1}[scope]
    axes = tuple(axis - ndim for axis in range(first, ndim) if scope is not Scope.BATCH or axis != 1)
    spec = NormSpec(scope=scope, axes=axes, center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True)
    return replace(spec, **fields)  # type: ignore[arg-type]


@given(x=float64_tensors(), spec=hidden_specs(), seed=seeds)
def test_agrees_with_the_definition_for_any_spec(x: torch.Tensor, spec: NormSpec, seed: int) -> None:
    weight = randn(x.shape[-1], seed=seed) if spec.weight is Weight.VECTOR else None
    torch.testing.assert_close(kernels.forward(spec, x, weight), reference(spec, x, weight), rtol=1e-9, atol=1e-11)


@given(
    scope=st.sampled_from([Scope.BATCH, Scope.INSTANCE, Scope.GROUP]),
    spatial=st.lists(st.integers(2, 4), min_size=1, max_size=3),
    biased=st.booleans(),
    eps_inside=st.booleans(),
    seed=seeds,
)
def test_agrees_with_the_definition_under_masks(
    scope: Scope, spatial: list[int], biased: bool, eps_inside: bool, seed: int
) -> None:
    x = randn(3, 4, *spatial, seed=seed) * 3 + 1
    groups = 2 if scope is Scope.GROUP else None
    spec = channel_spec(scope, x.ndim, groups=groups, biased=biased, eps_inside=eps_inside)
    mask = torch.rand(3, 1, *spatial, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask[:, :, 0], mask[:, :, 1] = True, True  # two real positions at least, so that n - 1 is not 0
    weight, bias = randn(4, seed=seed + 1), randn(4, seed=seed + 2)
    poisoned = x.masked_fill(~mask, float("nan"))
    y = kernels.forward(spec, poisoned, weight, bias, mask)
    torch.testing.assert_close(y, reference(spec, x, weight, bias, mask), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1e19, 1e30, 3e38])
@pytest.mark.parametrize("spec", [RMS, LAYER, replace(LAYER, form=Form.RECIPROCAL)], ids=["rms", "torch", "layer"])
def test_large_finite_rows_come_out_normalized(spec: NormSpec, size: float, dtype: torch.dtype) -> None:
    x = (randn(4, 300).clamp(-1, 1) * size).to(dtype)
    expected = reference(spec, x.double() / size)
    torch.testing.assert_close(kernels.forward(spec, x).double(), expected, rtol=1e-2, atol=torch.finfo(dtype).eps * 8)


@pytest.mark.parametrize("spec", [RMS, LAYER, replace(LAYER, form=Form.RECIPROCAL)], ids=["rms", "torch", "layer"])
def test_gradients_of_large_rows_are_those_of_the_scaled_ones(spec: NormSpec) -> None:
    x, dy = randn(2, 64), randn(2, 64, seed=1)
    large = (x * 2.0**80).float().requires_grad_()
    ordinary = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(kernels.forward(spec, large), large, dy.float())
    (expected,) = torch.autograd.grad(reference(replace(spec, eps=1e-30), ordinary), ordinary, dy)
    torch.testing.assert_close(grad.double() * 2.0**80, expected, rtol=1e-4, atol=1e-6)


def test_rows_of_tiny_numbers_are_normalized_when_no_eps_hides_them() -> None:
    x = randn(3, 50)
    for size in (1e-20, 1e-38):
        y = kernels.forward(replace(RMS, eps=0.0), (x * size).float())
        torch.testing.assert_close(y.double(), reference(replace(RMS, eps=0.0), x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_layer_norm_is_torchs_to_the_bit(dtype: torch.dtype) -> None:
    x, weight, bias = (randn(512, 257) * 3 + 1).to(dtype), randn(257, seed=1).to(dtype), randn(257, seed=2).to(dtype)
    assert torch.equal(kernels.forward(LAYER, x, weight, bias), F.layer_norm(x, (257,), weight, bias, 1e-5))


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_gain_and_bias_count_all_of_many_rows(dtype: torch.dtype) -> None:
    x = randn(16384, 8, dtype=torch.float32).to(dtype)
    weight, bias = torch.ones(8, dtype=dtype, requires_grad=True), torch.zeros(8, dtype=dtype, requires_grad=True)
    kernels.forward(LAYER, x, weight, bias).sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [16384.0] * 8


@pytest.mark.parametrize("eps_inside", [True, False])
@pytest.mark.parametrize("statistic", [Statistic.VARIANCE, Statistic.MEAN_SQUARE, Statistic.L2])
@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.parametrize("value", [0.0, 3.0, 1e-30, 1e30])
def test_constant_rows_have_finite_outputs_and_gradients(
    statistic: Statistic, eps_inside: bool, eps: float, value: float
) -> None:
    center = statistic is Statistic.VARIANCE
    spec = NormSpec(center=center, statistic=statistic, eps=eps, eps_inside=eps_inside)
    x = torch.full((2, 5), value, requires_grad=True)
    y = kernels.forward(spec, x)
    (grad,) = torch.autograd.grad(y, x, randn(2, 5, dtype=torch.float32))
    assert y.isfinite().all()
    assert grad.isfinite().all()


def test_an_offset_of_ten_thousand_deviations_costs_a_batch_norm_no_digits() -> None:
    x = (randn(64, 3, 7) + 1e4).float()
    spec = channel_spec(Scope.BATCH, 3)
    error = (kernels.forward(spec, x).double() - reference(spec, x.double())).abs().max()
    torch_error = (F.batch_norm(x, None, None, training=True).double() - reference(spec, x.double())).abs().max()
    assert error < 2e-6
    assert torch_error > 100 * error


def test_moments_are_those_of_the_real_elements() -> None:
    x, spec = randn(4, 3, 5), channel_spec(Scope.BATCH, 3)
    mask = torch.arange(5) < torch.tensor([5, 2, 1, 4])[:, None]
    kept = x.transpose(0, 1)[:, mask]
    found = kernels.moments(spec, x * torch.where(mask[:, None], 1.0, torch.nan), mask[:, None])
    assert found.mean is not None
    torch.testing.assert_close(found.mean.flatten(), kept.mean(1))
    torch.testing.assert_close(found.statistic.flatten(), kept.var(1, correction=0))
    assert torch.as_tensor(found.elements).flatten().tolist() == [12.0]


def test_moments_of_numbers_whose_squares_overflow_keep_their_mean() -> None:
    found = kernels.moments(channel_spec(Scope.BATCH, 2), torch.tensor([[1e30], [3e30]]))
    assert found.mean is not None
    torch.testing.assert_close(found.mean, torch.tensor([[2e30]]))


def test_autocast_changes_nothing() -> None:
    x, weight = randn(4, 8, dtype=torch.float32), torch.ones(8)
    for spec in (RMS, LAYER):
        outside = kernels.forward(spec, x, weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = kernels.forward(spec, x, weight)
        assert torch.equal(inside, outside)


def test_every_kernel_says_what_it_refuses_and_eager_refuses_nothing() -> None:
    assert "eager" in kernels.KERNELS
    assert kernels.refusals(RMS, torch.ones(2, 3)).get("eager") is None
    assert eager.refusal(LAYER, torch.ones(2, 3), None, None, None) is None


GROUPED = NormSpec(
    scope=Scope.GROUP, axes=(-2, -1), groups=2, center=True, statistic=Statistic.VARIANCE, form=Form.TORCH, bias=True
)
HIDDEN = replace(GROUPED, scope=Scope.HIDDEN, axes=(-1,), groups=None)
CHANGES = {
    "gate first": {"gate": Gate.BEFORE},
    "gain on the input": {"weight_on_input": True},
    "machine eps": {"eps": None},
    "scalar gain": {"weight": Weight.SCALAR, "bias": False},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [GROUPED, HIDDEN], ids=["group", "layer"])
def test_torchs_values_are_taken_only_of_what_torch_is_given(spec: NormSpec, dtype: torch.dtype, change: str) -> None:
    spec = replace(spec, **CHANGES[change])
    x, z, small = torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.randn(3, 4, 5) * 0.01
    size = 4 if spec.groups else 5
    weight = torch.tensor(2.0) if spec.weight is Weight.SCALAR else torch.rand(size) + 0.5
    bias = torch.randn(size) if spec.bias else None
    x = (small if spec.eps is None else x).to(dtype)
    gain, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
    gate = z.to(dtype) if spec.gate is Gate.BEFORE else None
    exact = replace(spec, eps=torch.finfo(torch.float32).eps if spec.eps is None else spec.eps)
    wide = [None if each is None else each.double() for each in (gain, shift)]
    truth = reference(exact, x.double(), *wide, gate=None if gate is None else gate.double())
    y = kernels.forward(spec, x, gain, shift, gate=gate)
    assert float((y - truth).abs().max()) < 16 * torch.finfo(dtype).eps


def test_a_mask_reaches_the_first_part_of_any_axis() -> None:
    x, mask = torch.randn(3, 4, 5, dtype=torch.float64), torch.rand(3, 4, 5) > 0.3
    spec = NormSpec(scope=Scope.OTHER, axes=(-2,), partial=0.5)
    torch.testing.assert_close(kernels.forward(spec, x, mask=mask), reference(spec, x, mask=mask), rtol=1e-12, atol=0)
