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
# share of op names that the branches of blocks have in common; attention and MLP have about half
_ALIKE = 0.8


def blocks_of(graph: Graph, stream: Stream) -> dict[int, int]:
    """Return the block of each add, by the index of the add.

    A block is a call right below the innermost call that holds the whole stream, or below a stage of
    equal blocks. Where one forward loops over the parts of its blocks, it is the numbered module that
    the branches run in.
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
    else:
        keys = _within_stages(graph, stream, lines, shared, keys)
    order: dict[Hashable, int] = {}
    blocks = {}
    for add, key in zip(stream.adds, keys, strict=True):
        name = key if key is not None else ("own", add.index)
        blocks[add.index] = order.setdefault(name, len(order))
    return blocks


def _within_stages(
    graph: Graph, stream: Stream, lines: list[list[int]], level: int, keys: list[Hashable]
) -> list[Hashable]:
    """Look into stages: where a call holds numbered children of one make with an add each, these are the blocks."""
    found = list(keys)
    for key in {k for k in keys if k is not None}:
        members = [i for i, k in enumerate(keys) if k == key]
        inner = [lines[i][level + 1] if len(lines[i]) > level + 1 else None for i in members]
        calls = [graph.calls[c] for c in inner if c is not None]
        numbered = len(calls) == len(members) == len(set(inner)) and all(
            c.path.rpartition(".")[2].isdigit() for c in calls
        )
        makes = [{graph.ops[o].short for o in stream.adds[i].region} for i in members]
        alike = len(set.intersection(*makes)) >= _ALIKE * len(set.union(*makes))
        if len(members) > 1 and numbered and alike:
            for i, call in zip(members, calls, strict=True):
                found[i] = call.id
    return found


def _numbered(graph: Graph, add: Residual) -> str | None:
    """Return the numbered module (``blocks.3``) that most ops of a branch run in."""
    counts: Counter[str] = Counter()
    for op in add.region:
        parts = graph.path(graph.ops[op]).split(".")
        first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if first is not None:
            counts[".".join(parts[: first + 1])] += 1
    return counts.most_common(1)[0][0] if counts else None
