"""Residual adds are linked into streams: which add continues which, and which stream lies in another's branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from normwise.facts.chains import Residual

__all__ = ["Stream", "linked"]

# a stream whose every branch holds a stream of its own of at least this many adds is a long skip: one block has two
_LONG = 2


@dataclass(slots=True)
class Stream:
    """A chain of residual adds, oldest first."""

    adds: list[Residual]
    nested_in: int | None = None  # index of the residual whose branch holds this stream
    long_skip: bool = False  # only spans other streams

    @property
    def origin(self) -> int:
        """The value the stream starts from."""
        return self.adds[0].skip.root


def linked(residuals: Sequence[Residual], final: Callable[[int], int]) -> list[Stream]:
    """Return the streams that residual adds form; each goes the longest way on.

    Args:
        residuals: all residual adds of a graph, in its order.
        final: gives the residual that an absorbed one was merged into.
    """
    live = [r for r in residuals if not r.absorbed]
    followers: dict[int, list[Residual]] = {}
    for residual in live:
        previous = residual.skip.residual
        if previous is not None:
            followers.setdefault(final(previous), []).append(residual)
    length: dict[int, int] = {}
    for residual in reversed(live):
        length[residual.index] = 1 + max((length[f.index] for f in followers.get(residual.index, ())), default=0)
    used: set[int] = set()
    streams: list[Stream] = []
    for residual in live:
        if residual.index in used:
            continue
        adds, current = [residual], residual
        used.add(residual.index)
        while True:
            options = [f for f in followers.get(current.index, ()) if f.index not in used]
            outer = [f for f in options if not any(f.op.id in g.region for g in options if g is not f)]
            if not outer:
                break
            current = max(outer, key=lambda f: length[f.index])
            used.add(current.index)
            adds.append(current)
        streams.append(Stream(adds))
    _nest(streams, residuals)
    _lift(streams, final)
    return streams


def _nest(streams: list[Stream], residuals: Sequence[Residual]) -> None:
    """Say which stream lies in the branch of which residual add."""
    owner: dict[int, int] = {}
    for residual in residuals:
        for op in residual.region:
            held = owner.get(op)
            if held is None or len(residuals[held].region) > len(residual.region):
                owner[op] = residual.index
    for stream in streams:
        inside = [owner.get(r.op.id) for r in stream.adds]
        mine = {r.index for r in stream.adds}
        outer = [o for o in inside if o is not None and o not in mine]
        if outer and len(outer) == len(inside):
            stream.nested_in = outer[0]


def _lift(streams: list[Stream], final: Callable[[int], int]) -> None:
    """Report the streams inside a long skip (image restoration, a U-Net's outer add), not the long skip."""
    holder = {r.index: s for s in streams for r in s.adds}
    inside: dict[int, list[Stream]] = {}
    for stream in streams:
        if stream.nested_in is not None and len(stream.adds) > 1:
            inside.setdefault(id(holder.get(final(stream.nested_in))), []).append(stream)
    # an outer add comes after everything in its branch: outermost first
    for stream in sorted(streams, key=lambda s: -s.adds[-1].op.id):
        held = inside.get(id(stream), [])
        if sum(len(h.adds) for h in held) >= _LONG * len(stream.adds) and len(held) >= len(stream.adds):
            stream.long_skip = True
            for nested in held:
                nested.nested_in = stream.nested_in
