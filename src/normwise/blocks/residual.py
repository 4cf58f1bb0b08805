"""One sublayer on the residual stream, wired as a placement says."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normwise.blocks.norms import MakeNorm
from normwise.spec import Gain, Wiring

__all__ = ["Residual", "gain_of"]


def gain_of(gain: Gain | None, size: int) -> nn.Parameter | None:
    """Return the parameter of a learned factor."""
    return None if gain is None else nn.Parameter(torch.full((size,) if gain.vector else (), gain.initial))


class Residual(nn.Module):
    """x' = after_add( skip_scale * x + branch_scale * after_branch( F( input_scale * before(x) ) ) ).

    Args:
        sublayer: F, called as ``F(x, **context)``.
        wiring: where norms, constants and learned factors are.
        hidden_size: H.
        norm: makes the norms.
        branch_gain: a learned factor that other sublayers share, instead of an own one.
        dropout: of the branch, while training.
    """

    def __init__(
        self,
        sublayer: nn.Module,
        wiring: Wiring,
        hidden_size: int,
        *,
        norm: MakeNorm,
        branch_gain: nn.Parameter | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.wiring, self.dropout = wiring, nn.Dropout(dropout)
        self.before = norm(hidden_size) if wiring.before and not wiring.shares_norm else None
        self.sublayer = sublayer
        self.after_branch = norm(hidden_size) if wiring.after_branch else None
        self.after_add = norm(hidden_size) if wiring.after_add else None
        self.skip_gain = gain_of(wiring.skip_gain, hidden_size)
        self.branch_gain = gain_of(wiring.branch_gain, hidden_size) if branch_gain is None else branch_gain

    def forward(self, x: torch.Tensor, block_input: torch.Tensor, **context: Any) -> torch.Tensor:
        """Return the stream after this sublayer; ``block_input`` is what entered the layer."""
        return self.close(x, self.branch(x, **context), block_input)

    def branch(self, x: torch.Tensor, **context: Any) -> torch.Tensor:
        """Return what is added to the stream."""
        h = x if self.before is None else self.before(x)
        if self.wiring.input_scale != 1.0:
            h = h * self.wiring.input_scale
        h = self.dropout(self.sublayer(h, **context))
        if self.after_branch is not None:
            h = self.after_branch(h)
        if self.branch_gain is not None:
            h = h * self.branch_gain
        return h if self.wiring.branch_scale == 1.0 else h * self.wiring.branch_scale

    def close(self, x: torch.Tensor, branch: torch.Tensor, block_input: torch.Tensor) -> torch.Tensor:
        """Add a branch to the stream."""
        skip = x if self.wiring.skip_scale == 1.0 else x * self.wiring.skip_scale
        if self.skip_gain is not None:
            skip = skip * self.skip_gain
        if self.wiring.adds_block_input:
            skip = skip + block_input
        x = skip + branch
        return x if self.after_add is None else self.after_add(x)
