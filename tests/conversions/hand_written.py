"""Norms as people write them, under names of their own; and modules that are none."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class GammaBeta(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.gamma * centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + self.eps) + self.beta


class Scaled(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale


class ImageNorm(nn.Module):
    """Over the channels of images; its parameters have three axes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.ones(channels, 1, 1)), nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(1, keepdim=True)
        return self.weight * centred / torch.sqrt(centred.square().mean(1, keepdim=True) + 1e-6) + self.shift


class OwnBatchNorm(nn.Module):
    """Statistics under other names, and a count."""

    moving_mean: torch.Tensor
    moving_var: torch.Tensor
    batches: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("moving_mean", torch.zeros(channels))
        self.register_buffer("moving_var", torch.ones(channels))
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.batches.add_(1)
        return F.batch_norm(x, self.moving_mean, self.moving_var, self.gain, self.shift, self.training, 0.2, 1e-3)


class Weightless(nn.Module):
    """Takes vectors of any size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Activated(nn.BatchNorm2d):
    """A batch norm with an activation inside, as timm has them."""

    def __init__(self, channels: int, act: nn.Module | None = None) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act or nn.ReLU()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(input)))


class Rectified(nn.BatchNorm1d):
    """An activation that is no child."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class Twice(nn.Module):
    """LayerNorm with a factor that no convention has: the gain is squared."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:]) * self.weight.square()


class Conditional(nn.LayerNorm):
    """Takes a second argument that changes what it computes."""

    def forward(self, input: torch.Tensor, skip: bool = False) -> torch.Tensor:
        return input if skip else super().forward(input)


class Inside(nn.Module):
    """A norm that no module computes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(size, size), nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


def redrawn(model: Any, seed: int = 0, low: float = 0.5) -> Any:
    """Draw vectors and running statistics anew: on fresh models wrong conversions look right."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and tensor.squeeze().ndim < 2:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + low)
    return model


def relative(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(least))


def of_transformers(name: str, size: int) -> nn.Module:
    folder, cls = name.split(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    return getattr(module, cls)(size)
