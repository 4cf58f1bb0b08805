"""Wrong plans made from a right one: each has one mistake that a converter may make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from normwise.conversions import Plan, Recipe, Step
from normwise.conversions._edits import CentreInput, CentreOutput, Edit, SwapNorm, Untie

__all__ = ["MISTAKES", "mutants"]

Mutant = tuple[str, Plan]


def mutants(plan: Plan) -> Iterator[Mutant]:
    """Yield every mutant of a plan with the mistake and its place, such as "a recipe dropped: h.0.mlp.weight"."""
    for mistake, make in MISTAKES.items():
        for place, mutant in make(plan):
            yield f"{mistake}: {place}", mutant


def _dropped_recipes(plan: Plan) -> Iterator[Mutant]:
    for recipe in plan.recipes:
        yield recipe.keys[0], replace(plan, recipes=tuple(r for r in plan.recipes if r is not recipe))


def _dropped_edits(plan: Plan) -> Iterator[Mutant]:
    """Drop every edit but swaps: a LayerNorm left in place still computes the same."""
    for edit in plan.edits:
        if not isinstance(edit, SwapNorm):
            yield edit.path, replace(plan, edits=tuple(e for e in plan.edits if e is not edit))


def _changed_steps(change: Callable[[Recipe, Step], Iterator[tuple[Step, ...]]]) -> Callable[[Plan], Iterator[Mutant]]:
    """Return what puts other steps in the place of each single step."""

    def make(plan: Plan) -> Iterator[Mutant]:
        for recipe in plan.recipes:
            for place, step in enumerate(recipe.steps):
                for others in change(recipe, step):
                    steps = (*recipe.steps[:place], *others, *recipe.steps[place + 1 :])
                    wrong = replace(recipe, steps=steps)
                    name = f"{recipe.keys[0]} ({step.function})"
                    yield name, replace(plan, recipes=tuple(wrong if r is recipe else r for r in plan.recipes))

    return make


def _other_dim(recipe: Recipe, step: Step) -> Iterator[tuple[Step, ...]]:
    dim = step.numbers.get("dim")
    # both axes of a depthwise weight are the channel
    if dim is not None and step.numbers.get("groups", 1) == 1 and not recipe.keys[0].endswith("bias"):
        neighbour = -2 if dim == -1 else 0 if dim == 1 else dim + 1
        yield (replace(step, numbers={**step.numbers, "dim": neighbour}),)


def _no_offset(recipe: Recipe, step: Step) -> Iterator[tuple[Step, ...]]:
    if step.numbers.get("offset"):
        yield (replace(step, numbers={**step.numbers, "offset": 0.0}),)


def _twice(recipe: Recipe, step: Step) -> Iterator[tuple[Step, ...]]:
    if step.reads or step.function == "add_number":
        yield (step, step)


def _other_sign(recipe: Recipe, step: Step) -> Iterator[tuple[Step, ...]]:
    if step.function == "add_product":
        yield (replace(step, numbers={**step.numbers, "sign": -step.numbers.get("sign", 1.0)}),)


def _other_eps_in_steps(recipe: Recipe, step: Step) -> Iterator[tuple[Step, ...]]:
    numbers = _tenfold(step.numbers)
    if numbers != step.numbers:
        yield (replace(step, numbers=numbers),)


def _tenfold(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: 10 * v if key == "eps" else _tenfold(v) for key, v in item.items()}
    return type(item)(map(_tenfold, item)) if isinstance(item, (list, tuple)) else item


def _changed_edits(change: Callable[[Edit], Edit | None]) -> Callable[[Plan], Iterator[Mutant]]:
    """Return what puts another edit in the place of each edit that can be changed so."""

    def make(plan: Plan) -> Iterator[Mutant]:
        for edit in plan.edits:
            wrong = change(edit)
            if wrong is not None:
                yield edit.path, replace(plan, edits=tuple(wrong if e is edit else e for e in plan.edits))

    return make


def _other_eps(edit: Edit) -> Edit | None:
    if isinstance(edit, SwapNorm) and edit.spec.get("eps"):
        return replace(edit, spec={**edit.spec, "eps": 10 * edit.spec["eps"]})
    return None


def _eps_outside(edit: Edit) -> Edit | None:
    if isinstance(edit, SwapNorm) and edit.spec.get("eps"):
        return replace(edit, spec={**edit.spec, "eps_inside": False})
    return None


def _other_axis(edit: Edit) -> Edit | None:
    if isinstance(edit, CentreInput | CentreOutput):
        return replace(edit, axis=-2)
    return None


def _other_offset(edit: Edit) -> Edit | None:
    if isinstance(edit, SwapNorm) and edit.spec.get("weight_offset"):
        return replace(edit, spec={**edit.spec, "weight_offset": 0.0})
    return None


def _forgotten_ties(plan: Plan) -> Iterator[Mutant]:
    """Change one of several names of a tensor alone, or all where only one may change."""
    for recipe in plan.recipes:
        if len(recipe.keys) > 1:
            first, other = recipe.keys[0], recipe.keys[-1]
            path, _, name = other.rpartition(".")
            wrong = replace(recipe, keys=(first,))
            recipes = tuple(wrong if r is recipe else r for r in plan.recipes)
            yield first, replace(plan, recipes=recipes, edits=(Untie(path=path, name=name, source=first), *plan.edits))
    for keys in plan.ties:
        for edit in plan.edits:
            if isinstance(edit, CentreOutput) and any(key.rpartition(".")[0] == edit.path for key in keys):
                # the tied table is centred for good in place of what is read from it
                centred = Recipe(keys=keys, steps=(Step(function="centre", numbers={"dim": -1}),))
                edits = tuple(e for e in plan.edits if e is not edit)
                yield edit.path, replace(plan, recipes=(*plan.recipes, centred), edits=edits)


MISTAKES: dict[str, Callable[[Plan], Iterator[Mutant]]] = {
    "a recipe dropped": _dropped_recipes,
    "an edit dropped": _dropped_edits,
    "the wrong dim": _changed_steps(_other_dim),
    "the offset ignored": _changed_steps(_no_offset),
    "a step taken twice": _changed_steps(_twice),
    "the wrong sign": _changed_steps(_other_sign),
    "eps of a step changed": _changed_steps(_other_eps_in_steps),
    "eps changed": _changed_edits(_other_eps),
    "eps outside the root": _changed_edits(_eps_outside),
    "the wrong axis": _changed_edits(_other_axis),
    "the offset of a layer ignored": _changed_edits(_other_offset),
    "a tie forgotten": _forgotten_ties,
}
