"""What a traced run keeps of its values, and which of them it computes otherwise."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from normwise.graph.data import Value

__all__ = ["KEPT_BYTES", "Instead", "Observer"]

# Values of one run kept for comparison. MiniLM on 2x128 tokens is 60 MB; a run that needs more is repeated with only
# the values that are wanted.
KEPT_BYTES = 2**30

Instead = Callable[[Mapping[int, torch.Tensor]], torch.Tensor]
"""Makes a value from those kept so far, by id; under its own id stands what the op made."""


@dataclass(slots=True)
class Observer:
    """Keeps copies of floating-point values while a run goes by, and overwrites chosen ones.

    Args:
        wanted: ids of the values to keep; None keeps all of them.
        instead: by value id, what is computed in place of it. The op runs first; its result is overwritten, so
            that everything after reads the other one.
        limit: bytes; a run that goes beyond keeps nothing and says so in ``full``.
    """

    wanted: Collection[int] | None = None
    instead: Mapping[int, Instead] = field(default_factory=dict)
    limit: int = KEPT_BYTES
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    full: bool = False
    held: int = 0

    def made(self, value: Value, tensor: torch.Tensor) -> None:
        """Take note of a value that a run has just made."""
        if value.id in self.instead:
            self._overwrite(value, tensor)
        if not value.floating or self.full or (self.wanted is not None and value.id not in self.wanted):
            return
        if tensor.device.type == "meta" or tensor.layout is not torch.strided or tensor.is_nested:
            return
        self.held += tensor.numel() * tensor.element_size()
        if self.held > self.limit:
            self.full = True
            self.tensors.clear()
        else:
            self.tensors[value.id] = tensor.detach().clone()

    def _overwrite(self, value: Value, tensor: torch.Tensor) -> None:
        new = self.instead[value.id](ChainMap({value.id: tensor}, self.tensors))
        if tuple(new.shape) != tuple(tensor.shape):
            raise ValueError(f"value {value.id} has shape {tuple(tensor.shape)}, its stand-in {tuple(new.shape)}")
        tensor.copy_(new)
