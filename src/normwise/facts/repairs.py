"""Counterfactuals: the same batch again with the one thing changed that a finding blames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from normwise.errors import NotKnown
from normwise.facts.calls import NormCall
from normwise.facts.runs import Run
from normwise.graph import Instead
from normwise.rendering import both
from normwise.spec import Gate, Modulation, NormSpec, reference
from normwise.spec.definition import along

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["compute", "effect", "respecified"]

# a formula that is the norm's own reproduces its output up to rounding: half has 8 to 11 bits, float32 has 24
_SAME = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-9}


def effect(change: str, metric: str, before: float, after: float, **more: Any) -> dict[str, Any]:
    """Return a counterfactual for ``Finding``: what was changed, what was measured, before and after.

    A finding whose ``before`` and ``after`` are the same (up to 1 %) becomes info: it blamed the wrong thing.
    """
    return {"change": change, "metric": metric, "before": before, "after": after, **more}


def respecified(
    facts: Facts,
    calls: Iterable[NormCall],
    change: Callable[[NormSpec], NormSpec],
    wanted: Iterable[int] = (),
    *,
    weight: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Run:
    """Run the example inputs with some norms computed by a changed formula.

    Args:
        facts: of the target.
        calls: executions of norms.
        change: from the norm's spec to the one to use, such as ``lambda s: replace(s, eps=1e-5)``.
        wanted: ids of further values to keep.
        weight: makes the stored gain to use from the one it has.

    Raises:
        NotKnown: a norm's own formula does not reproduce it here, so a changed one would prove nothing.
    """
    instead: dict[int, Instead] = {}
    inputs: set[int] = set(wanted)
    for call in calls:
        if call.spec is None:
            raise NotKnown(_NO_FORMULA)
        if not _reproduced(compute(facts, call, call.spec), facts.runs.base, call):
            raise NotKnown(_NO_FORMULA)
        instead[call.output] = compute(facts, call, change(call.spec), weight=weight)
        inputs.add(call.input)
    return facts.runs.altered(instead, inputs)


def _reproduced(own: Instead, base: Run, call: NormCall) -> bool:
    expected = base.of(call.output)
    try:
        made = own(base.tensors)
    except (RuntimeError, KeyError):  # a gain laid out otherwise than the formula has it, an input that was not kept
        return False
    if made.shape != expected.shape:
        return False
    return bool((made.double() - expected.double()).norm() <= _SAME[expected.dtype] * expected.double().norm())


_NO_FORMULA = both("the norm's formula does not reproduce it here", "这里用该归一化的公式重现不了它的输出")


def compute(
    facts: Facts, call: NormCall, spec: NormSpec, *, weight: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Instead:
    """Return what computes a norm by a spec from the values that a run has kept.

    Raises:
        NotKnown: the norm takes a gate or a modulation.
    """
    if spec.gate is not Gate.NONE or spec.modulation is not Modulation.NONE:
        raise NotKnown(both("the norm is gated or modulated", "该归一化带门控或调制"))
    tensors = facts.tensors
    values = facts.traced.graph.values

    def named(value: int | None) -> torch.Tensor | None:
        return None if value is None else tensors[values[value].names[0]].detach()

    gain, bias = named(call.weight), named(call.bias)
    gain = weight(gain) if weight is not None and gain is not None else gain
    mean, variance = (None, None) if call.uses_batch else (named(call.running_mean), named(call.running_var))

    def instead(kept: Mapping[int, torch.Tensor]) -> torch.Tensor:
        x = kept[call.input]
        m, s = (None if t is None else along(spec, t, x.ndim) for t in (mean, variance))
        return reference(spec, x, gain, bias, mean=m, statistic=s).to(x)

    return instead
