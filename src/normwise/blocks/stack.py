"""A stack of layers on one residual stream, or on two where a placement needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from normwise.blocks.layer import Layer, TwoStreamLayer
from normwise.blocks.norms import MakeNorm
from normwise.placements import Placement
from normwise.spec import Wiring

__all__ = ["MakeSublayer", "Stack"]

MakeSublayer = Callable[[int, Wiring], nn.Module]  # of a layer's number and the wiring that it is given


class Stack(nn.Module):
    """``depth`` layers wired by a placement, and the final norm where the placement needs one.

    ResiDual runs on two streams: the first is normalized after every add, the second is the plain sum of the branches;
    they meet at the end, the second through the final norm.

    Args:
        depth: the number of layers.
        hidden_size: H.
        sublayers: makers of the sublayers of a layer, by name, in their order.
        placement: where the norms sit.
        norm: makes the norms.
        side: "encoder" or "decoder".
        other_depth: layers of the stack beside it, or 0.
        final_norm: whether there is one; None: where the placement needs it.
        dropout: of the branches.
    """

    def __init__(
        self,
        depth: int,
        hidden_size: int,
        sublayers: dict[str, MakeSublayer],
        *,
        placement: Placement,
        norm: MakeNorm,
        side: str = "decoder",
        other_depth: int = 0,
        final_norm: bool | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.placement, self.side, self.other_depth = placement, side, other_depth
        self.layers = nn.ModuleList()
        for layer in range(depth):
            wirings = {
                name: placement.wire(layer, depth, side=side, other_depth=other_depth, sublayer=name)
                for name in sublayers
            }
            made = {name: (make(layer, wirings[name]), wirings[name]) for name, make in sublayers.items()}
            kind = TwoStreamLayer if placement.streams == 2 else Layer
            self.layers.append(kind(made, hidden_size, norm=norm, dropout=dropout))
        has_final = placement.needs_final_norm if final_norm is None else final_norm
        self.final_norm = norm(hidden_size) if has_final else None

    def forward(self, x: torch.Tensor, **contexts: dict[str, Any]) -> torch.Tensor:
        """Return the stream after the last norm; ``contexts`` are keyword arguments of the sublayers, by name."""
        if self.placement.streams == 2:
            summed = x
            for layer in self.layers:
                x, summed = layer(x, summed, **contexts)
            return x + (summed if self.final_norm is None else self.final_norm(summed))
        for layer in self.layers:
            x = layer(x, **contexts)
        return x if self.final_norm is None else self.final_norm(x)
