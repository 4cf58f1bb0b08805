"""Taints: which values depend on the data, on learned parameters, and are activations.

An activation is a floating-point value that came from an input through an embedding, a
linear map or a convolution, or is a floating-point input, or a constant in which a stream starts
(learned queries). Masks, positions, rotary tables and relative-position biases are data or
constants, not activations, so adding one is no residual.
"""

from __future__ import annotations

from collections.abc import Sequence

from normwise.facts import latents
from normwise.facts import vocabulary as ops
from normwise.graph import ALIAS, Graph, Op, ValueKind

__all__ = ["Flow", "through_casts"]

# ops whose output elements each come from one place
_KEEPS_APART = ops.POINTWISE | ops.VIEW | ops.OVERWRITE | ops.JOIN
_LOOKUP = frozenset({"embedding", "index", "index_select", "gather", "embedding_bag", "_embedding_bag"})


class Flow:
    """A graph with its taints, one list of booleans each, indexed by value id."""

    def __init__(self, graph: Graph, data: Sequence[bool], masks: frozenset[int] = frozenset()) -> None:
        """Taint a graph.

        Args:
            graph: the traced program.
            data: by value, whether it depends on an input of the model.
            masks: inputs that hold only zeros, ones or large negative numbers.
        """
        self.graph = graph
        self.data = list(data)
        self.learned = [v.kind is ValueKind.PARAM for v in graph.values]
        self.act = [
            v.kind is ValueKind.INPUT and v.floating and len(v.shape) >= 2 and v.id not in masks for v in graph.values
        ]
        self._origins: frozenset[int] = frozenset()
        for op in graph.ops:
            self._taint(op)
        self._origins = latents.origins(graph, self.act)
        for value in self._origins:
            self.act[value] = True
        for op in graph.ops if self._origins else ():
            self._taint(op)

    def _taint(self, op: Op) -> None:
        learned = any(self.learned[i] for i in op.inputs)
        act = self._makes_activation(op)
        for out in op.outputs:
            self.learned[out] = learned
            self.act[out] = (act and self.graph.values[out].floating) or out in self._origins

    def _makes_activation(self, op: Op) -> bool:
        name = op.short
        if name in ops.NOT_ACTIVATION:
            return False
        if any(self.act[i] for i in op.inputs):
            return True
        data = [i for i in op.inputs if self.data[i]]
        learned = [i for i in op.inputs if self.learned[i] and not self.data[i]]
        if not data or not learned:
            return False
        if name in _LOOKUP:
            return True
        return name in (ops.LINEAR | ops.MATMUL | ops.CONV) and any(self.graph.values[i].floating for i in data)

    def acts(self, op: Op) -> list[int]:
        """Return the activations among an op's inputs, without repeats."""
        return [i for i in dict.fromkeys(op.inputs) if self.act[i]]

    def mixes(self, op: Op) -> bool:
        """Whether an op lets one element of its output depend on several elements of its input."""
        name = op.short
        if op.name == ALIAS:
            return False
        return name not in _KEEPS_APART

    def casts_of(self, value: int) -> list[Op]:
        """Return the casts applied to a value, those without effect included."""
        readers = (self.graph.ops[use] for use in self.graph.values[value].uses)
        return [op for op in readers if op.short in ops.RECAST]


def through_casts(flow: Flow, value: int) -> int:
    """Return the value before any casts and copies."""
    while (op := flow.graph.producer(value)) is not None and op.short in ops.RECAST | {"contiguous", "clone"}:
        value = op.inputs[0]
    return value
