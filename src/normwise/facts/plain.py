"""The traced program without its safeguards: what is neutral on ordinary data is taken out.

Careful norms hold steps that change nothing but hard rows: a factor made of the largest element that is 1 unless
that is huge, a choice that falls one way, the mean of what is centred already, a value whose gradient is taken
from elsewhere. Left in, they hide which value a norm reads and make two norms of one. Each is proved, by running
it or by its structure; what was only computed for it goes with it. Rules that feed hard rows replay the program
as it was traced.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.facts import vocabulary as ops
from normwise.facts.linear_means import centred_already
from normwise.facts.replay import Replayer, program
from normwise.facts.rewriting import rewritten
from normwise.graph import ALIAS, Op, Recording, Ref, ValueKind

__all__ = ["plain"]

_LARGEST = frozenset({"amax", "amin", "max", "min", "aminmax", "any", "all"})
_VECTOR_NORMS = frozenset({"linalg_vector_norm", "norm", "linalg_norm"})
_OF_NUMBERS = ops.POINTWISE | ops.VIEW | ops.COMPARISON | frozenset({"ldexp", "frexp", "copysign", "scalar_tensor"})
# between a value and the reduction that asks how large it is
_BEFORE_LARGEST = ops.CAST | ops.COMPARISON | frozenset({"abs", "absolute", "neg", "narrow", "slice"})
_SAME_VALUE = frozenset({"detach", "alias", "clone", "contiguous", "lift_fresh"})
# sizes of rows that every guard must leave alone; float16 norms guard from 64 on
_ORDINARY = (0.25, 1.0, 4.0)
_LONGEST = 60  # ops between a row and its guard
_SEED = 20261129


def plain(recording: Recording, model: nn.Module) -> Recording:
    """Return the recording without its neutral ops, or the same one if it has none. Ids stay what they are."""
    return _Safeguards(recording, model).removed()


class _Safeguards:
    def __init__(self, recording: Recording, model: nn.Module) -> None:
        self.recording, self.graph, self.model = recording, recording.graph, model
        self.instead: dict[int, int] = {}  # value -> the value it equals
        self.guards: dict[int, int] = {}  # value made of nothing but the largest element of a row -> that row
        self._replayer: Replayer | None = None

    def removed(self) -> Recording:
        for op in self.graph.ops:
            if len(op.outputs) == 0 or op.name == ALIAS:
                continue
            same = self._equal(op)
            if same is not None and self._fits(op.outputs[0], same):
                self.instead[op.outputs[0]] = same
            else:
                self._follow(op)
        return replace(self.recording, graph=rewritten(self.graph, self.instead)) if self.instead else self.recording

    def _fits(self, out: int, same: int) -> bool:
        made, kept = self.graph.values[out], self.graph.values[same]
        return made.shape == kept.shape and made.dtype == kept.dtype

    def at(self, value: int) -> int:
        """Return the value that stands for another one."""
        return self.instead.get(value, value)

    def _refs(self, op: Op) -> list[int]:
        return [self.at(a.value) for a in op.args if isinstance(a, Ref)]

    # -- guards: made of the largest element ---------------------------------------------------

    def _follow(self, op: Op) -> None:
        row = self._row_of(op)
        if row is not None:
            self.guards.update(dict.fromkeys(op.outputs, row))

    def _row_of(self, op: Op) -> int | None:
        """Return the row whose largest element is all that an op's result depends on."""
        if not op.inputs:
            return None
        if self._is_largest(op):
            return self._before(op.inputs[0])
        guards, values = self.guards, self.graph.values
        if op.short not in _OF_NUMBERS or not any(i in guards for i in op.inputs):
            return None
        rows = {guards[i] for i in op.inputs if i in guards}
        others = [i for i in op.inputs if i not in guards]
        fixed = all(not self.recording.data[i] and values[i].kind is not ValueKind.PARAM for i in others)
        return rows.pop() if len(rows) == 1 and fixed else None

    def _is_largest(self, op: Op) -> bool:
        if op.short in _VECTOR_NORMS:
            order = op.args[1] if len(op.args) > 1 else op.kwargs.get("ord", op.kwargs.get("p"))
            return isinstance(order, float) and abs(order) == float("inf")
        return (
            op.short in _LARGEST and sum(isinstance(a, Ref) for a in op.args) == 1 and self.recording.data[op.inputs[0]]
        )

    def _before(self, value: int) -> int:
        op = self.graph.producer(value)
        while op is not None and op.short in _BEFORE_LARGEST and op.outputs:
            value = self.at(op.inputs[0])
            op = self.graph.producer(value)
        return value

    # -- what an op is equal to --------------------------------------------------------------------

    def _equal(self, op: Op) -> int | None:
        """Return the operand that an op's result is equal to, or None."""
        if op.short in ops.MUL | ops.DIV and len(op.inputs) == 2:
            return self._times_one(op)
        if op.short == "where":
            return self._settled(op)
        if op.short in ops.ADD | ops.SUB and len(op.inputs) == 2 and op.kwargs.get("alpha", 1) == 1:
            return self._pinned(op) if op.short in ops.ADD else self._centred(op)
        return None

    def _times_one(self, op: Op) -> int | None:
        a, b = op.inputs
        if b in self.guards and a not in self.guards and self._always(b, 1.0):
            return self.at(a)
        if op.short in ops.MUL and a in self.guards and b not in self.guards and self._always(a, 1.0):
            return self.at(b)
        return None

    def _settled(self, op: Op) -> int | None:
        condition = op.args[0].value if isinstance(op.args[0], Ref) else -1
        if condition not in self.guards or len(op.args) != 3:
            return None
        for chosen, answer in ((op.args[1], 1.0), (op.args[2], 0.0)):
            if isinstance(chosen, Ref) and self._always(condition, answer):
                return self.at(chosen.value)
        return None

    def _always(self, value: int, number: float) -> bool:
        """Whether a guard is one number, exactly, on every ordinary row."""
        row = self.guards[value]
        members = self._between(row, value)
        if members is None:
            return False
        if self._replayer is None:
            self._replayer = Replayer(self.recording, self.model)
        key = program(self.graph, members, {row: "row"}, of=value)
        found = self._replayer.once((key, self.graph.values[row].shape), lambda: self._on_ordinary_rows(row, value))
        return found == number

    def _between(self, row: int, value: int) -> list[int] | None:
        pending, members = [value], set()
        while pending:
            current = pending.pop()
            producer = self.graph.values[current].producer
            if current == row or producer < 0 or producer in members:
                continue
            members.add(producer)
            pending.extend(self.graph.ops[producer].inputs)
            if len(members) > _LONGEST:
                return None
        return sorted(members)

    def _on_ordinary_rows(self, row: int, value: int) -> float | None:
        """Return the one number that a guard is on rows of every ordinary size, or None."""
        assert self._replayer is not None
        shape, seen = self.graph.values[row].shape, set()
        for size in _ORDINARY:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64) * size
            try:
                seen.update(self._replayer(value, {row: x}).double().unique().tolist())
            except NotKnown:
                return None
        return seen.pop() if len(seen) == 1 else None

    # -- values pinned to others, and second centrings ------------------------------------------------

    def _pinned(self, op: Op) -> int | None:
        """a + (b - b), and a + (b - a).detach(): the value of one, the gradient of the other."""
        refs = self._refs(op)
        for kept, difference in itertools.permutations(refs, 2):
            made = self.graph.producer(self._source(difference)[0])
            if made is None or made.short not in ops.SUB - {"rsub"} or len(self._refs(made)) != 2:
                continue
            (b, b_cut), (c, c_cut) = [self._source(r) for r in self._refs(made)]
            if b == c:
                return kept
            if c == self._source(kept)[0] and (c_cut or self._source(difference)[1]) and not b_cut:
                return b
        return None

    def _source(self, value: int) -> tuple[int, bool]:
        """Return the value that this one is a copy of, and whether gradients were cut on the way."""
        cut, op = False, self.graph.producer(value)
        while op is not None and op.short in _SAME_VALUE and op.outputs:
            cut, value = cut or op.short == "detach", self.at(op.inputs[0])
            op = self.graph.producer(value)
        return value, cut

    def _centred(self, op: Op) -> int | None:
        """c - mean(c), where c is x - mean(x): the rounding of the first mean, taken back."""
        refs = self._refs(op)
        if len(refs) != 2 or op.short == "rsub":
            return None
        return refs[0] if centred_already(self.graph, op, refs[0], refs[1], self.at) else None
