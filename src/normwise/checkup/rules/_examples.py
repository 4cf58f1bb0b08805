"""Pieces of the small models that several rules show their fault on."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Float32RMSNorm", "PreNormBlock"]


class PreNormBlock(nn.Module):
    """x + f(norm(x))."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the branch to the stream."""
        return x + self.mlp(self.norm(x))


class Float32RMSNorm(nn.Module):
    """An RMSNorm that is exact in half precision, gain included."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize in float32 and cast back."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return (self.weight.float() * y).to(x.dtype)
