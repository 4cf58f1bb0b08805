"""The facts of a target in another form: in float32 where half precision would hide something, or on other inputs."""

from __future__ import annotations

import dataclasses
from itertools import chain

import torch

from normwise.facts.facts import Facts
from normwise.graph.capture import tensors_in
from normwise.targets.casting import cast
from normwise.targets.inputs import Call
from normwise.targets.target import Target

__all__ = ["exact", "with_inputs"]

_HALF = (torch.float16, torch.bfloat16)


class _Derived(Facts):
    """Facts of a target derived from another, whose passes are those of the other's check."""

    def __init__(self, facts: Facts, target: Target) -> None:
        super().__init__(target, facts.effort)
        self._original = facts

    def spend(self, *, forward: int = 1, backward: int = 0, repair: bool = False) -> None:
        self._original.spend(forward=forward, backward=backward, repair=repair)


def exact(facts: Facts) -> Facts:
    """Return the facts themselves, or those of a copy in float32 where weights or inputs are of half precision.

    Raises:
        TargetError: the model cannot be copied.
    """
    model, given = facts.target.model, (facts.target.args, dict(facts.target.kwargs))
    tensors = chain(model.parameters(), model.buffers(), tensors_in(given))
    if not any(t.dtype in _HALF for t in tensors):
        return facts
    return _Derived(facts, cast(dataclasses.replace(facts.target, dtype=torch.float32, optimizer=None)))


def with_inputs(facts: Facts, call: Call) -> Facts:
    """Return the facts of the same model on other inputs."""
    return _Derived(facts, dataclasses.replace(facts.target, args=call[0], kwargs=call[1]))
