"""What an optimizer holds, read once: anything may stand in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from normwise.errors import NotKnown
from normwise.rendering import both

__all__ = ["Group", "groups", "states"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group of parameters with what they are trained by."""

    params: tuple[torch.Tensor, ...]
    lr: float
    initial_lr: float  # a warm-up may start at a rate of 0, and keeps the rate that was given
    decay: float


def groups(optimizer: Any) -> tuple[Group, ...]:
    """Return the groups of an optimizer.

    Raises:
        NotKnown: it has none that can be read.
    """
    try:
        return tuple(_group(g) for g in optimizer.param_groups)
    except Exception as error:  # the optimizer is the user's
        kind = type(optimizer).__name__
        raise NotKnown(
            both(
                f"the optimizer ({kind}) has no param_groups that can be read",
                f"优化器（{kind}）没有可读取的 param_groups",
            )
        ) from error


def states(optimizer: Any) -> dict[int, dict[str, Any]]:
    """Return the state of every parameter that an optimizer has stepped, by the parameter's identity."""
    try:
        return {id(p): dict(state) for p, state in optimizer.state.items() if state}
    except Exception:  # the optimizer is the user's
        return {}


def _group(given: Any) -> Group:
    params = tuple(given["params"])
    if not all(isinstance(p, torch.Tensor) for p in params):
        raise TypeError
    return Group(
        params=params,
        lr=float(given.get("lr") or 0.0),
        initial_lr=float(given.get("initial_lr") or 0.0),
        decay=float(given.get("weight_decay") or 0.0),
    )
