"""What an optimizer holds, read once: anything may stand in its place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.rendering import both

__all__ = ["Group", "groups", "left_out", "mixed", "states"]


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


def left_out(model: nn.Module, optimizer: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Return the trainable parameters of some names in no group, although all matrices beside them are in one.

    Beside a parameter is what the smallest module around it holds that has a trainable matrix. A part that is missing
    as a whole (the other network of two, the base under an adapter) is trained by another optimizer, or not meant to.

    Raises:
        NotKnown: the optimizer cannot be read.
    """
    held = {id(p) for g in groups(optimizer) for p in g.params}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    absent = [n for n in names if n in parameters and parameters[n].requires_grad and id(parameters[n]) not in held]
    matrices = {n: id(p) in held for n, p in parameters.items() if p.requires_grad and p.dim() > 1}
    found = []
    for name in absent:
        around = name
        beside: list[bool] = []
        while around and not beside:
            around = around.rpartition(".")[0]
            beside = [here for n, here in matrices.items() if not around or n.startswith(f"{around}.")]
        if beside and all(beside):
            found.append(name)
    return tuple(found)


def mixed(model: nn.Module, optimizer: Any) -> bool:
    """Whether an optimizer trains vectors of a model as well: one for matrices alone has another beside it."""
    own = {id(p) for p in model.parameters()}
    return any(p.dim() == 1 and id(p) in own for g in groups(optimizer) for p in g.params)


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
