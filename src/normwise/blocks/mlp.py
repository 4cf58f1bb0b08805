"""The MLP of a layer: down(act(up(x))), or down(act(gate(x)) * up(x)) where it is gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from normwise.blocks.norms import MakeNorm
from normwise.placements._asked import advice

__all__ = ["ACTIVATIONS", "MLP"]

_GELU_TANH = partial(functional.gelu, approximate="tanh")
# name: the function, and whether it gates
ACTIVATIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "gelu": (functional.gelu, False),
    "gelu-tanh": (_GELU_TANH, False),
    "relu": (functional.relu, False),
    "silu": (functional.silu, False),
    "geglu": (functional.gelu, True),
    "geglu-tanh": (_GELU_TANH, True),
    "reglu": (functional.relu, True),
    "swiglu": (functional.silu, True),
}


class MLP(nn.Module):
    """Two matrices, or three with a gate.

    Args:
        hidden_size: H.
        inner_size: features between the matrices.
        activation: one of ``ACTIVATIONS``.
        bias: whether the matrices have a shift.
        inner_norm: makes the norm before the last matrix, or None.

    Shape:
        [..., H] -> the same

    References:
        Shazeer 2020, arxiv.org/abs/2002.05202
    """

    def __init__(
        self, hidden_size: int, inner_size: int, activation: str, *, bias: bool, inner_norm: MakeNorm | None = None
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"mlp={activation!r} is unknown; {advice(activation, ACTIVATIONS)}")
        self.activation = activation
        gated = ACTIVATIONS[activation][1]
        self.gate = nn.Linear(hidden_size, inner_size, bias) if gated else None
        self.up = nn.Linear(hidden_size, inner_size, bias)
        self.norm = inner_norm(inner_size) if inner_norm else None
        self.down = nn.Linear(inner_size, hidden_size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the branch."""
        act = ACTIVATIONS[self.activation][0]
        h = act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x)
        return self.down(h if self.norm is None else self.norm(h))
