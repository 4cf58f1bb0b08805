"""What kind of stack each residual stream is: the signatures of its adds, its wiring, its ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from normwise.facts import vocabulary as ops
from normwise.facts.attention import AttentionOperands
from normwise.facts.chains import Chain, Residual
from normwise.facts.flow import Flow
from normwise.facts.norms import NormCall
from normwise.facts.records import Place, Stack, StackKind, Sublayer
from normwise.facts.streams import Stream, Streams
from normwise.graph import Op
from normwise.spec import Wiring

__all__ = ["SHARE", "Seat", "StackReader"]

# a stack is named after a signature only if this share of its adds has it (DESIGN 5)
SHARE = 0.85


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

    def stack(self, index: int, stream: Stream) -> Stack:
        """Return what a stream is."""
        members = tuple(self._sublayer(add) for add in stream.adds)
        counts = Counter(m.signature for m in members)
        kind, count = counts.most_common(1)[0]
        if count < SHARE * len(members):
            kind = StackKind.MIXED
        final = any(s.place is Place.FINAL and s.stack == index for s in self.seats.values())
        return Stack(
            kind=kind,
            name=_name(kind, members),
            depth=len({self.layers[a.index] for a in stream.adds}),
            sublayers=len(members),
            starts_with_norm=self._starts_with_norm(stream),
            final_norm=final,
            members=members,
            width=self.graph.values[stream.adds[-1].out].shape[-1]
            if self.graph.values[stream.adds[-1].out].shape
            else None,
            mixture=tuple((str(k), c) for k, c in counts.most_common()),
        )

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
        wiring = Wiring(
            before=bool(pre),
            after_branch=bool(branch),
            after_add=bool(post),
            skip_scale=_product(add.skip.scales),
            branch_scale=add.branch_scale,
        )
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


def _name(kind: StackKind, members: tuple[Sublayer, ...]) -> str | None:
    """Name a post stack with one constant above 1 on every skip: DeepNorm (Wang et al. 2022)."""
    scales = {round(m.wiring.skip_scale, 4) for m in members}
    if kind is StackKind.POST and len(scales) == 1 and next(iter(scales)) > 1.0:
        return "deep-norm"
    return None


def _product(factors: list[float]) -> float:
    product = 1.0
    for factor in factors:
        product *= factor
    return product
