"""Transparent paths: from a value back to the residual add or the origin that it carries on.

A step is transparent if it neither mixes elements nor forgets the value: views, casts, dropout,
scaling, adding a constant, joining with constants, overwriting a part, and norms, which are noted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from normwise.facts import vocabulary as ops
from normwise.facts.calls import NormCall
from normwise.facts.flow import Flow
from normwise.graph import ALIAS, Op, Ref

__all__ = ["Chain", "Chains", "Residual"]

_MEANS = frozenset({"mean", "avg_pool1d", "avg_pool2d", "avg_pool3d"})


@dataclass(slots=True)
class Chain:
    """The transparent path from a value back to its root."""

    values: list[int]  # from the start back to the root
    norms: list[NormCall]  # norms on the path, nearest to the start first
    scales: list[float]  # constant factors on the path
    root: int
    residual: int | None  # index of the residual add that made the root
    ops: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Residual:
    """One residual add."""

    index: int
    op: Op
    out: int
    skip: Chain
    branches: list[int]  # operands other than the skip
    region: set[int] = field(default_factory=set)  # ops computed between the skip and the branch's end
    shortcut: set[int] = field(default_factory=set)  # ops of a projection on the skip
    branch_scale: float = 1.0
    branch_norms: list[NormCall] = field(default_factory=list)  # at the branch's end, after its last mixing op
    absorbed: bool = False  # merged into a later add of the same parallel sum
    absorbs: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # values at which the branch ends start, behind norms and scales


class Chains:
    """The transparent paths of a graph, given the residual adds found so far."""

    def __init__(self, flow: Flow, norms: Iterable[NormCall]) -> None:
        self.flow, self.graph = flow, flow.graph
        self.by_output: dict[int, NormCall] = {}
        self.by_inner: dict[int, NormCall] = {}
        for norm in norms:
            self.by_output[norm.output] = norm
            for value in norm.inner_values - {norm.input}:
                self.by_inner.setdefault(value, norm)
        self.residuals: list[Residual] = []
        self.made_by: dict[int, Residual] = {}  # value -> the residual add that made it
        self._chains: dict[int, Chain] = {}

    def norm_at(self, value: int) -> NormCall | None:
        """Return the norm whose output, or a full-size value inside it, this is."""
        return self.by_output.get(value) or self.by_inner.get(value)

    def step(self, value: int) -> tuple[int, NormCall | None, float] | None:
        """Return the value one transparent op back, with the norm crossed and the constant factor, or None."""
        norm = self.norm_at(value)
        if norm is not None and value != norm.input:
            return norm.input, norm, 1.0
        op = self.graph.producer(value)
        if op is None:
            return None
        acts = self.flow.acts(op)
        name = op.short
        if op.name == ALIAS or name in ops.OVERWRITE:
            return self._overwritten(op, acts)
        if name in ops.JOIN:
            return self._joined(op, acts)
        if not acts:
            return None
        if name in ops.VIEW or name in ops.DROPOUT:
            return (acts[0], None, 1.0)
        if name in ops.POINTWISE and len(acts) == 1:
            return acts[0], None, self.factor(op)
        if name in ops.MUL | ops.DIV and len(acts) == 2:
            return self._gated(value, acts)
        if self.filters(op):
            return None if self._is_added(op) else (op.inputs[0], None, 1.0)
        if name in ops.ADD | ops.SUB and len(acts) == 2 and value not in self.made_by:
            return self._same_source(value, acts)
        return None

    def factor(self, op: Op) -> float:
        """Return the constant that an op multiplies its one activation by; 1 where it does not."""
        if op.short not in ops.MUL | ops.DIV:
            return 1.0
        for argument in op.args:
            number = argument if isinstance(argument, (int, float)) and not isinstance(argument, bool) else None
            if isinstance(argument, Ref) and not self.flow.act[argument.value]:
                number = self.graph.values[argument.value].scalar
                if self.flow.learned[argument.value]:
                    number = None
            if number:
                return float(number) if op.short in ops.MUL else 1.0 / float(number)
        return 1.0

    def _overwritten(self, op: Op, acts: list[int]) -> tuple[int, NormCall | None, float] | None:
        """Continue on the operand whose history holds the latest residual add, else on the one overwritten."""
        if not acts:
            return None
        if len(acts) == 1:
            return acts[0], None, 1.0
        best = max(acts, key=lambda a: (self._age_of_residual(a), -acts.index(a)))
        return best, None, 1.0

    def _joined(self, op: Op, acts: list[int]) -> tuple[int, NormCall | None, float] | None:
        """A concatenation with constants, or of pieces of one value (rotations, patch merging)."""
        if len(acts) == 1:
            return acts[0], None, 1.0
        if not acts:
            return None
        sources = {self._piece_of(a) for a in acts}
        if len(sources) == 1:
            return sources.pop(), None, 1.0
        lineages = [self._lineage(a) for a in acts]
        if set.intersection(*lineages):  # parts of one stream at different depths (a class token kept aside)
            return max(acts, key=lambda a: (self._age_of_residual(a), self.graph.values[a].numel)), None, 1.0
        return None

    def _lineage(self, value: int, depth: int = 4) -> set[int]:
        """Return the values of a stream behind a value, across the last few residual adds."""
        chain = self.chain(value)
        values = set(chain.values)
        while chain.residual is not None and depth:
            chain, depth = self.residuals[chain.residual].skip, depth - 1
            values |= set(chain.values)
        return values

    def _piece_of(self, value: int) -> int:
        """Walk back over views and single-activation pointwise ops to the value that was cut."""
        for _ in range(12):
            op = self.graph.producer(value)
            if op is None or value in self.made_by or value in self.by_output:
                return value
            acts = self.flow.acts(op)
            if len(acts) != 1 or (
                op.short not in ops.VIEW and op.short not in ops.POINTWISE and op.short not in ("cat", "stack")
            ):
                return value
            source = acts[0]
            if self.graph.values[source].numel > self.graph.values[value].numel or op.short in (
                "split",
                "chunk",
                "slice",
                "select",
                "unbind",
            ):
                return self._uncut(source)
            value = source
        return value

    def _uncut(self, value: int) -> int:
        for _ in range(12):
            op = self.graph.producer(value)
            if op is None or value in self.made_by or value in self.by_output or op.short not in ops.VIEW:
                return value
            acts = self.flow.acts(op)
            if len(acts) != 1:
                return value
            value = acts[0]
        return value

    def filters(self, op: Op) -> bool:
        """Whether an op subtracts a mean from what it was taken of (a moving average, a trend): no sublayer."""
        acts = self.flow.acts(op)
        if op.short not in ops.SUB - {"rsub"} or len(acts) != 2 or acts[0] != op.inputs[0]:
            return False
        origin, value, pooled = self._uncut(acts[0]), acts[1], False
        while value != origin:
            made = self.graph.producer(value)
            sources = {self._uncut(i) for i in self.flow.acts(made)} if made is not None else set()
            if made is None or len(sources) != 1 or value in self.made_by or value in self.by_output:
                return False
            if made.short not in ops.VIEW | ops.JOIN | _MEANS | ops.CAST or any(
                self.flow.learned[i] and not self.flow.act[i] for i in made.inputs
            ):
                return False
            pooled = pooled or made.short in _MEANS
            value = sources.pop()
        return pooled

    def _is_added(self, op: Op) -> bool:
        """Whether a result is only added to another activation, as the end of a branch is."""
        readers = list(self.graph.consumers(op.outputs[0]))
        while len(readers) == 1 and readers[0].short in ops.VIEW | ops.DROPOUT:
            readers = list(self.graph.consumers(readers[0].outputs[0]))
        return len(readers) == 1 and readers[0].short in ops.ADD and len(self.flow.acts(readers[0])) == 2

    def _gated(self, value: int, acts: list[int]) -> tuple[int, NormCall | None, float] | None:
        """x times a broadcast gate, or plus a broadcast shift, continues on x."""
        numel = self.graph.values[value].numel
        full = [a for a in acts if self.graph.values[a].numel == numel]
        return (full[0], None, 1.0) if len(full) == 1 else None

    def _same_source(self, value: int, acts: list[int]) -> tuple[int, NormCall | None, float] | None:
        """A sum of two views of one value (rotary embedding), or a re-injected origin, continues on it."""
        numel = self.graph.values[value].numel
        if any(self.graph.values[a].numel != numel for a in acts):
            return self._gated(value, acts)
        pieces = [self._pieces(a) for a in acts]
        common = pieces[0] & pieces[1]
        if common:
            return max(common), None, 1.0
        ages = [self._age_of_residual(a) for a in acts]
        added = self.graph.ops[self.graph.values[value].producer].short in ops.ADD
        # re-injection of an earlier value beside the stream; what is made of the stream less the stream is a branch
        if max(ages) >= 0 and ages[0] != ages[1] and (added or min(ages) >= 0):
            return acts[ages.index(max(ages))], None, 1.0
        return None

    def _pieces(self, value: int, depth: int = 8) -> set[int]:
        """Return the values reached back through views, joins and single-activation pointwise ops."""
        reached, pending = {value}, [(value, depth)]
        while pending:
            current, left = pending.pop()
            op = self.graph.producer(current)
            if op is None or left == 0 or current in self.made_by or current in self.by_output:
                continue
            acts = self.flow.acts(op)
            plain = (
                op.short in ops.VIEW or op.short in ("cat", "stack") or (op.short in ops.POINTWISE and len(acts) == 1)
            )
            for act in acts if plain else ():
                if act not in reached:
                    reached.add(act)
                    pending.append((act, left - 1))
        return reached

    def _age_of_residual(self, value: int) -> int:
        residual = self.chain(value).residual
        return -1 if residual is None else residual

    def chain(self, value: int) -> Chain:
        """Return the transparent path from a value back to the previous residual add or an origin."""
        if value in self._chains:
            return self._chains[value]
        chain = Chain([value], [], [], value, None)
        current = value
        while current not in self.made_by:
            back = self.step(current)
            if back is None or back[0] == current:
                break
            previous, norm, factor = back
            op = self.graph.producer(current)
            if op is not None:
                chain.ops.append(op.id)
            if norm is not None:
                chain.norms.append(norm)
            if factor != 1.0:
                chain.scales.append(factor)
            current = previous
            chain.values.append(current)
        chain.root = current
        chain.residual = self.made_by[current].index if current in self.made_by else None
        self._chains[value] = chain
        return chain
