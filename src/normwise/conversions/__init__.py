"""Conversions: changes of a model's norms with a proof that the function is the same, or a refusal with the reasons.

A conversion is one file with a docstring (its page) and ``plan(facts, **options) -> Plan``. The plan is data: it is
applied to a copy of the model, to a state dict, or to a checkpoint shard by shard.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

from normwise._parts import collect, named
from normwise.conversions import _options
from normwise.conversions import fold_affine as fold_affine
from normwise.conversions import fold_batch_norm as fold_batch_norm
from normwise.conversions import post_to_pre as post_to_pre
from normwise.conversions import rms_norm as rms_norm
from normwise.conversions import swap_layers as swap_layers
from normwise.conversions import unit_offset as unit_offset
from normwise.conversions._accelerate import Accelerated as Accelerated
from normwise.conversions._accelerate import accelerate as accelerate
from normwise.conversions._apply import apply_to_model as apply_to_model
from normwise.conversions._apply import apply_to_state as apply_to_state
from normwise.conversions._apply import has_storage
from normwise.conversions._converted import Converted as Converted
from normwise.conversions._plan import NOTHING
from normwise.conversions._plan import Change as Change
from normwise.conversions._plan import Plan as Plan
from normwise.conversions._plan import Recipe as Recipe
from normwise.conversions._plan import Refusal as Refusal
from normwise.conversions._plan import Step as Step
from normwise.conversions._targets import whole_target
from normwise.conversions.proof import Proof as Proof
from normwise.conversions.proof import prove as prove
from normwise.errors import ConversionRefused
from normwise.facts.facts import Facts
from normwise.targets import Target

__all__ = [
    "Accelerated",
    "Change",
    "Converted",
    "Plan",
    "Proof",
    "Recipe",
    "Refusal",
    "Step",
    "accelerate",
    "apply_to_model",
    "apply_to_state",
    "convert",
    "get",
    "names",
    "plan",
    "prove",
]

_APART = ("proof",)  # modules of this package that are no conversions
_CONVERSIONS = collect({k: v for k, v in globals().items() if k not in _APART}, needs=("plan",))


def names() -> tuple[str, ...]:
    """Return the names of the conversions, in alphabetical order."""
    return tuple(_CONVERSIONS)


def get(name: str) -> ModuleType:
    """Return a conversion by its name; underscores are hyphens.

    Raises:
        ValueError: no such conversion; the nearest name is given.
    """
    return named(name, _CONVERSIONS, "conversion")


def plan(name: str, model: str | nn.Module | Target, inputs: Any = None, **options: Any) -> Plan:
    """Return what a conversion would do to a model, without doing it; a model without storage will do.

    Args:
        name: of the conversion.
        model: a module, a Target, or any TARGET string.
        inputs: one call's inputs, as for ``nw.check``.
        options: of the conversion.

    Raises:
        ValueError: no such conversion, or an option it does not take.
    """
    conversion = check_options(name, options)
    return conversion.plan(Facts(whole_target(model, inputs), effort="full"), **options)


def check_options(name: str, options: Mapping[str, Any]) -> ModuleType:
    """Return a conversion that takes the options.

    Raises:
        ValueError: no such conversion, or it has no such option.
        TypeError: the value of an option is of another type.
    """
    part = get(name)
    _options.check_options(name, part, options)
    return part


def convert(name: str, model: str | nn.Module | Target, inputs: Any = None, **options: Any) -> Converted:
    """Convert a copy of a model and prove that its function is the same.

    Args:
        name: of the conversion.
        model: a module, a Target, or any TARGET string.
        inputs: one call's inputs, as for ``nw.check``.
        options: of the conversion.

    Raises:
        ConversionRefused: nothing can be converted, or the proof failed; it carries every reason.
        ValueError: no such conversion, or an option it does not take.
    """
    conversion, found = check_options(name, options), whole_target(model, inputs)
    if not has_storage(found.model) and not any(p.is_meta for p in found.model.parameters()):
        raise ConversionRefused([f"{found.name} holds no numbers (FakeTensor): plan it, or convert its checkpoint"])
    facts = Facts(found, effort="full")
    made = conversion.plan(facts, **options)
    check_changes(made)
    converted = _copied(found.model)
    apply_to_model(made, converted)
    proof = prove(made, found, converted, replan=lambda other: plan(name, other, **options), facts=facts)
    check_proof(made, proof)
    return Converted(model=converted, proof=proof, plan=made, target=found)


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # torch's first weight norm, locks, open files
        said = str(error).split(".")[0]
        hint = "torch.nn.utils.remove_weight_norm leaves a plain weight, or give the model a __deepcopy__"
        raise ConversionRefused([f"the model cannot be copied, {type(error).__name__}: {said}: {hint}"]) from error


def check_changes(plan: Plan) -> None:
    """Raise ``ConversionRefused`` with every reason where a plan changes nothing."""
    if not plan.changes:
        raise ConversionRefused([str(refusal) for refusal in plan.refused] or [NOTHING])


def check_proof(plan: Plan, proof: Proof) -> None:
    """Raise ``ConversionRefused`` where a plan claims the same function and the proof found another."""
    if plan.exact and proof.failed:
        raise ConversionRefused([f"the proof failed at {gate.name}: {gate.why}" for gate in proof.failed])
