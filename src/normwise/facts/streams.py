"""Residual streams: which adds carry a stream, what their branches contain, how they chain.

An add is residual if one operand (the skip) leads back, through ops that neither mix nor
forget it, to a value from which every other operand (the branch) was computed *through at
least one mixing op*. Adds are linked by the root of their skip; an add whose skip starts
inside another's branch is nested in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from normwise.facts import vocabulary as ops
from normwise.facts.calls import NormCall
from normwise.facts.chains import Chain, Chains, Residual
from normwise.facts.flow import Flow
from normwise.facts.linking import Stream, linked
from normwise.graph import Op

__all__ = ["Residual", "Stream", "Streams", "find"]

# ops that all searches of a graph visit before each is cut short: a loop over time costs the square of its length
_VISITS, _CUT = 500_000, 200
_FUSED = frozenset({"addmm", "baddbmm", "addbmm", "addmv"})
_AFFINE = ops.ADD | ops.SUB | ops.MUL | ops.DIV | ops.DROPOUT | {"neg"}
_ADDS = ops.ADD | {"addcmul", "lerp", "sub", "subtract"}


class Streams(Chains):
    """All residual adds of a graph and the streams they form."""

    def __init__(self, flow: Flow, norms: Iterable[NormCall]) -> None:
        super().__init__(flow, norms)
        self._visits = 0
        self._holders: dict[int, list[Residual]] = {}  # absorbed residual -> those that it was merged into
        self._norm_ops = {m for norm in self.by_output.values() for m in norm.members}
        for op in self.graph.ops:
            self._consider(op)
        self.streams = linked(self.residuals, self.final)

    # -- residual adds -----------------------------------------------------------------------

    def _fused(self, op: Op) -> Residual | None:
        """addmm(x, a, b): the matmul is the end of the branch."""
        x = op.inputs[0]
        if not self.flow.act[x] or self.graph.values[x].shape != self.graph.values[op.outputs[0]].shape:
            return None
        chain, region = self.chain(x), {op.id}
        branch = [i for i in op.inputs[1:] if self.flow.act[i]]
        oldest = self.graph.values[chain.root].producer
        reached = [self.search(b, set(chain.values), oldest, region, mixed=True) for b in branch]
        if not reached or not all(reached):
            return None
        return Residual(-1, op, op.outputs[0], chain, branch, region)

    def _consider(self, op: Op) -> None:
        if op.short in _FUSED and op.outputs and len(op.inputs) >= 3 and (found := self._fused(op)) is not None:
            self._add(found)
            return
        if (
            (op.short not in _ADDS and not self._sums_a_stack(op))
            or not op.outputs
            or self.norm_at(op.outputs[0]) is not None
            or self.filters(op)
        ):
            return
        shape = self.graph.values[op.outputs[0]].shape
        operands = [a for a in self._operands(op) if self.graph.values[a].shape == shape]
        if op.short == "lerp":
            operands = operands[:2]
        if len(operands) < 2 or len(shape) < 2:
            return
        found = self._residual(op, operands) or self._flattened(op, operands) or self._projected(op, operands)
        if found is not None:
            self._add(found)

    def _sums_a_stack(self, op: Op) -> bool:
        """torch.stack([x, f(x)]).sum(0) is an add."""
        stacked = self.graph.producer(op.inputs[0]) if op.short == "sum" and len(op.inputs) == 1 else None
        return (
            stacked is not None
            and stacked.short == "stack"
            and len(op.args) > 1
            and op.args[1] in (0, (0,))
            and len(stacked.args) == 1
        )

    def _operands(self, op: Op) -> list[int]:
        stacked = self.graph.producer(op.inputs[0]) if op.short == "sum" else None
        return self.flow.acts(stacked) if stacked is not None else self.flow.acts(op)

    def _add(self, found: Residual) -> None:
        found.index = len(self.residuals)
        self.residuals.append(found)
        self.made_by[found.out] = found
        for index in found.absorbs:
            self.residuals[index].absorbed = True
            self._holders.setdefault(index, []).append(found)

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
        return chain.residual is not None and not set(self.chain(earlier).values).isdisjoint(
            self._lineage(value, depth=10**6)
        )

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
            tried = Chain(
                [*tried.values, *inner.skip.values],
                list(inner.skip.norms),
                tried.scales + inner.skip.scales,
                inner.skip.root,
                inner.skip.residual,
                tried.ops + inner.skip.ops,
            )
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
        """Return the ops between the skip and the branch, if every operand came from the skip through a mixing op."""
        targets = set(chain.values)
        oldest = self.graph.values[chain.root].producer
        region: set[int] = set()
        for start in branch:
            if start in targets:
                return None
            hit = self.search(start, targets, oldest, region)
            if not hit:
                return None
        return region

    def search(self, start: int, targets: set[int], oldest: int, region: set[int], *, mixed: bool = False) -> bool:
        """Walk back from a value; whether a target was reached through a mixing op. The ops seen join ``region``."""
        seen: set[tuple[int, bool]] = set()
        pending = [(start, mixed)]
        hit = False
        visited_ops: set[int] = set()
        limit = len(self.graph.ops) * 2 + 2 if self._visits < _VISITS else _CUT
        while pending:
            if len(seen) > limit:
                return False
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
        self._visits += len(seen)
        region |= visited_ops
        return hit

    def _flattened(self, op: Op, operands: list[int]) -> Residual | None:
        """(a + b) + x, where a + b is no residual by itself and nothing else reads it."""
        flat: list[int] = []
        for operand in operands:
            flat.extend(self.addends(operand))
        if len(flat) <= len(operands):
            return None
        return self._residual(op, flat)

    def addends(self, value: int, depth: int = 4) -> Iterator[int]:
        """Yield the terms of a sum that is no residual add and that nothing else reads."""
        op = self.graph.producer(value)
        inner = value
        while op is not None and op.short in ops.CAST | ops.DROPOUT and not self._shared(inner, op):
            inner = op.inputs[0]
            op = self.graph.producer(inner)
        if (
            op is not None
            and op.short in ops.ADD
            and depth
            and inner not in self.made_by
            and inner not in self.by_output
        ):
            acts = self.flow.acts(op)
            shape = self.graph.values[inner].shape
            if (
                len(acts) == 2
                and all(self.graph.values[a].shape == shape for a in acts)
                and not self._shared(inner, op)
            ):
                for act in acts:
                    yield from self.addends(act, depth - 1)
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
            chain = Chain(
                [operands[skip], *chain.values], list(chain.norms), chain.scales, chain.root, chain.residual, chain.ops
            )
            region = self._region([operands[branch]], Chain([nearest], [], [], nearest, None))
            if region is None or not any(self.bends(self.graph.ops[o]) for o in region):
                continue  # two linear maps of one value (a low-rank adapter) are one map
            residual = self._make(op, chain, [operands[branch]], region, [])
            residual.shortcut = set(ones[nearest])
            for norm in chain.norms:  # pre-activation: one norm before both the branch and the projection
                residual.region |= norm.members | {norm.op.id}
            chain.norms.clear()
            return residual
        return None

    def bends(self, op: Op) -> bool:
        """Whether an op is a nonlinearity or a norm."""
        return op.id in self._norm_ops or (
            op.short in ops.POINTWISE and op.short not in _AFFINE and len(self.flow.acts(op)) == 1
        )

    def _convolutions_back(self, value: int) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Return, for values behind, the convolutions crossed on a straight path of conv, norm and pointwise ops."""
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        count, path = 0, ()
        current = value
        for _ in range(60):
            norm = self.norm_at(current)
            if norm is not None and current != norm.input:
                path = (*path, *norm.members)
                current = norm.input
                if count:
                    found[current] = (count, path)
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
            elif op.short in ops.MUL | ops.ADD and len(acts) == 2:  # a gate, or the embedding of a time step
                numel = self.graph.values[current].numel
                full = [a for a in acts if self.graph.values[a].numel == numel]
                acts = full[:1] if len(full) == 1 or op.short in ops.MUL else acts
            elif op.short not in ops.POINTWISE and op.short not in ops.VIEW and op.short not in ops.POOL:
                break
            if len(acts) != 1:
                break
            path = (*path, op.id)
            current = acts[0]
            if count:
                found[current] = (count, path)
        return found

    def final(self, index: int) -> int:
        """Return the residual that an absorbed one was merged into."""
        return next((r.index for r in self._holders.get(index, ()) if not r.absorbed), index)


def find(flow: Flow, norms: Iterable[NormCall]) -> Streams:
    """Return the residual streams of a graph."""
    return Streams(flow, norms)
