"""Groups the residual adds of a stream into blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from normwise.facts.chains import Residual
from normwise.facts.streams import Stream
from normwise.graph import Graph

__all__ = ["blocks_of"]

# self-attention, cross-attention and MLP: more adds in one call are a loop over blocks
_ADDS_OF_A_BLOCK = 3


def blocks_of(graph: Graph, stream: Stream) -> dict[int, int]:
    """Return the block of each add, by the index of the add.

    A block is a call right below the innermost call that holds the whole stream. Where one forward
    loops over the parts of its blocks, it is the numbered module that the branches run in.
    """
    lines = [list(reversed([c.id for c in graph.ancestors(a.op.call)])) for a in stream.adds]
    shared = 0
    while all(len(line) > shared for line in lines) and len({line[shared] for line in lines}) == 1:
        shared += 1
    keys: list[Hashable] = [line[shared] if len(line) > shared else None for line in lines]
    if all(k is None for k in keys) and len(keys) <= _ADDS_OF_A_BLOCK:
        return {a.index: 0 for a in stream.adds}
    if all(k is None for k in keys):
        keys = [_numbered(graph, add) for add in stream.adds]
    order: dict[Hashable, int] = {}
    blocks = {}
    for add, key in zip(stream.adds, keys, strict=True):
        name = key if key is not None else ("own", add.index)
        blocks[add.index] = order.setdefault(name, len(order))
    return blocks


def _numbered(graph: Graph, add: Residual) -> str | None:
    """Return the numbered module (``blocks.3``) that most ops of a branch run in."""
    counts: Counter[str] = Counter()
    for op in add.region:
        parts = graph.path(graph.ops[op]).split(".")
        first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if first is not None:
            counts[".".join(parts[: first + 1])] += 1
    return counts.most_common(1)[0][0] if counts else None
