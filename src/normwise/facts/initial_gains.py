"""With what gain the matrices of the branches were drawn, relative to Xavier's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from normwise import placements
from normwise.facts import vocabulary as ops
from normwise.facts.attention import AttentionOperands
from normwise.facts.calls import parameter_of
from normwise.facts.naming import MatrixGain, has_twins, with_initial_gains
from normwise.facts.records import Place, Placement, Stack

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["matrix_gains", "named_by_gains"]


def matrix_gains(facts: Facts, index: int) -> tuple[MatrixGain, ...]:
    """Return the gains in the branches of a stack, but for the matrices that make queries and keys alone.

    There are none where the weights hold no numbers.
    """
    if facts.graph.fake:
        return ()
    heads, graph, placed = AttentionOperands(facts.flow), facts.graph, facts.placed
    tensors, adds = facts.parameters, placed.streams[index].adds
    found: dict[str, MatrixGain] = {}
    for add in adds:
        for op in (graph.ops[o] for o in add.region):
            if op.short not in ops.LINEAR | ops.MATMUL:
                continue
            if any(heads.reached_from(o, facts.streams) is Place.QK for o in op.outputs):
                continue
            learned = [i for i in op.inputs if facts.flow.learned[i] and not facts.flow.act[i]]
            for value in (parameter_of(facts.flow, i) for i in learned):
                name = graph.values[value].names[0] if value is not None and graph.values[value].names else ""
                tensor = tensors.get(name)
                spread = None if tensor is None or tensor.dim() != 2 or tensor.numel() < 2 else _spread(tensor)
                if tensor is not None and spread is not None:
                    gain = spread * (sum(tensor.shape) / 2) ** 0.5
                    found[name] = MatrixGain(placed.layers[add.index], gain, tensor.numel())
    return tuple(found.values())


def _spread(tensor: torch.Tensor) -> float | None:
    """Return the standard deviation; None where a tensor holds no numbers, or is of a kind that has none to read."""
    try:
        return float(tensor.detach().cpu().double().std())
    except Exception:  # sparse, quantized and foreign tensors: each has its own way to refuse
        return None


def named_by_gains(facts: Facts) -> Placement:
    """Return the placement, stacks named after their initial gains where these say more than the wiring."""
    found = facts.placed.placement
    stacks = tuple(
        stack if stack.name is not None else replace(stack, name=_name(facts, index, stack))
        for index, stack in enumerate(found.stacks)
    )
    return found if stacks == found.stacks else replace(found, stacks=stacks)


def _name(facts: Facts, index: int, stack: Stack) -> str | None:
    plain = stack.kind.replace("_", "-")
    if plain not in placements.names() or not has_twins(plain, stack.depth):
        return None
    name = with_initial_gains(plain, matrix_gains(facts, index), stack.depth)
    return None if name == plain else name
