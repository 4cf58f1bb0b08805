"""What every gate of a proof is given, and what it answers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from normwise.conversions._apply import apply_to_model, has_storage
from normwise.conversions._plan import Plan
from normwise.conversions.proof.compare import Outputs, centred, floats_in, ratios
from normwise.conversions.proof.double import double, doubled, in_double
from normwise.conversions.proof.twin import fits
from normwise.facts.facts import Facts
from normwise.facts.records import NormSite
from normwise.graph.capture import tensors_in
from normwise.graph.guard import as_found
from normwise.rendering import both
from normwise.targets import Target

__all__ = ["EXACT", "NOT_EXACT", "Gate", "Subject", "run_copy", "run_double", "said"]

EXACT = 1e-10
"""Largest relative difference in float64: right conversions make up to 6e-15, wrong ones 3.7e-2 and more."""

NOT_EXACT = both("the conversion does not claim the same function", "此转换不声称函数相同")
_SHIFTED = "hidden-states"  # the consent to outputs with another mean


@dataclass(frozen=True, slots=True)
class Gate:
    """One part of a proof.

    Args:
        name: "structure", "twin", "weights", "dtype" or "reload".
        passed: None where it was not checked.
        figures: what was measured.
        why: one sentence: what failed, what was not checked, or what the verdict rests on.
    """

    name: str
    passed: bool | None
    figures: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


@dataclass(kw_only=True)
class Subject:
    """A conversion under proof, with what several gates need."""

    plan: Plan
    target: Target
    converted: nn.Module
    replan: Callable[[Target], Plan]
    facts: Facts

    @cached_property
    def norms(self) -> tuple[NormSite, ...]:
        """The norms of the original."""
        return tuple(site.row for site in self.facts.sites)

    @cached_property
    def exact(self) -> nn.Module:
        """The original on its own weights, in float64."""
        return doubled(copy.deepcopy(self.target.model)).eval()

    @cached_property
    def reference(self) -> Outputs:
        """What the original returns in float64; the conversion is made of what it was before."""
        with as_found(self.exact):
            return run_double(self.exact, self.target.args, self.target.kwargs)

    def no_numbers(self, name: str) -> Gate | None:
        """Return the answer of a gate about numbers where there are none or too many, else None."""
        if not has_storage(self.target.model):
            return Gate(name, None, {}, both("the model holds no numbers", "模型没有数值"))
        if not fits(self.target.model):
            needed = 16 * sum(p.numel() for p in self.target.model.parameters()) / 1e9
            why = f"two copies in float64 need {needed:.1f} GB, more than half of what is free"
            return Gate(name, None, {}, both(why, f"两份 float64 副本需要 {needed:.1f} GB，超过空闲内存的一半"))
        return None

    @cached_property
    def answer(self) -> Outputs:
        """What the conversion of the original in float64 returns."""
        converted = copy.deepcopy(self.exact)
        apply_to_model(self.plan, converted)
        return run_double(converted, self.target.args, self.target.kwargs)

    def gaps(self, expected: Outputs, found: Outputs) -> dict[str, float]:
        """Return the relative difference of every output; up to a shift of each token where the user consented."""
        shifted = self.shifted(expected, found)
        return ratios(centred(expected, shifted), centred(found, shifted))

    def shifted(self, expected: Outputs, found: Outputs) -> dict[str, int]:
        """Return the outputs that are apart, where the user consented to outputs with another mean, and along which
        axis they are apart by one number."""
        if _SHIFTED not in self.plan.options.get("consent", ()):
            return {}
        apart = [name for name, ratio in ratios(expected, found).items() if EXACT < ratio < math.inf]
        return {n: axis for n in apart if (axis := _shifted_along(found[n] - expected[n])) is not None}


def _shifted_along(difference: torch.Tensor) -> int | None:
    """Return the axis along which a difference changes least; an axis of size 1 would hide anything."""

    def left(axis: int) -> float:
        return float((difference - difference.mean(axis, keepdim=True)).abs().max())

    return min((a for a in range(-1, -difference.dim() - 1, -1) if difference.shape[a] > 1), key=left, default=None)


def run_double(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outputs:
    """Return what a model computes wholly in float64, with what it put into the lists and dicts it was given."""
    given = in_double((args, dict(kwargs)))
    known = {id(tensor): tensor for tensor in tensors_in(given)}
    with double():
        found = floats_in(model(*given[0], **given[1]))
    left = [tensor for tensor in tensors_in(given) if id(tensor) not in known]
    return {**found, **floats_in({f"inputs[{i}]": tensor for i, tensor in enumerate(left)})}


def run_copy(model: nn.Module, target: Target) -> Outputs:
    """Return what a copy of a model computes wholly in float64 on the inputs of a target."""
    return run_double(doubled(copy.deepcopy(model)).eval(), target.args, target.kwargs)


def said(error: Exception) -> str:
    """Return the kind and the first words of an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
