"""What a placement depends on: the depth of its stack, and that of the stack beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LINEAR", "OUTPUTS", "ROLES", "Stack"]

# The matrices of a layer: q, k, v and out of attention; gate, up and down of an MLP, where a plain one has no gate.
ROLES = ("q", "k", "v", "out", "gate", "up", "down")
LINEAR = ("v", "out", "gate", "up", "down")  # those that a branch is linear in, or nearly
OUTPUTS = ("out", "down")  # those that write to the stream


@dataclass(frozen=True, slots=True)
class Stack:
    """One stack of layers.

    Args:
        depth: the number of its layers.
        side: "encoder" or "decoder".
        other: the number of layers of the stack beside it; 0: it stands alone.
    """

    depth: int
    side: str = "decoder"
    other: int = 0

    @property
    def encoder(self) -> int:
        """Return N, the number of layers of the encoder."""
        return self.depth if self.side == "encoder" else self.other

    @property
    def decoder(self) -> int:
        """Return M, the number of layers of the decoder."""
        return self.depth if self.side == "decoder" else self.other

    @property
    def alone(self) -> bool:
        """Return whether there is no other stack."""
        return self.other == 0

    @property
    def mixed(self) -> float:
        """Return (N^4 M)^(1/16), which the encoder's constants of an encoder-decoder are made of."""
        return math.pow(self.encoder**4 * self.decoder, 1 / 16)
