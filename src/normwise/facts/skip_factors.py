"""Constant and learned factors that reach the skip of a residual add and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from normwise.facts import vocabulary as ops
from normwise.facts.chains import Residual
from normwise.graph import Graph, Op, ValueKind

if TYPE_CHECKING:
    import torch

    from normwise.facts.facts import Facts

__all__ = ["SkipFactor", "skip_factor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipFactor:
    """A factor on the skip alone: the branch reads the stream from before it."""

    size: float  # its median magnitude over the channels
    before: int  # the value of the stream that it scales
    learned: bool


def skip_factor(facts: Facts, add: Residual) -> SkipFactor | None:
    """Return the factor on the skip of an add, where only the skip has one; None elsewhere.

    A gate computed from the data is none, nor is a factor of the stream itself, which the branch reads as well.
    """
    if add.branch_scale != 1.0 or any(op.short in ops.MUL | ops.DIV for op in _end_of_branch(facts, add)):
        return None
    graph = facts.graph
    for value in add.skip.values:
        op = graph.producer(value)
        if op is None or value == add.skip.root:
            return None
        found = _factor(facts, op)
        if found is None:
            continue
        acts = facts.flow.acts(op)
        size, learned = found
        # consumed once, and what it is made from more than once: the fork of the branch lies before it
        alone = len(list(graph.consumers(value))) == 1 and len(list(graph.consumers(acts[0]))) > 1
        return SkipFactor(size=size, before=acts[0], learned=learned) if alone else None
    return None


def _end_of_branch(facts: Facts, add: Residual) -> list[Op]:
    """Return the ops that neither mix nor normalize at the end of the branch: where a scale of its own would stand."""
    graph, found = facts.graph, list[Op]()
    for branch in add.branches:
        value = branch
        while (op := graph.producer(value)) is not None and len(facts.flow.acts(op)) == 1:
            if op.short not in ops.POINTWISE | ops.VIEW | ops.DROPOUT:
                break
            found.append(op)
            value = facts.flow.acts(op)[0]
    return found


def _factor(facts: Facts, op: Op) -> tuple[float, bool] | None:
    """Return the size of what an op multiplies its one activation by, and whether it is learned."""
    flow, graph = facts.flow, facts.graph
    if op.short not in ops.MUL or len(flow.acts(op)) != 1:
        return None
    for argument in op.args:
        if isinstance(argument, (int, float)) and not isinstance(argument, bool):
            return abs(float(argument)), False
    others = [i for i in op.inputs if not flow.act[i]]
    if len(others) != 1 or flow.data[others[0]]:
        return None
    scalar = graph.values[others[0]].scalar
    if not flow.learned[others[0]]:
        return None if not isinstance(scalar, (int, float)) else (abs(float(scalar)), False)
    parameter = _parameter(facts, graph, others[0])
    return None if parameter is None else (float(parameter.detach().double().abs().median()), True)


def _parameter(facts: Facts, graph: Graph, value: int) -> torch.Tensor | None:
    """Return the parameter that a value is a view or a cast of."""
    while (op := graph.producer(value)) is not None:
        if op.short not in ops.VIEW | {"contiguous", "clone"}:
            return None
        value = op.inputs[0]
    read = graph.values[value]
    if read.kind is not ValueKind.PARAM or not read.names:
        return None
    tensors = facts.parameters
    found = tensors.get(read.names[0])
    return None if found is None or found.is_meta or found.numel() == 0 else found
