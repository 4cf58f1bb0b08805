"""Norms that their own block leaves out, in eval mode and in train mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from normwise.errors import NormwiseError, NotKnown
from normwise.graph import trace
from normwise.rendering import both

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["left_out"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def left_out(facts: Facts) -> tuple[str, ...]:
    """Return the norms that no run calls although the module that holds them runs, with all else that it holds."""
    called = {c.path for c in facts.graph.calls}
    candidates = [p for p in facts.not_executed if _alone(facts, p, called)]
    if not candidates:
        return ()
    facts.spend()
    try:
        training = trace(facts.target, evaluate=False, mode="grad")
    except NormwiseError as error:
        why = str(error)
        raise NotKnown(both(f"train mode was not seen: {why}", f"没有看到训练模式：{why}")) from error
    live = called | {c.path for c in training.graph.calls}
    read = {name for v in training.graph.values if v.uses for name in v.names}
    read |= {name for v in facts.graph.values if v.uses for name in v.names}
    return tuple(p for p in candidates if p not in live and not any(n.startswith(f"{p}.") for n in read))


def _alone(facts: Facts, path: str, called: set[str]) -> bool:
    """Whether a norm's holder runs and holds nothing else that is idle."""
    model = facts.target.model
    holder = path.rpartition(".")[0]
    while holder and holder not in called and isinstance(model.get_submodule(holder), _CONTAINERS):
        holder = holder.rpartition(".")[0]
    if holder not in called:
        return False
    idle = set(facts.not_executed)
    others = (
        f"{holder}.{name}" if holder else name
        for name, child in model.get_submodule(holder).named_children()
        if next(child.parameters(), None) is not None
    )
    return all(o in idle or _runs(o, called) for o in others)


def _runs(path: str, called: set[str]) -> bool:
    return path in called or any(c.startswith(f"{path}.") for c in called)
