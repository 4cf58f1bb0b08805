"""Norms that their own block leaves out, in eval mode and in train mode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from normwise.errors import NormwiseError, NotKnown
from normwise.graph import trace
from normwise.rendering import both

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["left_out"]

_Ends = tuple[tuple[int, ...], tuple[int, ...]]  # the values that a call takes and returns

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def left_out(facts: Facts) -> tuple[str, ...]:
    """Return the norms that no run calls although the module that holds them runs, with all else that it holds.

    Not those in whose place another runs: a wrapper keeps the original beside the copy that is trained, or chooses one
    for each domain.
    """
    called = {c.path for c in facts.graph.calls}
    holders = _Holders(facts, called)
    held = ((p, holders.of(p)) for p in facts.not_executed)
    candidates = [p for p, holder in held if holders.only_norms_idle(holder) and not holders.calls_instead(holder, p)]
    if not candidates:
        return ()
    facts.spend()
    try:
        training = trace(facts.target, evaluate=False, mode="grad")
    except NormwiseError as error:
        why = str(error)
        raise NotKnown(both(f"train mode was not seen: {why}", f"没有看到训练模式：{why}")) from error
    live = called | {c.path for c in training.graph.calls}
    read = _with_parents(n for graph in (training.graph, facts.graph) for v in graph.values if v.uses for n in v.names)
    return tuple(p for p in candidates if p not in live and p not in read)


class _Holders:
    """The modules that hold idle norms; each is looked at once, a model may have thousands of norms in one list."""

    def __init__(self, facts: Facts, called: set[str]) -> None:
        self._model, self._called, self._idle = facts.target.model, called, set(facts.not_executed)
        self._running, self._modules = _with_parents(called), facts.modules
        self._found: dict[str | None, bool] = {None: False}
        calls = facts.graph.calls
        self._ends, self._norms = defaultdict[str, list[_Ends]](list), defaultdict[_Ends, list[str]](list)
        for call in calls:
            self._ends[call.path].append((call.inputs, call.outputs))
        for call in (calls[norm.call] for norm in facts.norm_calls.norms):
            self._norms[call.inputs, call.outputs].append(call.path)

    def of(self, path: str) -> str | None:
        """Return the first module above a norm that runs, past lists and the like; None where none does."""
        holder = path.rpartition(".")[0]
        while holder and holder not in self._called and isinstance(self._model.get_submodule(holder), _CONTAINERS):
            holder = holder.rpartition(".")[0]
        return holder if holder in self._called else None

    def only_norms_idle(self, holder: str | None) -> bool:
        """Whether it holds nothing else that is idle."""
        if holder not in self._found:
            others = (
                f"{holder}.{name}" if holder else name
                for name, child in self._model.get_submodule(holder or "").named_children()
                if next(child.parameters(), None) is not None
            )
            self._found[holder] = all(o in self._idle or o in self._running for o in others)
        return self._found[holder]

    def calls_instead(self, holder: str | None, path: str) -> bool:
        """Whether it does no more than call another norm of the same parameters: both take and return the same."""

        def alike(other: str) -> bool:
            return other.startswith(f"{holder}.") and self._shapes(other) == self._shapes(path)

        return all(any(map(alike, self._norms[ends])) for ends in self._ends[holder or ""])

    def _shapes(self, path: str) -> list[torch.Size]:
        return [p.shape for p in self._modules[path].parameters()]


def _with_parents(paths: Iterable[str]) -> set[str]:
    """Return paths and everything they lie in."""
    found: set[str] = set()
    for path in paths:
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return found
