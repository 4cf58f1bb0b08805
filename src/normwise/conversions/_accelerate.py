"""``accelerate``: the conversion ``swap-layers`` in place, in one line, with a table of what was done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import RenderableType
from torch import nn

from normwise.conversions import swap_layers
from normwise.conversions._apply import apply_to_model
from normwise.conversions._plan import Change, Plan, Refusal
from normwise.facts.facts import Facts
from normwise.rendering.collapse import Group, collapse
from normwise.rendering.tables import Column, by_terminal, draw, pairs, plain_ascii, table, text
from normwise.targets import Target, target
from normwise.targets.target import InputsFrom

__all__ = ["Accelerated", "accelerate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerated:
    """What ``nw.accelerate`` did; printed, it is a table.

    Args:
        plan: what was applied to the model.
    """

    plan: Plan

    @property
    def replaced(self) -> tuple[Change, ...]:
        """Return the norms that were replaced."""
        return self.plan.changes

    @property
    def left(self) -> tuple[Refusal, ...]:
        """Return the norms that were left, with the reasons."""
        return self.plan.refused

    def __str__(self) -> str:
        width, color = by_terminal(None, None)
        page = draw(self._parts(width), width=width, color=color)
        return plain_ascii(page).rstrip("\n")

    def _parts(self, width: int) -> Iterator[RenderableType]:
        replaced, left = len(self.replaced), len(self.left)
        yield text(f"{replaced} norm{'s' * (replaced != 1)} replaced, {left} left", "bold")
        if self.replaced:
            groups = collapse(self.replaced, path=lambda change: change.path, key=lambda c: (c.what, c.how))
            rows = [(text(group.label), text(group.members[0].what)) for group in groups]
            yield table(
                [
                    Column(heading="replaced", cells=tuple(path for path, _ in rows)),
                    Column(heading="by", cells=tuple(what for _, what in rows)),
                ],
                width,
            )
            yield pairs([(text("how", "dim"), text(how)) for how in dict.fromkeys(c.how for c in self.replaced)])
        if self.left:
            yield pairs([(text(path), text(f"left: {why}")) for path, why in self._reasons()])
        for note in self.plan.notes:
            yield text(note, "dim")

    def _reasons(self) -> Iterator[tuple[str, str]]:
        groups: list[Group[Refusal]] = collapse(self.left, path=lambda r: r.path, key=lambda r: (r.why, r.source))
        for group in groups:
            first = group.members[0]
            at = f" ({first.source})" if first.source else ""
            yield group.label or "the model", f"{first.why}{at}" + (f"; {first.unblock}" if first.unblock else "")


def accelerate(model: nn.Module, inputs: Any = None) -> Accelerated:
    """Put normwise layers in the place of a model's norms, in place, wherever they compute the same.

    This is the conversion ``swap-layers``: tensors and their names stay, so optimizers and checkpoints do, and
    ``normwise.conversions.swap_layers.restore(model)`` undoes it. ``print`` the result for a table of what was
    replaced by what, and of what was left and why.

    Args:
        model: changed in place; one inside torch.compile or DataParallel, too.
        inputs: one call's inputs, as for ``nw.check``; with them norms that are no modules of their own, and those
            whose sizes only the inputs tell, are looked at, too. Not needed otherwise.

    Raises:
        TypeError: no module.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> accelerate(model).replaced[0].what
        'LayerNorm -> normwise LayerNorm'
        >>> model[1]
        LayerNorm((8,), eps=1e-05, elementwise_affine=True, bias=True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"accelerate() changes a torch.nn.Module in place, given a {type(model).__name__}; load it first"
        )
    found = Target(model=model, inputs_from=InputsFrom.NONE) if inputs is None else target(model, inputs)
    plan = swap_layers.plan(Facts(found))
    apply_to_model(plan, model)
    if plan.changes and "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # what was compiled with the old modules
    return Accelerated(plan=plan)
