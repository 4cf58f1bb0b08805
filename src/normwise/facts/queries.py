"""Which parameters make the queries of each sublayer's attention, and which of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normwise.errors import NotKnown
from normwise.facts import vocabulary as ops
from normwise.facts.attention import AttentionOperands
from normwise.facts.chains import Residual
from normwise.facts.replay import Replayer
from normwise.graph import Op, ValueKind
from normwise.rendering import both

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["QueryWeight", "query_weights"]

# a query is a few views, a rotation and a norm away from its linear map
_STEPS = 100
_PRODUCTS = frozenset({"linear", "addmm", "mm", "matmul"})  # of an input [.., in] and a matrix


@dataclass(frozen=True, slots=True)
class QueryWeight:
    """A parameter that makes queries, or the rows and columns of it that do where it makes keys and values too."""

    name: str
    part: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the part of the parameter's gradient that belongs to queries."""
        for axis, numbers in enumerate(self.part or ()):
            first, count = int(numbers[0]), len(numbers)
            if int(numbers[-1]) - first == count - 1:  # sorted and distinct: neighbours need no copy
                gradient = gradient.narrow(axis, first, count)
            else:
                gradient = gradient.index_select(axis, numbers.to(gradient.device))
        return gradient


def query_weights(facts: Facts) -> dict[int, tuple[QueryWeight, ...]]:
    """Return the weights of the queries of each residual add whose branch attends, by the id of the add's op."""
    heads = AttentionOperands(facts.flow)
    attends = {op.id for op in facts.graph.ops if heads.is_attention(op)}
    found = {}
    for add in (a for stream in facts.placed.streams for a in stream.adds):
        if inside := sorted(attends & add.region):
            weights = {
                weight.name: weight
                for op in inside
                if (query := _query(facts, facts.graph.ops[op])) is not None
                for weight in _Query(facts, add, query).weights()
            }
            found[add.op.id] = tuple(weights.values())
    return found


def _query(facts: Facts, op: Op) -> int | None:
    """Return the operand of attention, or of the product of its scores, that holds the queries: the first.

    None where they are learned, and of no use to a token.
    """
    first = op.inputs[0] if op.inputs else None
    return first if first is not None and facts.flow.act[first] else None


class _Query:
    """The way of one query back to the linear maps that made it."""

    def __init__(self, facts: Facts, add: Residual, query: int) -> None:
        self.flow, self.graph, self.norms = facts.flow, facts.graph, facts.streams.by_output
        self.replay = Replayer(facts.recording, facts.target.model, dtype=None)
        self.query, self.stream = query, set(add.skip.values)
        self.maps: list[Op] = []
        self.seen: set[int] = set()
        self.ops: set[int] = set()
        self._walk()

    def _walk(self) -> None:
        pending = [self.query]
        while pending and len(self.seen) < _STEPS:
            value = pending.pop()
            if value in self.seen or value in self.stream:
                continue
            self.seen.add(value)
            if value in self.norms:
                pending.append(self.norms[value].input)
                continue
            op = self.graph.producer(value)
            if op is None:
                continue
            if op.short in ops.LINEAR | ops.MATMUL | ops.CONV and self._weight(op) is not None:
                self.maps.append(op)
            elif not self.flow.mixes(op):
                self.ops.add(op.id)
                pending.extend(self.flow.acts(op))

    def _weight(self, op: Op) -> int | None:
        """Return the learned matrix of a map of one activation."""
        learned = [i for i in op.inputs if self.flow.learned[i] and not self.flow.act[i]]
        wide = [i for i in learned if len(self.graph.values[i].shape) > 1]
        return wide[0] if wide and len(self.flow.acts(op)) == 1 else None

    def weights(self) -> Iterator[QueryWeight]:
        """Yield the parameters, each with its part; none whose part cannot be told."""
        for op in self.maps:
            weight = self._weight(op)
            parameter = None if weight is None else self._parameter(weight)
            if weight is None or parameter is None:
                continue
            try:
                part = self._part(op, weight, parameter)
            except NotKnown:
                continue
            yield QueryWeight(self.graph.values[parameter].names[0], part)

    def _parameter(self, weight: int) -> int | None:
        """Return the parameter that a weight is a view of."""
        for _ in range(_STEPS):
            value = self.graph.values[weight]
            if value.kind is ValueKind.PARAM:
                return weight
            op = self.graph.producer(weight)
            if op is None or op.short not in ops.VIEW:
                return None
            weight = op.inputs[0]
        return None

    def _part(self, op: Op, weight: int, parameter: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the rows and columns of a parameter whose products the query is made of; None for all of it.

        Raises:
            NotKnown: a part of it is, and which one cannot be told.
        """
        values = self.graph.values
        whole, shape, made = values[parameter].shape, values[weight].shape, op.outputs[0]
        features = self._features(made)
        if features is None and whole == shape:
            return None
        out = 0 if op.short == "linear" else 1  # linear reads a weight [out, in], a product x @ w one [in, out]
        behind = op.inputs.index(weight) > op.inputs.index(self.flow.acts(op)[0])
        if (
            op.short not in _PRODUCTS
            or not len(whole) == len(shape) == 2
            or not behind
            or shape[out] != values[made].shape[-1]
        ):
            raise NotKnown(both("queries share a weight in an unknown way", "查询以未知的方式共用一个权重"))
        rows = torch.arange(whole[0]).unsqueeze(1).expand(whole)
        columns = torch.arange(whole[1]).expand(whole)
        taken = [self.replay(weight, {parameter: numbers}) for numbers in (rows, columns)]
        if features is not None:
            taken = [numbers.index_select(out, features) for numbers in taken]
        # a part of a matrix is a grid: its first row and column name all of it
        first, second = (torch.cat([numbers[0], numbers[:, 0]]).unique() for numbers in taken)
        return first, second

    def _features(self, made: int) -> torch.Tensor | None:
        """Return which features of a map's output reach the query; None for all of them.

        Every element carries the number of its feature through the ops that only move elements.
        """
        values = self.graph.values
        if values[made].numel <= values[self.query].numel:
            return None
        numbers = torch.arange(values[made].shape[-1]).expand(values[made].shape)
        at, ends, pending = {made: numbers}, list[torch.Tensor](), [made]
        while pending:
            value = pending.pop()
            steps = [
                (op, out)
                for op in self.graph.consumers(value)
                if op.id in self.ops
                for out in op.outputs
                if out in self.seen
            ]
            moved = [(op, out, self._moved(op, value, out, at[value])) for op, out in steps]
            if value == self.query or not moved or any(tensor is None for _, _, tensor in moved):
                ends.append(at[value])
            for _, out, tensor in moved:
                if tensor is not None and out not in at:
                    at[out] = tensor
                    pending.append(out)
        reached = torch.zeros(values[made].shape[-1], dtype=torch.bool)
        for end in ends:
            reached[end.reshape(-1)] = True
        return reached.nonzero().flatten()

    def _moved(self, op: Op, value: int, out: int, numbers: torch.Tensor) -> torch.Tensor | None:
        """Return the numbers behind an op, None where it does more than to move elements."""
        if op.short in ops.VIEW - ops.RECAST:
            moved = self.replay(out, {value: numbers})
            return moved if moved.shape == self.graph.values[out].shape else None
        alone = len(self.flow.acts(op)) == 1 and op.short in ops.POINTWISE | ops.RECAST
        return numbers if alone and self.graph.values[out].shape == self.graph.values[value].shape else None
