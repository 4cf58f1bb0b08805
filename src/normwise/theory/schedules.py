"""Warm-up schedules, as plain ``LambdaLR``: what the optimizer's learning rate is multiplied by at each step."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["SCHEDULES", "warm_up"]


def _constant(step: int, start: int, total: int) -> float:
    """1."""
    return 1.0


def _linear(step: int, start: int, total: int) -> float:
    """Falls to 0 at the last step."""
    return max(0.0, (total - step) / max(1, total - start))


def _cosine(step: int, start: int, total: int) -> float:
    """Falls to 0 along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - start) / max(1, total - start))))


def _inverse_sqrt(step: int, start: int, total: int) -> float:
    """sqrt(w / s), as of Vaswani et al. 2017: it needs no end."""
    return math.sqrt(max(1, start) / max(1, step))


def _wsd(step: int, start: int, total: int) -> float:
    """Stays at 1, and falls to 0 over the last tenth: warm-up, stable, decay, as of Hu et al. 2024."""
    return min(1.0, max(0.0, (total - step) / max(1, total // 10)))


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "inverse-sqrt": _inverse_sqrt,
    "linear": _linear,
    "wsd": _wsd,
}


def warm_up(optimizer: Optimizer, steps: int, total: int, *, schedule: str = "cosine") -> LambdaLR:
    """Return a schedule that rises from 1 / steps to 1 over the first ``steps`` and then goes its way.

    Args:
        optimizer: what has the learning rates.
        steps: w, of the warm-up; 0: none.
        total: all steps.
        schedule: "constant", "cosine", "inverse-sqrt", "linear" or "wsd".

    Raises:
        ValueError: an unknown schedule, or a warm-up that is longer than all steps.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> schedule = warm_up(optimizer, 2, 6, schedule="linear")
        >>> rates = []
        >>> for _ in range(6):
        ...     rates.append(round(schedule.get_last_lr()[0], 2))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    name = schedule.replace("_", "-")
    if name not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; choose from: {', '.join(SCHEDULES)}")
    if not 0 <= steps <= total or total < 1:
        raise ValueError(f"a warm-up of {steps} steps does not fit into {total} steps")
    after = SCHEDULES[name]
    return LambdaLR(optimizer, lambda step: (step + 1) / steps if step < steps else after(step, steps, total))
