"""A placement as callers see it: its wiring, gains and words, with what they ask for checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from normwise._parts import page, page_title
from normwise.placements._asked import is_whole
from normwise.placements._stack import Stack
from normwise.spec import Wiring

__all__ = ["SUBLAYERS", "Placement"]

SUBLAYERS = ("attention", "cross", "mlp")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the norms of a stack sit, as data.

    Args:
        name: canonical, kebab-case.
        part: the module that says it.
    """

    name: str
    part: ModuleType

    def __reduce__(self) -> Any:
        """Copy and pickle by name: a module cannot be."""
        from normwise.placements import get

        return get, (self.name,)

    @property
    def title(self) -> str:
        """Return the first line of its page."""
        return page_title(self.part)

    @property
    def page(self) -> str:
        """Return its page: formula, where it comes from, what to know."""
        return page(self.part)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return other names of the same wiring."""
        return tuple(getattr(self.part, "ALIASES", ()))

    @property
    def needs_final_norm(self) -> bool:
        """Return whether the stream leaves the last layer without a norm."""
        return bool(self.part.NEEDS_FINAL_NORM)

    @property
    def streams(self) -> int:
        """Return how many residual streams there are: 2 for ResiDual, which one stream cannot express."""
        return int(getattr(self.part, "STREAMS", 1))

    @property
    def init(self) -> str:
        """Return the initialisation that the gains multiply, see ``normwise.models.INITS``."""
        return str(self.part.INIT)

    def wire(
        self, layer: int, depth: int, *, side: str = "decoder", other_depth: int = 0, sublayer: str = "attention"
    ) -> Wiring:
        """Return how the norms of a sublayer sit.

        Args:
            layer: 0 is the first.
            depth: the number of layers of its stack.
            side: "encoder" or "decoder".
            other_depth: the number of layers of the stack beside it; 0: there is none.
            sublayer: "attention", "cross" or "mlp".

        Raises:
            ValueError: a layer outside the stack, or an unknown side or sublayer.
        """
        stack = self._stack(layer, depth, side, other_depth, sublayer)
        return self.part.wire(layer, stack, sublayer)

    def gains(
        self, layer: int, depth: int, *, side: str = "decoder", other_depth: int = 0, sublayer: str = "attention"
    ) -> Mapping[str, float]:
        """Return by what the initial weights of a sublayer are multiplied, by role; 1 where a role is missing.

        Roles are q, k, v and out of attention, gate, up and down of an MLP. Arguments and errors as ``wire``.
        """
        stack = self._stack(layer, depth, side, other_depth, sublayer)
        gains = getattr(self.part, "gains", None)
        return {} if gains is None else gains(layer, stack, sublayer)

    def embedding_gain(self, depth: int, *, side: str = "decoder") -> float:
        """Return by what the initial embeddings are multiplied; errors as ``wire``."""
        gain = getattr(self.part, "embedding_gain", None)
        return 1.0 if gain is None else float(gain(self._stack(0, depth, side, 0, "attention")))

    def _stack(self, layer: int, depth: int, side: str, other: int, sublayer: str) -> Stack:
        asked = f"placement {self.name!r}"
        for name, value, least in (("depth", depth, 1), ("layer", layer, 0), ("other_depth", other, 0)):
            if not is_whole(value, least):
                raise ValueError(f"{asked} takes a whole {name}, {least} or more, given {value!r}")
        if layer >= depth:
            raise ValueError(f"{asked} has layers 0 to {depth - 1} at depth {depth}, given layer {layer}")
        if side not in ("encoder", "decoder"):
            raise ValueError(f"{asked} takes side='encoder' or 'decoder', given {side!r}")
        if sublayer not in SUBLAYERS:
            raise ValueError(f"{asked} takes sublayer={' or '.join(map(repr, SUBLAYERS))}, given {sublayer!r}")
        return Stack(depth, side, other)
