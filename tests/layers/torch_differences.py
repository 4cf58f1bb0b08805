"""Where torch 2.13 (on a CPU, one thread) is wrong or refuses, what is right, and what we return: the right one.

Every row runs the same code on torch's layers and on ours. ``test_torch_differences`` holds us to ``exact`` and
fails for a row that torch has put right since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as torch_functional
from torch import nn
from torch.utils.checkpoint import checkpoint

from normwise import layers
from normwise.functional import layer_norm, lp_norm

__all__ = ["DIFFERENCES", "OURS", "TORCH", "Difference", "Home"]

Value = float | str  # a str is the name of an exception


@dataclass(frozen=True, slots=True)
class Home:
    """Where layers and functions come from."""

    layers: ModuleType
    layer_norm: Callable[..., torch.Tensor]
    normalize: Callable[..., torch.Tensor]  # by a p-norm


TORCH = Home(nn, torch_functional.layer_norm, torch_functional.normalize)
OURS = Home(layers, layer_norm, lp_norm)


@dataclass(frozen=True, slots=True)
class Difference:
    """One number that torch gets wrong."""

    what: str
    measure: Callable[[Home], float]
    torch: Value  # measured with torch 2.13
    exact: Value
    within: float = 1e-6  # of the exact value


def bias_gradient(dtype: torch.dtype, parameters: torch.dtype) -> Callable[[Home], float]:
    """Return what sums 16,384 ones."""

    def measure(home: Home) -> float:
        layer = home.layers.LayerNorm(4, dtype=parameters)
        x = torch.randn(16384, 4, dtype=dtype)
        layer(x).backward(torch.ones_like(x))
        return layer.bias.grad[0].item()

    return measure


def weight_gradient(home: Home) -> float:
    layer = home.layers.LayerNorm(4, dtype=torch.bfloat16)
    x = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.bfloat16).repeat(16384, 1)
    layer(x).backward(x)
    return layer.weight.grad[0].item()


def bias_gradient_under_autocast(home: Home) -> float:
    linear, layer = nn.Linear(8, 8), home.layers.LayerNorm(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(linear(torch.randn(16384, 8)))
    y.float().sum().backward()
    return layer.bias.grad[0].item()


def error_of_weight_gradient(home: Home) -> float:
    layer, truth = home.layers.LayerNorm(768, dtype=torch.bfloat16), nn.LayerNorm(768, dtype=torch.float64)
    x, upstream = torch.randn(2, 4096, 768, dtype=torch.bfloat16)
    layer(x).backward(upstream)
    truth(x.double()).backward(upstream.double())
    assert truth.weight.grad is not None
    return ((layer.weight.grad - truth.weight.grad).norm() / truth.weight.grad.norm()).item()


def weight_gradient_of_one_element(home: Home) -> float:
    layer = home.layers.LayerNorm(1)
    layer(torch.tensor([[0.1], [0.7], [3.3]])).backward(torch.ones(3, 1))
    return layer.weight.grad.item()


def second_derivative_of_a_shift_alone(home: Home) -> float:
    x, shift = torch.tensor([0.0, 1.0, 3.0], requires_grad=True), torch.zeros(3, requires_grad=True)
    y = home.layer_norm(x, (3,), None, shift)
    of_x, of_shift = torch.autograd.grad(y.pow(2)[0], (x, shift), create_graph=True)
    return torch.autograd.grad(of_x[0] + of_shift[0], x)[0][0].item()


def first(make: Callable[[Home], nn.Module], x: torch.Tensor) -> Callable[[Home], float]:
    """Return what gives the first output."""
    return lambda home: make(home)(x.clone()).flatten()[0].item()


def gradient(make: Callable[[Home], nn.Module]) -> Callable[[Home], float]:
    """Return what gives 1e20 times the first gradient of the sum of cubes at (1, -1, 2, -3) 1e20."""

    def measure(home: Home) -> float:
        x = (torch.tensor([[1.0, -1.0, 2.0, -3.0]]) * 1e20).requires_grad_()
        make(home)(x).pow(3).sum().backward()
        assert x.grad is not None
        return x.grad[0, 0].item() * 1e20

    return measure


def error_beside_offset(make: Callable[[Home], nn.Module], *shape: int) -> Callable[[Home], float]:
    """Return what gives the largest error of an output for values around 10,000 with a standard deviation of 1."""

    def measure(home: Home) -> float:
        x = torch.randn(shape) + 1e4
        return (make(home)(x).double() - make(TORCH).double()(x.double())).abs().max().item()

    return measure


def error_of_running_variance(home: Home) -> float:
    layer, x = home.layers.BatchNorm1d(3, momentum=1.0), torch.randn(4096, 3) + 1e4
    layer(x)
    return (layer.running_var - x.double().var(0)).abs().max().item()


def after_two_batches(buffer: str) -> Callable[[Home], float]:
    """Return what an instance norm with ``momentum=None`` keeps of the batches (1, 3) and (5, 9)."""

    def measure(home: Home) -> float:
        layer = home.layers.InstanceNorm1d(1, momentum=None, track_running_stats=True)
        layer(torch.tensor([[[1.0, 3.0]]]))
        layer(torch.tensor([[[5.0, 9.0]]]))
        return getattr(layer, buffer).item()

    return measure


def recomputed(buffer: str, reentrant: bool) -> Callable[[Home], float]:
    """Return what a batch norm with ``momentum=0.5`` keeps of the batch (1, 3) that a checkpoint computes twice."""

    def measure(home: Home) -> float:
        layer, x = home.layers.BatchNorm1d(1, momentum=0.5), torch.tensor([[1.0], [3.0]], requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=reentrant)
        assert isinstance(y, torch.Tensor)
        y.sum().backward()
        return getattr(layer, buffer).item()

    return measure


def normalized(x: torch.Tensor) -> Callable[[Home], float]:
    """Return what gives the first element of a vector divided by its length."""
    return lambda home: home.normalize(x, 2.0, -1)[0].item()


def complex_rms(home: Home) -> float:
    layer = home.layers.RMSNorm(2, elementwise_affine=False)
    return layer(torch.tensor([1.0, 1.0j])).abs()[0].item()


def _layer(size: int, eps: float = 1e-5) -> Callable[[Home], nn.Module]:
    return lambda home: home.layers.LayerNorm(size, eps)


def _one_in_brain(home: Home) -> nn.Module:
    return home.layers.LayerNorm(1, dtype=torch.bfloat16)


def _rms(size: int, eps: float | None = None) -> Callable[[Home], nn.Module]:
    return lambda home: home.layers.RMSNorm(size, eps)


def _group(channels: int, eps: float = 1e-5) -> Callable[[Home], nn.Module]:
    return lambda home: home.layers.GroupNorm(1, channels, eps)


def _batch(home: Home) -> nn.Module:
    return home.layers.BatchNorm1d(1)


FAR = torch.tensor([[1.0, -1.0, 3.0, -3.0]]) * 1e20
FAR_NORMALIZED = 1 / 5**0.5
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32

DIFFERENCES = (
    # Gradients that are summed in half precision stop growing where adding 1 changes nothing, in each thread.
    Difference("LayerNorm bfloat16, 16,384 rows: bias gradient", bias_gradient(BRAIN, BRAIN), 256.0, 16384.0),
    Difference("LayerNorm float16, 16,384 rows: bias gradient", bias_gradient(HALF, HALF), 2048.0, 16384.0),
    Difference("LayerNorm float32, bfloat16 input: bias gradient", bias_gradient(BRAIN, SINGLE), 256.0, 16384.0, 1.0),
    Difference("LayerNorm float32, float16 input: bias gradient", bias_gradient(HALF, SINGLE), 2048.0, 16384.0, 1.0),
    Difference("LayerNorm bfloat16, 16,384 rows: weight gradient", weight_gradient, 256.0, 16384.0),
    Difference("LayerNorm under CPU autocast: bias gradient", bias_gradient_under_autocast, 256.0, 16384.0, 1.0),
    Difference("LayerNorm bfloat16, 4096 x 768: error of dweight", error_of_weight_gradient, 0.07, 0.0, 0.004),
    Difference("LayerNorm of one element: weight gradient", weight_gradient_of_one_element, 2.8e-5, 0.0, 0.0),
    Difference(
        "layer_norm, bias alone: second derivative", second_derivative_of_a_shift_alone, "RuntimeError", 0.1432987
    ),
    Difference(
        "LayerNorm of one element, bfloat16",
        first(_one_in_brain, torch.full((1, 1), 100.3, dtype=BRAIN)),
        -4e-4,
        0.0,
        0.0,
    ),
    # Squares that overflow.
    Difference("LayerNorm of a row of 2e19", first(_layer(4), torch.full((1, 4), 2e19)), float("nan"), 0.0),
    Difference("LayerNorm of (1, -1, 3, -3) 1e20", first(_layer(4), FAR), 0.0, FAR_NORMALIZED),
    Difference("LayerNorm near 1e20: input gradient", gradient(_layer(4)), float("nan"), -0.6175543, 1e-5),
    Difference("RMSNorm of a row of 1e19", first(_rms(4), torch.full((1, 4), 1e19)), 0.0, 1.0),
    Difference("RMSNorm of 1024 times 6e17", first(_rms(1024), torch.full((1, 1024), 6e17)), 0.0, 1.0),
    Difference("RMSNorm near 1e20: input gradient", gradient(_rms(4)), 0.0, 0.9364, 1e-3),
    Difference("GroupNorm of a row of 2e19", first(_group(4), torch.full((1, 4), 2e19)), float("nan"), 0.0),
    Difference("GroupNorm of (1, -1, 3, -3) 1e20", first(_group(4), FAR), 0.0, FAR_NORMALIZED),
    Difference("GroupNorm near 1e20: input gradient", gradient(_group(4)), float("nan"), -0.6175543, 1e-5),
    Difference("BatchNorm of (1, -1, 3, -3) 1e20", first(_batch, FAR.T), 0.0, FAR_NORMALIZED),
    Difference(
        "InstanceNorm of (1, -1, 3, -3) 1e20",
        first(lambda home: home.layers.InstanceNorm1d(1), FAR[None]),
        0.0,
        FAR_NORMALIZED,
    ),
    Difference("normalize (3, 4) 1e20", normalized(torch.tensor([3e20, 4e20])), 0.0, 0.6),
    Difference("normalize 4096 times 2000, float16", normalized(torch.full((4096,), 2e3, dtype=HALF)), 0.0, 1 / 64),
    Difference("normalize zeros, float16", normalized(torch.zeros(4, dtype=HALF)), float("nan"), 0.0),
    # Statistics of values far from 0.
    Difference("GroupNorm of a row of 1e18", first(_group(4), torch.full((1, 4), 1e18)), 5.6e12, 0.0),
    Difference("BatchNorm of a channel of 1e20", first(_batch, torch.full((4, 1), 1e20)), -9.8e14, 0.0),
    Difference(
        "BatchNorm1d around 1e4: error", error_beside_offset(lambda h: h.layers.BatchNorm1d(3), 4096, 3), 1.4e-2, 0.0
    ),
    Difference(
        "BatchNorm2d around 1e4: error",
        error_beside_offset(lambda h: h.layers.BatchNorm2d(3), 16, 3, 16, 16),
        4.8e-4,
        0.0,
    ),
    Difference("GroupNorm around 1e4: error", error_beside_offset(_group(3), 4, 3, 32, 32), 5.1e-4, 0.0),
    Difference(
        "InstanceNorm2d around 1e4: error",
        error_beside_offset(lambda h: h.layers.InstanceNorm2d(3), 4, 3, 32, 32),
        8.0e-4,
        0.0,
    ),
    Difference("BatchNorm1d around 1e4: error of running_var", error_of_running_variance, 1.7e-4, 0.0),
    # Running statistics.
    Difference("InstanceNorm, momentum None: running_mean", after_two_batches("running_mean"), 0.0, 4.5),
    Difference("InstanceNorm, momentum None: running_var", after_two_batches("running_var"), 1.0, 5.0),
    Difference("InstanceNorm: batches counted", after_two_batches("num_batches_tracked"), 0.0, 2.0),
    Difference("BatchNorm in a checkpoint: running_mean", recomputed("running_mean", False), 1.5, 1.0),
    Difference("BatchNorm in a reentrant checkpoint: running_mean", recomputed("running_mean", True), 1.5, 1.0),
    Difference("BatchNorm in a checkpoint: batches counted", recomputed("num_batches_tracked", False), 2.0, 1.0),
    # eps = 0, other dtypes.
    Difference("LayerNorm of zeros, eps 0", first(_layer(2, 0.0), torch.zeros(1, 2)), float("nan"), 0.0),
    Difference("RMSNorm of zeros, eps 0", first(_rms(2, 0.0), torch.zeros(1, 2)), float("nan"), 0.0),
    Difference("GroupNorm of zeros, eps 0", first(_group(2, 0.0), torch.zeros(1, 2)), float("nan"), 0.0),
    Difference(
        "RMSNorm of (3, 4) 1e-30, eps 0",
        first(_rms(2, 0.0), torch.tensor([[3e-30, 4e-30]])),
        float("inf"),
        3 / 12.5**0.5,
    ),
    Difference(
        "BatchNorm, eps 0",
        first(lambda home: home.layers.BatchNorm1d(1, eps=0.0), torch.tensor([[1.0], [3.0]])),
        "ValueError",
        -1.0,
    ),
    Difference(
        "LayerNorm bfloat16, float32 input",
        first(lambda home: home.layers.LayerNorm(2, eps=0.0, dtype=BRAIN), torch.tensor([[1.0, 3.0]])),
        "RuntimeError",
        -1.0,
    ),
    # torch takes the mean of x^2, which is 0 here, and not of |x|^2, which is 1.
    Difference("RMSNorm of (1, i), complex", complex_rms, 2896.3, "TypeError"),
)
