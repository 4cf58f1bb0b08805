"""Residual streams: which adds carry a stream, what their branches contain, how they chain.

An add is residual if one operand (the skip) leads back, through ops that neither mix nor
forget it, to a value from which every other operand (the branch) was computed *through at
least one mixing op*. Adds are linked by the root of their skip; an add whose skip starts
inside another's branch is nested in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from normwise.facts import vocabulary as ops
from normwise.facts.flow import Flow
from normwise.facts.norms import NormCall
from normwise.graph import ALIAS, Op, Ref

__all__ = ["Chain", "Residual", "Stream", "Streams", "find"]

_FUSED = frozenset({"addmm", "baddbmm", "addbmm", "addmv"})
_AFFINE = ops.ADD | ops.SUB | ops.MUL | ops.DIV | ops.DROPOUT | {"neg"}
_ADDS = ops.ADD | {"addcmul", "lerp", "sub", "subtract"}


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


@dataclass(slots=True)
class Stream:
    """A chain of residual adds, oldest first."""

    adds: list[Residual]
    nested_in: int | None = None  # index of the residual whose branch holds this stream

    @property
    def origin(self) -> int:
        """The value the stream starts from."""
        return self.adds[0].skip.root


class Streams:
    """All residual adds of a graph and the streams they form."""

    def __init__(self, flow: Flow, norms: Iterable[NormCall]) -> None:
        self.flow, self.graph = flow, flow.graph
        self.by_output: dict[int, NormCall] = {}
        self.by_inner: dict[int, NormCall] = {}
        for norm in norms:
            self.by_output[norm.output] = norm
            for value in norm.inner_values - {norm.input}:
                self.by_inner.setdefault(value, norm)
        self._norm_ops = {m for norm in self.by_output.values() for m in norm.members}
        self.residuals: list[Residual] = []
        self.made_by: dict[int, Residual] = {}  # value -> the residual add that made it
        self._chains: dict[int, Chain] = {}
        for op in self.graph.ops:
            self._consider(op)
        self.streams = self._link()

    # -- transparent steps back ------------------------------------------------------------

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
        if name in ("cat", "concat", "stack", "hstack", "vstack"):
            return self._joined(op, acts)
        if not acts:
            return None
        if name in ops.VIEW or name in ops.DROPOUT:
            return (acts[0], None, 1.0)
        if name in ops.POINTWISE and len(acts) == 1:
            return acts[0], None, self._factor(op)
        if name in ops.MUL | ops.DIV and len(acts) == 2:
            return self._gated(value, acts)
        if name in ops.ADD | ops.SUB and len(acts) == 2 and value not in self.made_by:
            return self._same_source(value, acts)
        return None

    def _factor(self, op: Op) -> float:
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

    def _piece_of(self, value: int) -> int | None:
        """Walk back over views and single-activation pointwise ops to the value that was cut."""
        for _ in range(12):
            op = self.graph.producer(value)
            if op is None or value in self.made_by or value in self.by_output:
                return value
            acts = self.flow.acts(op)
            if len(acts) != 1 or (op.short not in ops.VIEW and op.short not in ops.POINTWISE and op.short not in ("cat", "stack")):
                return value
            source = acts[0]
            if self.graph.values[source].numel > self.graph.values[value].numel or op.short in ("split", "chunk", "slice", "select", "unbind"):
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

    def _gated(self, value: int, acts: list[int]) -> tuple[int, NormCall | None, float] | None:
        """x times a broadcast gate continues on x."""
        numel = self.graph.values[value].numel
        full = [a for a in acts if self.graph.values[a].numel == numel]
        return (full[0], None, 1.0) if len(full) == 1 else None

    def _same_source(self, value: int, acts: list[int]) -> tuple[int, NormCall | None, float] | None:
        """A sum of two views of one value (rotary embedding), or a re-injected origin, continues on it."""
        numel = self.graph.values[value].numel
        if any(self.graph.values[a].numel != numel for a in acts):
            full = [a for a in acts if self.graph.values[a].numel == numel]
            return (full[0], None, 1.0) if len(full) == 1 else None
        pieces = [self._pieces(a) for a in acts]
        common = pieces[0] & pieces[1]
        if common:
            return max(common), None, 1.0
        ages = [self._age_of_residual(a) for a in acts]
        if max(ages) >= 0 and ages[0] != ages[1]:  # re-injection of an earlier value beside the stream
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
            plain = op.short in ops.VIEW or op.short in ("cat", "stack") or (op.short in ops.POINTWISE and len(acts) == 1)
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

    # -- residual adds -----------------------------------------------------------------------

    def _fused(self, op: Op) -> Residual | None:
        """addmm(x, a, b): the matmul is the end of the branch."""
        x = op.inputs[0]
        if not self.flow.act[x] or self.graph.values[x].shape != self.graph.values[op.outputs[0]].shape:
            return None
        chain, region = self.chain(x), {op.id}
        branch = [i for i in op.inputs[1:] if self.flow.act[i]]
        oldest = self.graph.values[chain.root].producer
        if not branch or not all([self._search(b, set(chain.values), oldest, region, mixed=True) for b in branch]):
            return None
        return Residual(-1, op, op.outputs[0], chain, branch, region)

    def _consider(self, op: Op) -> None:
        if op.short in _FUSED and op.outputs and len(op.inputs) >= 3 and (found := self._fused(op)) is not None:
            self._add(found)
            return
        if op.short not in _ADDS or not op.outputs or self.norm_at(op.outputs[0]) is not None:
            return
        shape = self.graph.values[op.outputs[0]].shape
        operands = [a for a in self.flow.acts(op) if self.graph.values[a].shape == shape]
        if op.short == "lerp":
            operands = operands[:2]
        if len(operands) < 2 or len(shape) < 2:
            return
        found = self._residual(op, operands) or self._flattened(op, operands) or self._projected(op, operands)
        if found is not None:
            self._add(found)

    def _add(self, found: Residual) -> None:
        found.index = len(self.residuals)
        self.residuals.append(found)
        self.made_by[found.out] = found
        for index in found.absorbs:
            self.residuals[index].absorbed = True

    def _residual(self, op: Op, operands: list[int]) -> Residual | None:
        for skip in sorted(operands, key=lambda v: v):
            if op.short in ops.SUB and skip != op.inputs[0]:
                continue  # f(x) - x carries no stream
            rest = [o for o in operands if o != skip]
            if any(self._continues(self._without_skip(o, self.chain(skip)), skip) for o in rest):
                continue  # the other operand carries the stream: this one is an earlier value of it, put in again
            found = self._with_skip(op, skip, rest)
            if found is not None:
                return found
        return None

    def _continues(self, value: int, earlier: int) -> bool:
        chain = self.chain(value)
        return chain.residual is not None and not set(self.chain(earlier).values).isdisjoint(self._lineage(value, depth=10**6))

    def _with_skip(self, op: Op, skip: int, rest: list[int]) -> Residual | None:
        chain = self.chain(skip)
        absorbs: list[int] = []
        tried = chain
        for _ in range(4):
            region = self._region(rest, tried)
            if region is not None:
                return self._make(op, tried, rest, region, absorbs)
            # a parallel sum: x + attention(x) first, then + mlp(x); only if nothing else reads the inner sum
            inner = self.made_by.get(tried.root)
            if inner is None or tried.norms or any(self._shared(v, op) for v in tried.values):
                return None
            absorbs = [*absorbs, inner.index]
            tried = Chain([*tried.values, *inner.skip.values], list(inner.skip.norms), tried.scales + inner.skip.scales, inner.skip.root, inner.skip.residual, tried.ops + inner.skip.ops)
        return None

    def _shared(self, value: int, op: Op) -> bool:
        return len(list(self.graph.consumers(value))) > 1

    def _make(self, op: Op, chain: Chain, rest: list[int], region: set[int], absorbs: list[int]) -> Residual:
        branches = list(rest)
        for index in absorbs:
            branches.extend(self.residuals[index].branches)
            region = region | self.residuals[index].region
        residual = Residual(-1, op, op.outputs[0], chain, branches, region, absorbs=absorbs)
        for branch in branches:
            end = self.chain(self._without_skip(branch, chain))
            residual.branch_norms.extend(n for n in end.norms if n.op.id in region)
            for scale in end.scales:
                residual.branch_scale *= scale
            residual.ends.append(end.root)
        alpha = op.kwargs.get("alpha")
        if isinstance(alpha, (int, float)):
            if op.inputs[0] in chain.values:
                residual.branch_scale *= alpha
            else:
                residual.skip = replace(chain, scales=[*chain.scales, alpha])
        return residual

    def _without_skip(self, branch: int, skip: Chain) -> int:
        """In x + a * (f(x) - x) (interpolation, nGPT), return f(x)."""
        value = branch
        for _ in range(6):
            op = self.graph.producer(value)
            if op is None:
                return branch
            acts = self.flow.acts(op)
            if op.short in ops.SUB and len(acts) == 2 and acts[1] in skip.values:
                return acts[0]
            if len(acts) != 1 or op.short not in ops.POINTWISE | ops.VIEW:
                return branch
            value = acts[0]
        return branch

    def _region(self, branch: list[int], chain: Chain) -> set[int] | None:
        """Return the ops between the skip's values and the branch, if every operand came from them through a mixing op."""
        targets = set(chain.values)
        oldest = self.graph.values[chain.root].producer
        region: set[int] = set()
        for start in branch:
            if start in targets:
                return None
            hit = self._search(start, targets, oldest, region)
            if not hit:
                return None
        return region

    def _search(self, start: int, targets: set[int], oldest: int, region: set[int], *, mixed: bool = False) -> bool:
        seen: set[tuple[int, bool]] = set()
        pending = [(start, mixed)]
        hit = False
        visited_ops: set[int] = set()
        while pending:
            value, mixed = pending.pop()
            if value in targets:
                hit = hit or mixed
                continue
            op = self.graph.producer(value)
            if op is None or op.id < oldest or (value, mixed) in seen:
                continue
            seen.add((value, mixed))
            visited_ops.add(op.id)
            norm = self.by_output.get(value)
            if norm is not None:
                visited_ops |= norm.members | {norm.op.id}
                pending.append((norm.input, mixed))
                continue
            mixed = mixed or self.flow.mixes(op)
            pending.extend((i, mixed) for i in op.inputs if self.flow.act[i])
        region |= visited_ops
        return hit

    def _flattened(self, op: Op, operands: list[int]) -> Residual | None:
        """(a + b) + x, where a + b is no residual by itself and nothing else reads it."""
        flat: list[int] = []
        for operand in operands:
            flat.extend(self._addends(operand))
        if len(flat) <= len(operands):
            return None
        return self._residual(op, flat)

    def _addends(self, value: int, depth: int = 4) -> Iterator[int]:
        op = self.graph.producer(value)
        inner = value
        while op is not None and op.short in ops.CAST | ops.DROPOUT and not self._shared(inner, op):
            inner = op.inputs[0]
            op = self.graph.producer(inner)
        if op is not None and op.short in ops.ADD and depth and inner not in self.made_by and inner not in self.by_output:
            acts = self.flow.acts(op)
            shape = self.graph.values[inner].shape
            if len(acts) == 2 and all(self.graph.values[a].shape == shape for a in acts) and not self._shared(inner, op):
                for act in acts:
                    yield from self._addends(act, depth - 1)
                return
        yield value

    def _projected(self, op: Op, operands: list[int]) -> Residual | None:
        """A projection shortcut (ResNet): one side crosses one convolution, the other at least two, from one value."""
        if len(operands) != 2:
            return None
        ways = [self._convolutions_back(o) for o in operands]
        for skip, branch in ((0, 1), (1, 0)):
            ones = {v: path for v, (count, path) in ways[skip].items() if count == 1}
            common = [v for v in ones if v in ways[branch] and ways[branch][v][0] >= 2]
            if not common:
                continue
            nearest = max(common, key=lambda v: self.graph.values[v].producer)
            chain = self.chain(nearest)
            chain = Chain([operands[skip], *chain.values], chain.norms, chain.scales, chain.root, chain.residual, chain.ops)
            region = self._region([operands[branch]], Chain([nearest], [], [], nearest, None))
            if region is None or not any(self._bends(self.graph.ops[o]) for o in region):
                continue  # two linear maps of one value (a low-rank adapter) are one map
            residual = self._make(op, chain, [operands[branch]], region, [])
            residual.shortcut = set(ones[nearest])
            return residual
        return None

    def _bends(self, op: Op) -> bool:
        """Whether an op is a nonlinearity or a norm."""
        return op.id in self._norm_ops or (op.short in ops.POINTWISE and op.short not in _AFFINE and len(self.flow.acts(op)) == 1)

    def _convolutions_back(self, value: int) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Return, for values behind, the number of convolutions crossed on a straight path of conv, norm and pointwise ops."""
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        count, path = 0, ()
        current = value
        for _ in range(60):
            norm = self.norm_at(current)
            if norm is not None and current != norm.input:
                path = (*path, *norm.members)
                current = norm.input
                continue
            if current in self.made_by:
                found[current] = (count, path)
                break
            op = self.graph.producer(current)
            if op is None:
                break
            acts = self.flow.acts(op)
            if op.short in ops.CONV:
                count += 1
                acts = [i for i in op.inputs[:1] if self.flow.act[i]]
            elif op.short in ops.MUL and len(acts) == 2:
                numel = self.graph.values[current].numel
                acts = [a for a in acts if self.graph.values[a].numel == numel][:1]
            elif op.short not in ops.POINTWISE and op.short not in ops.VIEW and op.short not in ops.POOL:
                break
            if len(acts) != 1:
                break
            path = (*path, op.id)
            current = acts[0]
            if count:
                found[current] = (count, path)
        return found

    # -- streams -----------------------------------------------------------------------------

    def _link(self) -> list[Stream]:
        live = [r for r in self.residuals if not r.absorbed]
        followers: dict[int, list[Residual]] = {}
        for residual in live:
            previous = residual.skip.residual
            if previous is not None:
                followers.setdefault(self._final(previous), []).append(residual)
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
        self._nest(streams)
        return streams

    def _final(self, index: int) -> int:
        """Return the residual that an absorbed one was merged into."""
        for residual in self.residuals:
            if index in residual.absorbs and residual.absorbed is False:
                return residual.index
        return index

    def _nest(self, streams: list[Stream]) -> None:
        owner: dict[int, int] = {}
        for residual in self.residuals:
            for op in residual.region:
                held = owner.get(op)
                if held is None or len(self.residuals[held].region) > len(residual.region):
                    owner[op] = residual.index
        for stream in streams:
            inside = [owner.get(r.op.id) for r in stream.adds]
            mine = {r.index for r in stream.adds}
            outer = [o for o in inside if o is not None and o not in mine]
            if outer and len(outer) == len(inside):
                stream.nested_in = outer[0]


def find(flow: Flow, norms: Iterable[NormCall]) -> Streams:
    """Return the residual streams of a graph."""
    return Streams(flow, norms)
