"""The norms inside the sublayers of each block: of queries, keys, values and of what lies between."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normwise.facts import vocabulary as ops
from normwise.facts.records import Place

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Inside", "inside"]

_PLACES = (Place.QK, Place.V, Place.INNER)
_ARRANGES = ops.VIEW | ops.RECAST | frozenset({"contiguous", "clone"})


@dataclass(slots=True)
class Inside:
    """What a block computes between its norms, and which norms stand there."""

    norms: Counter[Place]
    work: Counter[str]  # its other ops, by name: blocks that do the same work are siblings
    paths: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """Return the norms in words: "2 qk norms"."""
        return ", ".join(f"{n} {p} norm{'s' * (n > 1)}" for p, n in sorted(self.norms.items())) or "no inner norm"


def inside(facts: Facts, stack: int) -> dict[int, Inside]:
    """Return for each block of a stack the norms inside its sublayers and the work around them."""
    graph, placed = facts.graph, facts.placed
    calls = facts.norm_calls.norms
    of_norms = {op for call in calls for op in call.members}
    blocks: dict[int, Inside] = {}
    for add in placed.streams[stack].adds:
        block = blocks.setdefault(placed.layers[add.index], Inside(Counter(), Counter()))
        rest = (graph.ops[i] for i in sorted(add.region - of_norms))
        block.work.update(op.short for op in rest if op.short not in _ARRANGES)
        held = [c for c in calls if c.op.id in add.region and placed.seats[c.op.id].place in _PLACES]
        block.norms.update(placed.seats[c.op.id].place for c in held)
        block.paths = tuple(dict.fromkeys((*block.paths, graph.path(add.op))))
    return blocks
