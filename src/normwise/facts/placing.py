"""Where each norm sits on the residual streams, and what kind of stack each stream is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from normwise.facts import vocabulary as ops
from normwise.facts.attention import AttentionOperands
from normwise.facts.blocks import blocks_of
from normwise.facts.chains import Chain
from normwise.facts.flow import Flow
from normwise.facts.norms import NormCall
from normwise.facts.records import Place, Placement, Stack, StackKind
from normwise.facts.stacks import SHARE, Seat, StackReader
from normwise.facts.streams import Residual, Stream, Streams
from normwise.graph import Op
from normwise.rendering import both
from normwise.spec import Scope

__all__ = ["Placed", "place"]


@dataclass(frozen=True, slots=True)
class Placed:
    """The outcome: a seat for each norm call (by op id) and the model's summary."""

    seats: dict[int, Seat]
    placement: Placement
    streams: tuple[Stream, ...]  # the main ones, in the order of ``placement.stacks``
    layers: dict[int, int] = field(default_factory=dict)  # residual index -> block index


def place(flow: Flow, norms: tuple[NormCall, ...], streams: Streams) -> Placed:
    """Place every norm call and name every stack."""
    return _Placer(flow, norms, streams).run()


class _Placer:
    def __init__(self, flow: Flow, norms: tuple[NormCall, ...], streams: Streams) -> None:
        self.flow, self.graph, self.norms, self.all = flow, flow.graph, norms, streams
        self.main = self._main_streams()
        self.stream_of = {r.index: i for i, s in enumerate(self.main) for r in s.adds}
        for residual in streams.residuals:
            if residual.absorbed and (final := streams.final(residual.index)) in self.stream_of:
                self.stream_of[residual.index] = self.stream_of[final]
        self.seats: dict[int, Seat] = {}
        self._seated: dict[tuple[Place, int], list[NormCall]] = {}
        self.heads = AttentionOperands(flow)
        self.layers = {}
        for stream in self.main:
            self.layers.update(blocks_of(self.graph, stream))
        self._regions = [(r, r.region) for s in self.main for r in s.adds]
        self.spans = self._spans()
        # where a stream was parted at a norm, what lies behind that norm belongs to the second part
        self._starts = {
            value: i
            for i, s in enumerate(self.main)
            if s.adds[0].skip.residual in self.stream_of
            for value in s.adds[0].skip.values
            if all(self.graph.values[value].producer >= n.op.id for n in s.adds[0].skip.norms)
        }

    # -- streams worth reporting ---------------------------------------------------------

    def _main_streams(self) -> list[Stream]:
        kept = [
            s
            for s in self.all.streams
            if s.nested_in is None and not s.long_skip and (len(s.adds) > 1 or self._touched(s))
        ]
        kept = [part for s in kept for part in self._parted(s)]
        if any(len(s.adds) > 1 for s in kept):  # beside a stack, a lone add is a head or a stem
            kept = [s for s in kept if len(s.adds) > 1]
        return sorted(kept, key=lambda s: (-len(s.adds), s.adds[0].op.id))

    def _parted(self, stream: Stream) -> list[Stream]:
        """Part a stream at a norm that closes one stack before another starts (an encoder after an encoder).

        Such a norm stands on the skip, in no block of either side, in a stream whose other adds have none.
        """
        normed = [i for i, add in enumerate(stream.adds) if i and add.skip.norms]
        if not normed or len(normed) > (1 - SHARE) * len(stream.adds):
            return [stream]
        ends = [0, *normed, len(stream.adds)]
        cuts = [
            here
            for before, here, after in zip(ends, ends[1:], ends[2:], strict=False)
            if self._between(stream.adds[before:here], stream.adds[here:after])
        ]
        bounds = [0, *cuts, len(stream.adds)]
        return [Stream(stream.adds[a:b], stream.nested_in) for a, b in pairwise(bounds)]

    def _between(self, left: list[Residual], right: list[Residual]) -> bool:
        """Whether the norms between two runs of adds stand in no block of either, of which each has several."""
        around = [{c.id for c in self.graph.ancestors(n.call)} for n in right[0].skip.norms]
        for part, nearest in ((left, -1), (right, 0)):
            if len(set(blocks_of(self.graph, Stream(part)).values())) < 2:
                return False
            lines = [{c.id for c in self.graph.ancestors(a.op.call)} for a in part]
            block = lines[nearest] - set.intersection(*lines)
            if any(outer & block for outer in around):
                return False
        return True

    def _spans(self) -> dict[int, int]:
        """Return, for each add of a long skip, the last stream that it spans."""
        ends = {s.adds[-1].op.id: i for i, s in enumerate(self.main)}
        held = {
            add.index: [o for o in ends if o in add.region] for s in self.all.streams if s.long_skip for add in s.adds
        }
        return {add: ends[max(inside)] for add, inside in held.items() if inside}

    def _touched(self, stream: Stream) -> bool:
        """Whether a norm stands on a one-add stream or in its branch."""
        add = stream.adds[0]
        if add.branch_norms or add.skip.norms:
            return True
        return any(n.op.id in add.region or self.all.chain(n.input).root == add.out for n in self.norms)

    # -- norms ---------------------------------------------------------------------------

    def run(self) -> Placed:
        self._on_skips()
        self._on_branches()
        for norm in self.norms:
            if norm.op.id not in self.seats:
                self.seats[norm.op.id] = self._seat(norm)
        self._settle_tails()
        self._settle_stems()
        for seat in self.seats.values():
            if seat.add is not None and seat.layer is None:
                seat.layer = self.layers.get(self.all.final(seat.add))
        for norm in self.norms:
            seat = self.seats[norm.op.id]
            if seat.add is not None:
                self._seated.setdefault((seat.place, seat.add), []).append(norm)
        reader = StackReader(self.flow, self.all, self.heads, self.seats, self._seated, self.layers)
        stacks = tuple(reader.stack(i, s) for i, s in enumerate(self.main))
        places = Counter(seat.place for seat in self.seats.values())
        # the first stack in program order holds the embedding
        first = min(range(len(self.main)), key=lambda i: self.main[i].adds[0].op.id, default=None)
        embedded = first is not None and (stacks[first].starts_with_norm or places[Place.EMBEDDING] > 0)
        summary = Placement(
            stacks=stacks, embedding_norm=embedded, qk_norm=places[Place.QK] > 0, inner_norm=self._has_inner(stacks)
        )
        return Placed(self.seats, summary, tuple(self.main), self.layers)

    def _has_inner(self, stacks: tuple[Stack, ...]) -> bool:
        """Whether a sublayer holds a norm; a first add unlike the stack (a positional encoder) is none."""
        odd = {
            stream.adds[0].index
            for stack, stream in zip(stacks, self.main, strict=True)
            if stack.kind not in (StackKind.MIXED, stack.members[0].signature)
        }
        return any(s.place is Place.INNER and s.add not in odd for s in self.seats.values())

    def _on_skips(self) -> None:
        for index, stream in enumerate(self.main):
            for add in stream.adds:
                for norm in add.skip.norms:
                    if add is stream.adds[0] and add.skip.residual in self.stream_of:
                        seat = Seat(Place.FINAL, self.stream_of[add.skip.residual])
                    elif add.skip.residual is not None:
                        seat = Seat(Place.POST, index, self.all.final(add.skip.residual))
                    else:
                        seat = Seat(Place.STEM if self._of_convolution(norm) else Place.EMBEDDING, index)
                    self.seats.setdefault(norm.op.id, seat)
                for norm in self.norms if add.shortcut else ():
                    if norm.op.id in add.shortcut:
                        self.seats[norm.op.id] = Seat(Place.SHORTCUT, index, add.index)

    def _of_convolution(self, norm: NormCall) -> bool:
        producer = self.graph.producer(self.all.chain(norm.input).root)
        channels = norm.spec is not None and norm.spec.scope in (Scope.BATCH, Scope.GROUP, Scope.INSTANCE)
        return channels and producer is not None and producer.short in ops.CONV

    def _on_branches(self) -> None:
        for index, stream in enumerate(self.main):
            for add in stream.adds:
                for norm in add.branch_norms:
                    self.seats.setdefault(norm.op.id, Seat(Place.BRANCH, index, add.index))

    def _seat(self, norm: NormCall) -> Seat:
        chain = self.all.chain(norm.input)
        hit = self._on_stream(chain.values)
        if hit is not None:
            return self._reading(norm, *hit)
        beside = self._beside(norm, chain)
        if beside is not None:
            return beside
        held = self._held_in(norm)
        attends = self.heads.reached_from(norm.output, self.all)
        if attends:
            return Seat(attends, *held)
        if held[1] is not None and self._of_memory(norm, held[1]):
            return Seat(Place.PRE, held[0], note=both("on what the branch attends to", "在分支所注意的序列上"))
        if held[0] is not None:
            return Seat(Place.INNER, *held)
        return self._outside(norm)

    def _of_memory(self, norm: NormCall, index: int) -> bool:
        """Whether a norm makes keys and values of something else than the stream (Perceiver's inputs)."""
        skip = next(add.skip for add, _ in self._regions if add.index == index)
        oldest = self.graph.values[skip.root].producer
        if self.all.search(norm.input, set(skip.values), oldest, set(), mixed=True):
            return False
        return self.heads.projected(norm.output, self.all)

    def _beside(self, norm: NormCall, chain: Chain) -> Seat | None:
        """A norm before a sublayer that reads the stream with something added for that sublayer only (Zamba)."""
        inner = self.all.made_by.get(chain.root)
        hit = self._on_stream(inner.skip.values) if inner is not None else None
        if inner is None or hit is None:
            return None
        seat = self._reading(norm, *hit)
        around = next((add for add, _ in self._regions if add.index == seat.add), None)
        if seat.place is not Place.PRE or around is None or set(around.skip.values).isdisjoint(inner.skip.values):
            return None
        return seat

    def _on_stream(self, values: list[int]) -> tuple[int, int | None] | None:
        """Return the main stream (and the residual, None for the origin) that a chain leads back to."""
        for value in values:
            if value in self._starts:
                return self._starts[value], None
            made = self.all.made_by.get(value)
            if made is not None and made.index in self.stream_of:
                return self.stream_of[made.index], self.all.final(made.index)
        root = values[-1]
        for index, stream in enumerate(self.main):
            if root == stream.origin or root in stream.adds[0].skip.values:
                return index, None
        return None

    def _reading(self, norm: NormCall, stream: int, residual: int | None) -> Seat:
        """A norm that reads a stream: before a later sublayer, at the end, or a tap."""
        adds = self.main[stream].adds
        later = [a for a in adds if residual is None or a.index > residual]
        for add in later:
            if norm.op.id in add.region:
                return Seat(Place.PRE, stream, add.index)
        if residual is None and later:
            # read from the origin but in no branch of its stream
            return self._other_branch(norm, stream) or Seat(Place.TAP, stream)
        if residual == adds[-1].index:
            return Seat(Place.FINAL, stream, None)
        return self._other_branch(norm, stream) or Seat(Place.TAP, stream, residual)

    def _other_branch(self, norm: NormCall, stream: int) -> Seat | None:
        """A norm in the branch of another stream (cross-attention on an encoder's stream) is a pre-norm there."""
        for add, region in self._regions:
            if norm.op.id in region:
                return Seat(
                    Place.PRE if self.stream_of[add.index] == stream else Place.INNER,
                    self.stream_of[add.index],
                    add.index,
                )
        return None

    def _held_in(self, norm: NormCall) -> tuple[int | None, int | None]:
        """Return the main stream and add whose branch holds a norm, the smallest region first."""
        holding = [(len(region), add.index) for add, region in self._regions if norm.op.id in region]
        if not holding:
            return None, None
        _, add = min(holding)
        return self.stream_of[add], add

    def _outside(self, norm: NormCall) -> Seat:
        behind = self._last_stream_behind(norm.input, parameters=False)
        if behind is not None:
            return Seat(Place.FINAL, behind, note=both("after pooling or a long skip", "在池化或长跳连之后"))
        fed = self._stream_fed_by(norm.output)
        if fed is not None:
            embedding = self._from_embedding(norm.input)
            return Seat(Place.EMBEDDING if embedding else Place.STEM, fed)
        behind = self._last_stream_behind(norm.input, parameters=True)
        if behind is not None:
            return Seat(Place.HEAD, behind)
        return Seat(Place.UNKNOWN, note=None if self.main else both("no residual stream was found", "没有找到残差流"))

    def _last_stream_behind(self, value: int, *, parameters: bool) -> int | None:
        """Return the stream whose last value is reached back from a value, with or without crossing learned maps."""
        pending, seen = [value], set()
        while pending and len(seen) < 4000:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            made = self.all.made_by.get(current)
            if made is not None and made.index in self.stream_of:
                return self.stream_of[made.index]
            if made is not None and made.index in self.spans:
                return self.spans[made.index]
            op = self.graph.producer(current)
            norm = self.all.by_output.get(current)
            if norm is not None and parameters:
                pending.append(norm.input)
                continue
            if op is None or (
                not parameters and (norm is not None or self._learned(op) or op.short in ops.ATTENTION | ops.MATMUL)
            ):
                continue
            pending.extend(i for i in op.inputs if self.flow.act[i])
        return None

    def _learned(self, op: Op) -> bool:
        return any(self.flow.learned[i] and not self.flow.act[i] for i in op.inputs)

    def _stream_fed_by(self, value: int) -> int | None:
        """Return the first stream whose origin is computed from a value."""
        origins = {v: i for i, s in reversed(list(enumerate(self.main))) for v in (s.origin, *s.adds[0].skip.values)}
        pending, seen = [value], set()
        while pending and len(seen) < 20000:
            current = pending.pop()
            if current in origins:
                return origins[current]
            made = self.all.made_by.get(current)
            if current in seen or (made is not None and made.index in self.stream_of):
                continue
            seen.add(current)
            for op in self.graph.consumers(current):
                pending.extend(o for o in op.outputs if self.flow.act[o])
        return None

    def _from_embedding(self, value: int) -> bool:
        """Whether a value comes from table look-ups without any mixing."""
        pending, seen = [value], set()
        found = False
        while pending and len(seen) < 60:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            op = self.graph.producer(current)
            if op is None or not self.flow.act[current]:
                continue
            if op.short in ("embedding", "embedding_bag"):
                found = True
                continue
            if self.flow.mixes(op):
                return False
            pending.extend(i for i in op.inputs if self.flow.act[i])
        return found

    def _settle_tails(self) -> None:
        """In a stream whose adds are followed by norms, the first norm behind the last add is the block's own."""
        for index, stream in enumerate(self.main):
            followed = {s.add for s in self.seats.values() if s.place is Place.POST and s.stack == index}
            inner = [a.index in followed for a in stream.adds[:-1]]
            tails = [n for n in self.norms if self._is_tail(n, index)]
            if not tails or (inner and sum(inner) < SHARE * len(inner) and not self._closes_blocks(stream, followed)):
                continue
            if not stream.adds[:-1] and not self._same_block(tails[0], stream.adds[-1]):
                continue
            direct = [n for n in tails if not self.all.chain(n.input).norms and self.seats[n.op.id].note is None]
            if direct:
                self.seats[direct[0].op.id] = Seat(Place.POST, index, stream.adds[-1].index)

    def _closes_blocks(self, stream: Stream, followed: set[int | None]) -> bool:
        """Whether a norm follows the last add of every block before the last one (Conformer)."""
        ends = {self.layers[a.index]: a.index for a in stream.adds}
        ends.pop(self.layers[stream.adds[-1].index])
        return bool(ends) and all(end in followed for end in ends.values())

    def _settle_stems(self) -> None:
        """What only the first, projected block reads through a norm is the stem's output, not a pre-activation."""
        for index, stream in enumerate(self.main):
            first = stream.adds[0]
            before = [s for s in self.seats.values() if s.place is Place.PRE and s.stack == index]
            if first.shortcut and len(stream.adds) > 1 and all(s.add == first.index for s in before):
                for norm in self.norms:
                    seat = self.seats[norm.op.id]
                    if seat in before and self._of_convolution(norm):
                        self.seats[norm.op.id] = Seat(Place.STEM, index)

    def _is_tail(self, norm: NormCall, stream: int) -> bool:
        seat = self.seats[norm.op.id]
        return seat.place is Place.FINAL and seat.stack == stream

    def _same_block(self, norm: NormCall, add: Residual) -> bool:
        """A stack of one add: the norm is the block's own if the same module runs both."""
        outer = {c.id for c in self.graph.ancestors(add.op.call)} - {0}
        return bool(outer & {c.id for c in self.graph.ancestors(norm.call)})
