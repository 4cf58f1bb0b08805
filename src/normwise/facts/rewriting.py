"""A graph in which some values stand for others, and what was only computed for those is gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from normwise.graph import Graph, Op, Ref

__all__ = ["rewritten"]


def rewritten(graph: Graph, instead: Mapping[int, int]) -> Graph:
    """Return a copy of a graph that reads ``instead[v]`` wherever it read ``v``.

    Ops and values keep their ids. An op whose results nobody reads any more has no outputs, like a cast without
    effect, and no inputs; one that nobody read before is left as it was.
    """
    return _Copy(graph, instead).graph


class _Copy:
    def __init__(self, graph: Graph, instead: Mapping[int, int]) -> None:
        self.instead = instead
        self.graph = replace(
            graph,
            values=list(graph.values),
            ops=list(graph.ops),
            calls=[replace(c, inputs=self._all(c.inputs), outputs=self._all(c.outputs)) for c in graph.calls],
            outputs=self._all(graph.outputs),
        )
        readers = {use for old in instead for use in graph.values[old].uses}
        for op in sorted(readers):
            self._reread(graph.ops[op])
        kept = {*self.graph.outputs, *(v for c in self.graph.calls for v in c.outputs)}
        pending = [graph.values[old].producer for old in instead]
        while pending:
            pending.extend(self._dropped(self.graph.ops[pending.pop()], kept))

    def _all(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.instead.get(v, v) for v in values)

    def _plain(self, item: Any) -> Any:
        if isinstance(item, Ref):
            return Ref(self.instead[item.value]) if item.value in self.instead else item
        if isinstance(item, tuple):
            return tuple(self._plain(i) for i in item)
        return item

    def _reread(self, op: Op) -> None:
        """Let an op read what stands for its inputs."""
        inputs = self._all(op.inputs)
        kwargs = {k: self._plain(v) for k, v in op.kwargs.items()}
        self.graph.ops[op.id] = replace(op, args=self._plain(op.args), kwargs=kwargs, inputs=inputs)
        for old, new in zip(op.inputs, inputs, strict=True):
            if old != new:
                self._uses(old, [u for u in self.graph.values[old].uses if u != op.id])
                self._uses(new, sorted([*self.graph.values[new].uses, op.id]))

    def _uses(self, value: int, uses: list[int]) -> None:
        self.graph.values[value] = replace(self.graph.values[value], uses=uses)

    def _dropped(self, op: Op, kept: set[int]) -> list[int]:
        """Take out an op that nobody reads, and return the ops that made its inputs."""
        values = self.graph.values
        if not op.outputs or any(o in kept or any(True for _ in self.graph.consumers(o)) for o in op.outputs):
            return []
        self.graph.ops[op.id] = replace(op, args=(), kwargs={}, inputs=(), outputs=())
        for value in set(op.inputs):
            self._uses(value, [u for u in values[value].uses if u != op.id])
        return [values[i].producer for i in op.inputs if values[i].producer >= 0]
