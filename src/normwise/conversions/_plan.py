"""What a conversion will do, as plain data: edits of the modules, recipes for the tensors, changes, refusals.

A plan holds no tensors, so one plan serves a live model, a state dict, and a checkpoint that is converted shard by
shard. Recipes read the tensors as they are in the source, whatever other recipes make of them: their order does not
matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from normwise.conversions._edits import Edit, edit_from
from normwise.graph import Op
from normwise.rendering import both

__all__ = ["NOTHING", "Blocked", "Change", "Plan", "Recipe", "Refusal", "Step", "merged"]

NOTHING = both("the model has no norm of this kind", "模型没有这类归一化")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One function of ``_arithmetic``, applied to what the steps before it made.

    Args:
        function: its name there.
        reads: keys of further tensors it takes, as they are in the source.
        numbers: its keyword arguments.
    """

    function: str
    reads: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one tensor of the converted model is made: in float64, rounded once.

    Args:
        keys: every state-dict key of the tensor, several where it is tied.
        steps: applied in order.
        shape: of a tensor that the source does not have; it starts as zeros.
        dtype: of such a tensor, "float32".
        start: the key of the tensor it starts as, where that is another one (a copy of a tied weight).
    """

    keys: tuple[str, ...]
    steps: tuple[Step, ...]
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    start: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A row of the report: what was converted, and how.

    Args:
        path: of the module.
        what: "LayerNorm -> RMSNorm".
        how: "free: every writer of its stream is centred".
    """

    path: str
    what: str
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What stays as it is, and why.

    Args:
        path: of the module.
        why: completes "left as it is: ...".
        op: the op that stands in the way.
        source: its line, "file.py:123".
        unblock: what would change the answer.
    """

    path: str
    why: str
    op: str | None = None
    source: str | None = None
    unblock: str | None = None

    def __str__(self) -> str:
        at = f" ({self.op} at {self.source})" if self.op and self.source else f" ({self.op})" if self.op else ""
        hint = f"; {self.unblock}" if self.unblock else ""
        return f"{self.path or 'the model'}: {self.why}{at}{hint}"


class Blocked(Exception):
    """A norm that cannot be converted, found while it is looked at.

    Args:
        why: as in ``Refusal``.
        op: what stands in the way.
        unblock: what would change the answer.
    """

    def __init__(self, why: str, op: Op | None = None, unblock: str | None = None) -> None:
        super().__init__(why)
        self.why, self.op, self.unblock = why, op, unblock

    def refusal(self, path: str) -> Refusal:
        """Return the row of the report for the norm at a path."""
        op = self.op
        source = str(op.source) if op is not None and op.source is not None else None
        name = op.name if op is not None else None
        return Refusal(path=path, why=self.why, op=name, source=source, unblock=self.unblock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A conversion of one model, before anything is changed.

    Args:
        conversion: its name.
        options: as given.
        edits: changes of the modules, applied in order.
        recipes: of the tensors that change.
        changes: what is converted, for the report.
        refused: what is not.
        constants: keys of tensors that hold one number in the source, on which the plan relies.
        ties: keys of one tensor of the source, where it has several; a checkpoint may hold only one of them.
        exact: whether the function stays the same; False for conversions that only start a fine-tuning.
        notes: what the user should know, one sentence each.
    """

    conversion: str
    options: Mapping[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    changes: tuple[Change, ...] = ()
    refused: tuple[Refusal, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()
    exact: bool = True
    notes: tuple[str, ...] = ()

    @property
    def created(self) -> tuple[str, ...]:
        """Return the state-dict keys that the source does not have."""
        return tuple(key for edit in self.edits for key in edit.created)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Return the state-dict keys that only the source has."""
        return tuple(key for edit in self.edits for key in edit.dropped)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-able data."""
        return {
            "conversion": self.conversion,
            "options": dict(self.options),
            "exact": self.exact,
            "edits": [edit.to_json() for edit in self.edits],
            "recipes": [asdict(recipe) for recipe in self.recipes],
            "changes": [asdict(change) for change in self.changes],
            "refused": [asdict(refusal) for refusal in self.refused],
            "constants": dict(self.constants),
            "ties": [list(keys) for keys in self.ties],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | str) -> Plan:
        """Rebuild a plan that ``to_json`` wrote."""
        read: Mapping[str, Any] = json.loads(data) if isinstance(data, str) else data
        return cls(
            conversion=read["conversion"],
            options=read["options"],
            exact=read["exact"],
            edits=tuple(edit_from(edit) for edit in read["edits"]),
            recipes=tuple(_recipe(recipe) for recipe in read["recipes"]),
            changes=tuple(Change(**change) for change in read["changes"]),
            refused=tuple(Refusal(**refusal) for refusal in read["refused"]),
            constants=read.get("constants", {}),
            ties=tuple(tuple(keys) for keys in read["ties"]),
            notes=tuple(read["notes"]),
        )


def _recipe(read: Mapping[str, Any]) -> Recipe:
    shape = read["shape"]
    steps = tuple(
        Step(function=step["function"], reads=tuple(step["reads"]), numbers=step["numbers"]) for step in read["steps"]
    )
    shape = None if shape is None else tuple(shape)
    return Recipe(keys=tuple(read["keys"]), steps=steps, shape=shape, dtype=read["dtype"], start=read["start"])


def merged(recipes: Iterable[Recipe]) -> tuple[Recipe, ...]:
    """Return the recipes with those of the same tensor joined: the steps of the first, then those of the next.

    Raises:
        ValueError: they start from different tensors.
    """
    joined: dict[tuple[str, ...], Recipe] = {}
    for recipe in recipes:
        first = joined.get(recipe.keys)
        if first is None:
            joined[recipe.keys] = recipe
            continue
        if (first.shape, first.dtype, first.start) != (recipe.shape, recipe.dtype, recipe.start):
            raise ValueError(f"two recipes of {recipe.keys[0]} start from different tensors: join them by hand")
        joined[recipe.keys] = replace(first, steps=(*first.steps, *recipe.steps))
    return tuple(joined.values())
