"""What a conversion returns: the converted copy, its proof, and what was refused."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from normwise.conversions._plan import Change, Plan, Refusal
from normwise.conversions.proof import Proof

__all__ = ["Converted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A converted model with the evidence.

    Args:
        model: a copy, converted; the model given is as it was.
        proof: that the function is the same.
        plan: what was done.
    """

    model: nn.Module
    proof: Proof
    plan: Plan

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Return what was left as it is, with the reasons."""
        return self.plan.refused

    @property
    def changes(self) -> tuple[Change, ...]:
        """Return what was converted."""
        return self.plan.changes
