"""A layer: its sublayers one after the other on the stream, or side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normwise.blocks.norms import MakeNorm
from normwise.blocks.residual import Residual, gain_of
from normwise.spec import Wiring

__all__ = ["Layer", "TwoStreamLayer"]


class Layer(nn.Module):
    """Sublayers by name, each with its wiring.

    Args:
        sublayers: name ("attention", "cross", "mlp") -> the module and its wiring, in their order.
        hidden_size: H.
        norm: makes the norms.
        dropout: of the branches.
    """

    def __init__(
        self,
        sublayers: dict[str, tuple[nn.Module, Wiring]],
        hidden_size: int,
        *,
        norm: MakeNorm,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        first = next(iter(sublayers.values()))[1]
        self.parallel = first.parallel
        self.norm = norm(hidden_size) if first.shares_norm else None
        gain = first.branch_gain
        shared = gain_of(gain, hidden_size) if gain is not None and gain.shared else None
        for name, (sublayer, wiring) in sublayers.items():
            residual = Residual(sublayer, wiring, hidden_size, norm=norm, branch_gain=shared, dropout=dropout)
            self.add_module(name, residual)
        self.names = tuple(sublayers)

    def forward(self, x: torch.Tensor, **contexts: dict[str, Any]) -> torch.Tensor:
        """Return the stream after the layer; ``contexts`` are keyword arguments of the sublayers, by name."""
        entered = x
        if not self.parallel:
            for name, residual in self.residuals():
                x = residual(x, entered, **contexts.get(name, {}))
            return x
        seen = x if self.norm is None else self.norm(x)
        for name, residual in self.residuals():
            x = residual.close(x, residual.branch(seen, **contexts.get(name, {})), entered)
        return x

    def residuals(self) -> list[tuple[str, Residual]]:
        """Return the sublayers by name."""
        return [(name, getattr(self, name)) for name in self.names]


class TwoStreamLayer(Layer):
    """A layer of ResiDual: its first stream is wired as any, its second is the plain sum of the branches."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: torch.Tensor, summed: torch.Tensor, **contexts: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both streams after the layer; ``contexts`` are keyword arguments of the sublayers, by name."""
        entered = x
        for name, residual in self.residuals():
            branch = residual.branch(x, **contexts.get(name, {}))
            x, summed = residual.close(x, branch, entered), summed + branch
        return x, summed
