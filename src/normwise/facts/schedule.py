"""What an optimizer does with a gradient's size, and the learning rates its schedule begins with."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.facts.optimizers import groups
from normwise.rendering import both

__all__ = ["Schedule", "adaptive", "read"]

# steps of a schedule that are looked at: warm-ups are hundreds to thousands of steps long, and a longer one still
# shows as a rise from its first rate
_STEPS = 1000
# A rate that begins at half of its peak or more is no warm-up (RULES PLC005): published ones begin at 0 or a tenth.
_BEGINS = 0.5
# A gradient a hundred times larger moves a weight a hundred times further under SGD, equally far under Adam. What
# lies nearer to 1 than to 100 divides by the gradient's size; RAdam's first steps do not, which is its purpose.
_LARGER = 100.0
_ADAPTS = 10.0
_LEFT_OUT = ("params", "weight_decay", "fused", "capturable", "foreach")  # what moves no first step, or needs a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning rates as they will come: relative to the highest of the steps looked at."""

    rates: tuple[float, ...]  # of the group with the highest rate, one a step
    given: bool  # by a scheduler; else the optimizer's own rate, taken for constant

    @property
    def peak(self) -> float:
        """The highest rate."""
        return max(self.rates)

    @property
    def warms_up(self) -> bool:
        """Whether the first rate is well below the peak."""
        return self.rates[0] < _BEGINS * self.peak


def read(optimizer: torch.optim.Optimizer, scheduler: Any) -> Schedule:
    """Return the rates of the next steps, from a copy of the scheduler that is stepped alone.

    Raises:
        NotKnown: the scheduler cannot be copied or stepped by itself.
    """
    if scheduler is None:
        return Schedule(rates=(max((g.lr for g in groups(optimizer)), default=0.0),), given=False)
    try:
        twin, followed = _copied(optimizer, scheduler)
        rates = [_rate(followed)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "step of the optimizer was not called": on purpose
            for _ in range(_STEPS):
                try:
                    twin.step()
                except (ValueError, TypeError):  # OneCycleLR is over; ReduceLROnPlateau waits for a metric
                    break
                rates.append(_rate(followed))
    except (Exception, SystemExit) as error:  # the scheduler is the user's
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise NotKnown(both(f"the schedule could not be simulated ({why})", f"无法模拟学习率计划（{why}）")) from error
    if not all(map(math.isfinite, rates)):
        raise NotKnown(both("the schedule's rates are not finite", "学习率计划的取值不是有限数"))
    return Schedule(rates=tuple(rates), given=True)


def _rate(optimizer: torch.optim.Optimizer) -> float:
    return max(float(group["lr"]) for group in optimizer.param_groups)


def _copied(optimizer: torch.optim.Optimizer, scheduler: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Copy a scheduler with the optimizer it drives, but neither weights nor moments."""
    driven = getattr(scheduler, "optimizer", optimizer)
    memo: dict[int, Any] = {id(p): p for group in driven.param_groups for p in group["params"]}
    memo[id(driven.state)] = {}
    twin = copy.deepcopy(scheduler, memo)
    followed = getattr(twin, "optimizer", None)
    if followed is None or followed is driven:
        raise TypeError("it holds no optimizer of its own")
    return twin, followed


def adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the first step divides by the gradient's size: measured with a twin of the optimizer on two weights.

    Raises:
        NotKnown: the twin could not be made or did not move.
    """
    weights = [nn.Parameter(torch.zeros(4, 4, device="cpu")) for _ in range(2)]
    pattern = torch.linspace(-1, 1, 16, device="cpu").reshape(4, 4)
    try:
        takes = inspect.signature(type(optimizer)).parameters
        settings = {k: v for k, v in optimizer.defaults.items() if k in takes and k not in _LEFT_OUT}
        twin = type(optimizer)(weights, **settings)  # type: ignore[arg-type]
        for weight, size in zip(weights, (1.0, _LARGER), strict=True):
            weight.grad = pattern * size
        twin.step()
    except Exception as error:  # a wrapper, or an optimizer with arguments of its own
        raise NotKnown(both("the optimizer could not be tried", "无法试运行该优化器")) from error
    small, large = (float(w.detach().norm()) for w in weights)
    if small == 0 or large == 0:
        raise NotKnown(both("a first step of the optimizer moves nothing", "优化器的第一步没有移动任何权重"))
    return large < _ADAPTS * small
