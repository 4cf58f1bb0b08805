"""How each sublayer is wired to its stream: norms, constants and learned factors, read off the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from normwise.facts import vocabulary as ops
from normwise.facts.chains import Residual
from normwise.facts.flow import Flow
from normwise.facts.norms import NormCall
from normwise.facts.records import Place
from normwise.facts.streams import Streams
from normwise.graph import Op
from normwise.spec import Gain, Gate, Wiring

__all__ = ["WiringReader"]


class WiringReader:
    """Reads the wiring of a residual add once every norm has its seat."""

    def __init__(
        self,
        flow: Flow,
        streams: Streams,
        seated: Mapping[tuple[Place, int], list[NormCall]],
    ) -> None:
        self.flow, self.graph, self.streams, self.seated = flow, flow.graph, streams, seated
        self._norm_ops = {m for norm in streams.by_output.values() for m in norm.members}

    def wiring(self, add: Residual, *, parallel: bool, shares_norm: bool) -> Wiring:
        """Return how the sublayer of an add is wired.

        A learned factor is told by its place; its ``initial`` value is not read. Of ``qkv`` only the norm on v is
        named, for norms of q and k are an option of any placement.
        """
        pre, branch, post = (self._at(place, add) for place in (Place.PRE, Place.BRANCH, Place.POST))
        return Wiring(
            before=bool(pre),
            after_branch=bool(branch),
            after_add=bool(post),
            inner=self._before_the_last_matrix(add),
            input_scale=self._input_scale(pre),
            skip_scale=prod(add.skip.scales, start=1.0),
            branch_scale=add.branch_scale,
            skip_gain=self._gain(add.skip.values),
            branch_gain=self._gain(v for end in add.branches for v in self.streams.chain(end).values),
            parallel=parallel,
            shares_norm=shares_norm,
            adds_block_input=any(
                self._adds_earlier(values)
                for values in (add.skip.values, *(self.streams.chain(norm.input).values for norm in post))
            ),
            qkv="v" if self._at(Place.V, add) else "",
        )

    def _at(self, place: Place, add: Residual) -> list[NormCall]:
        return self.seated.get((place, add.index), [])

    def _before_the_last_matrix(self, add: Residual) -> bool:
        """Whether a norm, not one that a gate belongs to, stands right before the matrix that ends each branch."""
        inner = {norm.op.id for norm in self._at(Place.INNER, add) if norm.spec is None or norm.spec.gate is Gate.NONE}
        if not inner:
            return False
        for end in add.branches:
            last = self.graph.producer(self._matrix_at(end))
            acts = [] if last is None or last.short not in ops.LINEAR | ops.MATMUL else self.flow.acts(last)
            if len(acts) != 1 or inner.isdisjoint(norm.op.id for norm in self.streams.chain(acts[0]).norms):
                return False
        return True

    def _matrix_at(self, end: int) -> int:
        """Return the value behind norms, factors and an added bias at the end of a branch."""
        value = self.streams.chain(end).root
        op = self.graph.producer(value)
        while op is not None and op.short in ops.ADD and len(self.flow.acts(op)) == 1:
            value = self.streams.chain(self.flow.acts(op)[0]).root
            op = self.graph.producer(value)
        return value

    def _input_scale(self, norms: list[NormCall]) -> float:
        """Return the constant of a norm and between it and its sublayer, if nothing else reads it and all agree."""
        found = set[float]()
        for norm in norms:
            own = 1.0 if norm.spec is None else norm.spec.factor
            readers = list(self.graph.consumers(norm.output))
            while len(readers) == 1 and readers[0].short in ops.VIEW:
                readers = list(self.graph.consumers(readers[0].outputs[0]))
            found.add(own * self.streams.factor(readers[0]) if len(readers) == 1 else own)
        return found.pop() if len(found) == 1 else 1.0

    def _gain(self, values: Iterable[int]) -> Gain | None:
        """Return the learned factor on a path, as far as it is not that of a norm."""
        for value in values:
            op = self.graph.producer(value)
            factor = None if op is None or op.id in self._norm_ops else self._learned_factor(op)
            if factor is not None:
                return Gain(vector=self.graph.values[factor].numel > 1, shared=self._is_shared(factor))
        return None

    def _learned_factor(self, op: Op) -> int | None:
        if op.short not in ops.MUL or len(self.flow.acts(op)) != 1:
            return None
        others = [i for i in op.inputs if not self.flow.act[i]]
        return (
            others[0] if len(others) == 1 and self.flow.learned[others[0]] and not self.flow.data[others[0]] else None
        )

    def _is_shared(self, factor: int) -> bool:
        """Whether a parameter is read by the factors of several sublayers."""
        return sum(self._learned_factor(op) == factor for op in self.graph.consumers(factor)) > 1

    def _adds_earlier(self, values: Iterable[int]) -> bool:
        """Whether an earlier value of the stream is added once more on a path from or to an add."""
        for value in values:
            op = self.graph.producer(value)
            if value in self.streams.made_by or op is None:
                return False
            if op.short in ops.ADD and op.id not in self._norm_ops and len(self.flow.acts(op)) == 2:
                return True
        return False
