"""The proof of a conversion: five gates, each passed, failed or not checked, with figures.

1. structure: the converted model is mapped anew; its norms keep eps, axes and dtypes, its other ops are the same.
2. twin: a model of the same structure with every gain, bias and mean redrawn, in float64; on ordinary weights a
   forgotten step may change nothing.
3. weights: the model's own weights, in float64.
4. dtype: the rounding error in the model's own dtype is at most twice what it was.
5. reload: what was saved is loaded again, bit for bit the same (checked where something is saved).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normwise.conversions._plan import Plan
from normwise.conversions.proof import model_gates, structure_gate, twin_gate
from normwise.conversions.proof.model_gates import reload_gate as reload_gate
from normwise.conversions.proof.subject import EXACT as EXACT
from normwise.conversions.proof.subject import Gate as Gate
from normwise.conversions.proof.subject import Subject
from normwise.facts.facts import Facts
from normwise.rendering import both
from normwise.targets import Target

__all__ = ["EXACT", "Gate", "Proof", "prove", "reload_gate"]

_NOTHING_SAVED = both("nothing was saved", "尚未保存")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What shows that a conversion kept the function; ``print(proof)`` is a table, notebooks show the same.

    Args:
        conversion: its name.
        target: what was converted.
        gates: in the order of the module's docstring.
        exact: whether the conversion claims the same function; otherwise the gates hold the measured gap.
    """

    conversion: str
    target: str
    gates: tuple[Gate, ...]
    exact: bool = True

    @property
    def passed(self) -> bool:
        """Whether no gate failed, and the twin or the model's own weights were compared."""
        decisive = any(gate.passed for gate in self.gates if gate.name in ("twin", "weights"))
        return decisive and not self.failed

    @property
    def failed(self) -> tuple[Gate, ...]:
        """Return the gates that failed."""
        return tuple(gate for gate in self.gates if gate.passed is False)

    def gate(self, name: str) -> Gate:
        """Return a gate by its name.

        Raises:
            KeyError: there is no such gate.
        """
        found = {gate.name: gate for gate in self.gates}
        return found[name]

    def with_gate(self, gate: Gate) -> Proof:
        """Return the proof with another gate in the place of that name."""
        gates = tuple(gate if old.name == gate.name else old for old in self.gates)
        return dataclasses.replace(self, gates=gates)

    def to_json(self) -> dict[str, Any]:
        """Return the proof as JSON-able data."""
        return {
            "conversion": self.conversion,
            "target": self.target,
            "exact": self.exact,
            "passed": self.passed,
            "torch": torch.__version__,
            "gates": [_gate_json(gate) for gate in self.gates],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Proof:
        """Return the proof that ``to_json`` described."""
        gates = (Gate(gate["name"], gate["passed"], gate["figures"], gate["why"]) for gate in data["gates"])
        return cls(conversion=data["conversion"], target=data["target"], gates=tuple(gates), exact=data["exact"])

    def to_text(self, *, lang: str = "en", color: bool | None = None, width: int | None = None) -> str:
        """Return the proof as a table for the terminal, in English ("en") or Chinese ("zh")."""
        from normwise.conversions.proof import report

        return report.text(self, lang=lang, color=color, width=width)

    def to_markdown(self, lang: str = "en") -> str:
        """Return the proof as a Markdown table, in English ("en") or Chinese ("zh")."""
        from normwise.conversions.proof import report

        return report.markdown(self, lang=lang)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        from normwise.conversions.proof import report

        return report.html(self)


def prove(
    plan: Plan,
    target: Target,
    converted: nn.Module,
    *,
    replan: Callable[[Target], Plan],
    facts: Facts | None = None,
) -> Proof:
    """Prove that a converted model computes what the original does; both stay exactly as they are.

    Args:
        plan: what was done.
        target: the original and its inputs.
        converted: the converted copy.
        replan: makes the plan of the same conversion for another target: a small twin of a large model.
        facts: of the target, where they are known already.

    Returns:
        The proof, whether it passed or not. The reload gate is not checked: see ``reload_gate``.
    """
    subject = Subject(
        plan=plan, target=target, converted=converted, replan=replan, facts=facts or Facts(target, effort="full")
    )
    checked = [
        gate(subject) for gate in (structure_gate.structure, twin_gate.twin, model_gates.weights, model_gates.dtype)
    ]
    gates = (*checked, Gate("reload", None, {}, _NOTHING_SAVED))
    return Proof(conversion=plan.conversion, target=target.name, gates=gates, exact=plan.exact)


def _gate_json(gate: Gate) -> dict[str, Any]:
    return {"name": gate.name, "passed": gate.passed, "figures": dict(gate.figures), "why": gate.why}
