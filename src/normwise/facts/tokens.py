"""The tokens of a stream [B, T, H]: how alike they are, and how far a layer turns them."""

from __future__ import annotations

import torch

__all__ = ["Directions", "token_cosine", "tokens_apart"]

_TINY = torch.finfo(torch.float64).tiny


class Directions:
    """The direction of each token of a stream [B, H], [B, T, H] or [T, B, H], in float64."""

    def __init__(self, stream: torch.Tensor) -> None:
        wide = stream.detach().double()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        self.units = wide / length.clamp(min=_TINY)
        self.alive = length.squeeze(-1) > 0

    @classmethod
    def of(cls, stream: torch.Tensor) -> Directions | None:
        """Return the directions of a stream whose last axis holds its features; None for an image or a vector."""
        if not stream.is_floating_point() or stream.dim() not in (2, 3) or stream.numel() == 0:
            return None
        return cls(stream)

    def cosine_within(self, position_axis: int) -> float | None:
        """Return the mean cosine between two tokens of a sample."""
        count = self.units.shape[position_axis]
        if self.units.dim() != 3 or count < 2:
            return None
        together = self.units.sum(position_axis).square().sum(-1).mean()
        return float((together - count) / (count * (count - 1)))

    def influence_after(self, before: Directions) -> float | None:
        """Return 1 - cos(before, after), the mean over tokens; tokens of zeros on either side are left out."""
        if before.units.shape != self.units.shape:
            return None
        both = before.alive & self.alive
        if not bool(both.any()):
            return None
        return float(1 - (before.units * self.units).sum(-1)[both].mean())


def token_cosine(stream: torch.Tensor, position_axis: int) -> float | None:
    """Return the mean cosine between the tokens of a sample; 1 means that they have become one vector."""
    directions = Directions.of(stream)
    return None if directions is None else directions.cosine_within(position_axis)


def tokens_apart(stream: torch.Tensor, position_axis: int) -> float | None:
    """Return the share of the squares that differs between the tokens of a sample, in the median channel.

    Tokens are brought to one length first, as a norm leaves them. The median keeps one massive channel, which every
    cosine is made of, from hiding what the others carry.
    """
    if not stream.is_floating_point() or stream.dim() != 3 or stream.shape[position_axis] < 2:
        return None
    tokens = Directions(stream).units
    squares = tokens.square().mean((0, position_axis))
    spread = tokens.var(position_axis, correction=0).mean(0)
    return float((spread / squares.clamp(min=_TINY)).median())
