"""Keys and values of the positions already seen, so that decoding computes the new ones alone."""

from __future__ import annotations

import torch

from normwise.placements._asked import is_whole

__all__ = ["Cache"]


class Cache:
    """Keys and values of every layer, [B, heads, context, D] each, made when a layer first writes.

    Args:
        context: the most positions it can hold.

    Raises:
        ValueError: no such number, or more positions written than that.
    """

    def __init__(self, context: int) -> None:
        if not is_whole(context, 1):
            raise ValueError(f"a cache holds a whole number of positions, 1 or more, given context={context!r}")
        self.context, self.length = context, 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new positions of a layer, and return all of them."""
        end = self.length + k.shape[-2]
        if end > self.context:
            raise ValueError(
                f"the cache holds {self.context} positions and has {self.length}, given {k.shape[-2]} more; "
                "start a new one, or make it longer"
            )
        if layer not in self._layers:
            self._layers[layer] = tuple(x.new_zeros(*x.shape[:-2], self.context, x.shape[-1]) for x in (k, v))  # type: ignore[assignment]
        keys, values = self._layers[layer]
        keys[..., self.length : end, :], values[..., self.length : end, :] = k, v
        return keys[..., :end, :], values[..., :end, :]

    def advance(self, steps: int) -> None:
        """Count positions that every layer has written."""
        self.length += steps
