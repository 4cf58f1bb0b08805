"""Derivatives of the compiled kernels of rows: both orders, upstream gradients kept, checkpoints, copies, autocast."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.gradcheck import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from normwise import kernels, layers
from normwise.spec import NormSpec
from tests.kernels.cpu_cases import HALF, SPECS, each_spec, needs_library, numbers, of_spec, parameters, taken

pytestmark = needs_library


# -- autograd -----------------------------------------------------------------------------------------


@each_spec
def test_derivatives_of_both_orders(spec: NormSpec) -> None:
    x = numbers(2, 3, 6).requires_grad_()
    own = [None if each is None else each.requires_grad_() for each in parameters(spec, (3, 6))]
    assert taken(spec, x, *own)
    point: Any = (x, *own)
    assert gradcheck(of_spec(spec), point)
    assert gradgradcheck(of_spec(spec), point)


def test_derivatives_of_both_orders_of_a_sum() -> None:
    spec = SPECS["torch layer"]
    x, residual = (numbers(2, 6, seed=seed).requires_grad_() for seed in (0, 1))
    weight, bias = (numbers(6, seed=seed).requires_grad_() for seed in (2, 3))

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, weight, bias = tensors
        return kernels.cpu.forward_added(spec, x, residual, weight, bias)

    assert gradcheck(function, (x, residual, weight, bias))
    assert gradgradcheck(function, (x, residual, weight, bias))


@pytest.mark.parametrize("far", [0, 1, 2])
def test_a_row_beside_one_of_huge_numbers_keeps_its_gradient(far: int) -> None:
    """Long rows go in pairs, and rows whose differences overflow go another way: alone."""
    x, weight, bias, dy = numbers(5, 2048, dtype=torch.float32), *parameters(SPECS["torch layer"], (2048,)), None
    dy = numbers(5, 2048, seed=1, dtype=torch.float32)
    own = [each.float() for each in (weight, bias) if each is not None]

    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        y = kernels.forward(SPECS["torch layer"], leaf, *own, kernel="cpu")
        return torch.autograd.grad(y, leaf, dy)[0]

    huge = x.clone()
    huge[far] = torch.where(x[far] > 0, 3e38, -3e38)
    others = [row for row in range(5) if row != far]
    assert torch.equal(gradient(huge)[others], gradient(x)[others])
    assert gradient(huge)[far].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@each_spec
def test_a_gradient_that_is_recorded_is_the_same(spec: NormSpec, dtype: torch.dtype) -> None:
    x = numbers(4, 6, 16, dtype=dtype).requires_grad_()
    own = [None if each is None else each.requires_grad_() for each in parameters(spec, (6, 16), dtype)]
    leaves = [each for each in (x, *own) if each is not None]
    if not taken(spec, x, *own):
        pytest.skip("refused")
    y = of_spec(spec)(x, *own)
    upstream = numbers(*y.shape, seed=9, dtype=dtype)
    usual = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    recorded = torch.autograd.grad(y, leaves, upstream, create_graph=True)
    again = torch.autograd.grad(y, leaves, upstream)
    assert recorded[0].requires_grad
    for first, second, third in zip(usual, recorded, again, strict=True):
        assert torch.equal(first, third)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(first, second, rtol=8 * eps, atol=8 * eps * float(first.abs().max()))


def test_upstream_gradients_are_kept_as_they_came() -> None:
    module = layers.AddRMSNorm(8)
    x, residual = (numbers(3, 8, seed=seed, dtype=torch.float32).requires_grad_() for seed in (0, 1))
    y, summed = module(x, residual)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for each in (y, summed, x, residual):
        each.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))
    upstream = [numbers(3, 8, seed=seed, dtype=torch.float32) for seed in (2, 3)]
    before = [each.clone() for each in upstream]
    for _ in range(2):
        torch.autograd.backward([y, summed], upstream, retain_graph=True)
    assert len(kept) == 8
    assert all(torch.equal(gradient, then) for gradient, then in kept)
    assert all(torch.equal(now, then) for now, then in zip(upstream, before, strict=True))
    shared = [gradient for gradient, _ in kept]
    assert x.grad is not None
    assert residual.grad is not None
    x.grad.zero_()  # the two inputs do not share memory that a later step may write to
    assert residual.grad.abs().sum() > 0
    assert all(torch.equal(gradient, then) for gradient, then in kept)
    assert shared


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    block = nn.Sequential(layers.RMSNorm(8), nn.Linear(8, 8), layers.LayerNorm(8))
    x = numbers(5, 8, dtype=torch.float32).requires_grad_()
    results = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        run(x).pow(3).sum().backward()
        results.append([x.grad, *(each.grad for each in block.parameters())])
        x.grad = None
        block.zero_grad()
    assert all(torch.equal(found, right) for found, right in zip(*results, strict=True))


def test_hooks_of_parameters_see_each_gradient_once() -> None:
    module = layers.LayerNorm(8)
    seen: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda each, name=name: seen.append(f"{name} {each.grad.shape}"))
    module(numbers(3, 8, dtype=torch.float32)).sum().backward()
    assert sorted(seen) == ["bias torch.Size([8])", "weight torch.Size([8])"]


@pytest.mark.parametrize("make", [layers.RMSNorm, layers.LayerNorm, layers.AddRMSNorm])
def test_copies_compute_the_same(make: Callable[..., nn.Module]) -> None:
    module, x = make(8), numbers(3, 8, dtype=torch.float32)
    inputs = (x, x) if make is layers.AddRMSNorm else (x,)
    expected = module(*inputs)  # plans are made by now
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        torch.testing.assert_close(twin(*inputs), expected, rtol=0, atol=0)


# -- autocast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("make", [layers.RMSNorm, layers.LayerNorm])
def test_autocast_changes_neither_values_nor_gradients(make: Callable[..., nn.Module], weights: torch.dtype) -> None:
    module = make(16, dtype=weights)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = numbers(6, 16, dtype=torch.bfloat16).requires_grad_()
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = module(x)
        assert y.dtype is torch.bfloat16
        results.append([y, *torch.autograd.grad(y.float().pow(2).sum(), (x, *module.parameters()))])
    for found, right in zip(*results, strict=True):
        assert found.dtype is right.dtype
        assert torch.equal(found, right)


def test_a_layer_trains_under_autocast() -> None:
    net, x = nn.Sequential(nn.Linear(16, 16), layers.LayerNorm(16), nn.Linear(16, 4)), numbers(9, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        net(x).float().pow(2).sum().backward()
    half: list[Any] = [each.grad for each in net[1].parameters()]
    net.zero_grad()
    net(x).pow(2).sum().backward()
    for found, parameter in zip(half, net[1].parameters(), strict=True):
        right: Any = parameter.grad
        assert found.dtype is torch.float32
        assert (found - right).norm() < 0.05 * right.norm()
