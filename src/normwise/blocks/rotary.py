"""Rotary positions: q and k turned by an angle that grows with their position.

Pair i of D / 2 turns by position * theta^(-2i / D); element i is paired with element i + D / 2, as in Llama. Angles
are float32 whatever the model's dtype is, as everywhere: a bfloat16 position is exact only up to 256.

References: Su et al. 2021, arxiv.org/abs/2104.09864
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Rotary"]


class Rotary(nn.Module):
    """Turn q and k [B, heads, T, D] by their positions.

    Args:
        head_dim: D, an even number.
        theta: base of the wavelengths.
    """

    def __init__(self, head_dim: int, theta: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions turn pairs of features, given head_dim={head_dim}; use an even one")
        self.head_dim, self.theta = head_dim, theta

    def forward(self, x: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return x, whose first position is ``start``."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device=x.device).float() / self.head_dim
        positions = torch.arange(start, start + x.shape[-2], device=x.device).float()
        angles = torch.outer(positions, 1.0 / self.theta**pairs)
        angles = torch.cat((angles, angles), -1)
        first, second = x.chunk(2, -1)
        return x * angles.cos().to(x.dtype) + torch.cat((-second, first), -1) * angles.sin().to(x.dtype)

    def extra_repr(self) -> str:
        """Return what was asked for."""
        return f"{self.head_dim}, theta={self.theta:g}"
