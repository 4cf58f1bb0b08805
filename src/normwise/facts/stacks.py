"""What kind of stack each residual stream is: the signatures of its adds, its wiring, its ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from normwise.facts import vocabulary as ops
from normwise.facts.attention import AttentionOperands
from normwise.facts.chains import Chain, Residual
from normwise.facts.flow import Flow
from normwise.facts.naming import SHARE, Wired, named
from normwise.facts.norms import NormCall
from normwise.facts.records import Place, Stack, StackKind, Sublayer
from normwise.facts.streams import Stream, Streams
from normwise.facts.wirings import WiringReader
from normwise.graph import Op

__all__ = ["SHARE", "Seat", "StackReader"]


@dataclass(slots=True)
class Seat:
    """The place of one norm execution."""

    place: Place
    stack: int | None = None
    add: int | None = None  # index of the residual add it belongs to
    layer: int | None = None
    note: str | None = None


class StackReader:
    """Reads stacks off streams once every norm has its seat."""

    def __init__(
        self,
        flow: Flow,
        streams: Streams,
        heads: AttentionOperands,
        seats: Mapping[int, Seat],
        seated: Mapping[tuple[Place, int], list[NormCall]],
        layers: Mapping[int, int],
    ) -> None:
        self.flow, self.graph, self.streams, self.heads = flow, flow.graph, streams, heads
        self.seats, self.seated, self.layers = seats, seated, layers
        self.wirings = WiringReader(flow, streams, seated)

    def stack(self, index: int, stream: Stream) -> Stack:
        """Return what a stream is."""
        members = tuple(self._sublayer(add) for add in stream.adds)
        counts = Counter(m.signature for m in members)
        kind, count = counts.most_common(1)[0]
        if count < SHARE * len(members):
            kind = StackKind.MIXED
        final = any(s.place is Place.FINAL and s.stack == index for s in self.seats.values())
        depth = len({self.layers[a.index] for a in stream.adds})
        return Stack(
            kind=kind,
            name=self._name(kind, stream, members, depth),
            depth=depth,
            sublayers=len(members),
            starts_with_norm=self._starts_with_norm(stream),
            final_norm=final,
            members=members,
            width=self.graph.values[stream.adds[-1].out].shape[-1]
            if self.graph.values[stream.adds[-1].out].shape
            else None,
            mixture=tuple((str(k), c) for k, c in counts.most_common()),
        )

    def _name(self, kind: StackKind, stream: Stream, members: tuple[Sublayer, ...], depth: int) -> str | None:
        """Return the placement where it says more than the kind."""
        seen: list[Wired] = []
        attended = set[int]()
        for add, member in zip(stream.adds, members, strict=True):
            layer, what = self.layers[add.index], "mlp"
            if "attention" in member.branch:
                what = "cross" if layer in attended else "attention"
                attended.add(layer)
            seen.append(Wired(member.wiring, layer, what))
        plain = kind.replace("_", "-")
        name = named(seen, depth, plain, summed_twice=self._summed_twice(stream))
        return None if name == plain else name

    def _summed_twice(self, stream: Stream) -> bool:
        """Whether the branches are added up a second time, beside the stream (ResiDual)."""
        twice = 0
        for add in stream.adds:
            ends = {value for end in add.branches for value in self.streams.chain(end).values}
            sums = {op.id for value in ends for op in self.graph.consumers(value) if op.short in ops.ADD}
            twice += len(sums - add.region - {add.op.id}) > 0
        return twice >= SHARE * len(stream.adds)

    def _starts_with_norm(self, stream: Stream) -> bool:
        """Whether a norm stands before the first add, on each part if the stream was joined of several."""
        joined = self.graph.producer(stream.origin)
        parts = self.flow.acts(joined) if joined is not None and joined.short in ops.JOIN else []
        return self._normed(stream.adds[0].skip) or (
            bool(parts) and all(self._normed(self.streams.chain(p)) for p in parts)
        )

    def _normed(self, chain: Chain) -> bool:
        """Whether a chain starts at the output of a norm, not of an activation function."""
        for value in chain.values if chain.norms else ():
            if self.streams.norm_at(value) is not None:
                return True
            op = self.graph.producer(value)
            if op is None or (self.streams.bends(op) and op.short not in ops.OVERWRITE):
                return False
        return False

    def _sublayer(self, add: Residual) -> Sublayer:
        pre, branch, post = (self.seated.get((p, add.index), []) for p in (Place.PRE, Place.BRANCH, Place.POST))
        parts = self._parallel_parts(add)
        signature = _signature(pre, branch, post, parts)
        shares = signature is StackKind.PARALLEL_SHARED
        wiring = self.wirings.wiring(add, parallel=shares or signature is StackKind.PARALLEL, shares_norm=shares)
        paths = tuple(dict.fromkeys(self.graph.calls[n.call].path for n in (*pre, *branch, *post)))
        return Sublayer(
            path=self.graph.path(add.op),
            signature=signature,
            wiring=wiring,
            branch=self._contents(add),
            norms=paths,
            source=str(add.op.source) if add.op.source else None,
        )

    def _parallel_parts(self, add: Residual) -> int:
        """Return the number of parallel sublayers: 2 if one attends and another mixes no positions."""
        addends = list(add.branches)
        if len(addends) == 1:
            end = self.streams.chain(addends[0])
            addends = list(self.streams.addends(end.root)) if not end.norms else addends
        if len(addends) < 2:
            return 1
        attends, mixes = [], []
        for addend in addends:
            region: set[int] = set()
            oldest = self.graph.values[add.skip.root].producer
            self.streams.search(addend, set(add.skip.values), oldest, region)
            attends.append(any(self.heads.is_attention(self.graph.ops[o]) for o in region))
            mixes.append(attends[-1] or any(self._spans_positions(self.graph.ops[o]) for o in region))
        return 2 if any(attends) and not all(mixes) else 1

    def _spans_positions(self, op: Op) -> bool:
        """Whether an op is a convolution over more than one position: two mixers side by side are one sublayer."""
        return op.short in ops.CONV and any(side > 1 for side in self.graph.values[op.inputs[1]].shape[2:])

    def _contents(self, add: Residual) -> tuple[str, ...]:
        region = [self.graph.ops[o] for o in add.region]
        kinds = []
        if any(self.heads.is_attention(o) for o in region):
            kinds.append("attention")
        if any(o.short in ops.CONV for o in region):
            kinds.append("conv")
        if not kinds and any(o.short in ops.LINEAR for o in region):
            kinds.append("mlp")
        return tuple(kinds or ["mix"])


def _signature(pre: list[NormCall], branch: list[NormCall], post: list[NormCall], parts: int) -> StackKind:
    key = (bool(pre), bool(branch), bool(post))
    if parts > 1 and key == (True, False, False):
        return StackKind.PARALLEL if len(pre) > 1 else StackKind.PARALLEL_SHARED
    return {
        (True, False, False): StackKind.PRE,
        (False, False, True): StackKind.POST,
        (True, True, False): StackKind.SANDWICH,
        (False, True, False): StackKind.RES_POST,
        (False, False, False): StackKind.NONE,
    }.get(key, StackKind.OTHER)
