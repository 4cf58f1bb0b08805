"""What an optimizer's step does to gains: their bits before and after, their gradients and their rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from normwise.errors import NotKnown
from normwise.facts.gains import Gain
from normwise.facts.trials import completed
from normwise.rendering import both

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Step", "watched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step on one gain."""

    gain: Gain
    rate: float
    with_gradient: int  # channels
    unmoved: int  # of those, the ones whose bits are the same afterwards


def watched(facts: Facts, gains: Sequence[Gain]) -> tuple[Step, ...]:
    """Run the user's training step once and watch its optimizer steps.

    Raises:
        NotKnown: there is no ``train_step``, it raised, or it takes no optimizer step.
    """
    before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    steps: list[Step] = []

    def keep(optimizer: Any, *_: Any) -> None:
        held = _rates(optimizer)
        for gain in gains:
            gradient = gain.parameter.grad
            if id(gain.parameter) in held and gradient is not None:
                before[id(gain.parameter)] = (gain.parameter.detach().clone(), gradient.detach().clone())

    def compare(optimizer: Any, *_: Any) -> None:
        rates = _rates(optimizer)
        for gain in gains:
            if (kept := before.pop(id(gain.parameter), None)) is None:
                continue
            value, gradient = kept
            moved = value != gain.parameter.detach()
            counts = gradient.isfinite() & (gradient != 0)
            steps.append(
                Step(
                    gain=gain,
                    rate=rates.get(id(gain.parameter), 0.0),
                    with_gradient=int(counts.sum()),
                    unmoved=int((counts & ~moved).sum()),
                )
            )

    handles = (register_optimizer_step_pre_hook(keep), register_optimizer_step_post_hook(compare))
    try:
        trial = facts.trials.step_with()
    finally:
        for handle in handles:
            handle.remove()
    if not completed(trial).steps:
        raise NotKnown(both("needs a train_step that steps its optimizer", "需要会执行优化器 step 的 train_step"))
    return tuple(steps)


def _rates(optimizer: Any) -> Mapping[int, float]:
    """Return the learning rate of every parameter, by identity."""
    return {id(p): float(g.get("lr", 0.0)) for g in optimizer.param_groups for p in g["params"]}
