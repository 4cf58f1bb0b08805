"""Norms that their own block leaves out, in eval mode and in train mode."""

from __future__ import annotations

from collections.abc import Iterable
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
    """Return the norms that no run calls although the module that holds them runs, with all else that it holds.

    Not those in whose place another runs: a wrapper keeps the original beside the copy that is trained, or chooses one
    for each domain.
    """
    called = {c.path for c in facts.graph.calls}
    holders = _Holders(facts, called)
    candidates = [
        p
        for p in facts.not_executed
        if holders.only_norms_idle(holders.of(p)) and not _replaced(facts, p, holders.of(p))
    ]
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


def _replaced(facts: Facts, path: str, holder: str | None) -> bool:
    """Whether the holder does no more than call another norm of the same parameters: both take and return the same."""
    graph, modules = facts.graph, dict(facts.target.model.named_modules())
    norms = [graph.calls[n.call] for n in facts.norm_calls.norms]
    alike = [c for c in norms if c.path.startswith(f"{holder}.") and _shapes(modules[c.path]) == _shapes(modules[path])]
    ends = [(c.inputs, c.outputs) for c in graph.calls if c.path == holder]
    return bool(alike) and all(any((c.inputs, c.outputs) == end for c in alike) for end in ends)


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in module.parameters()]


class _Holders:
    """The modules that hold idle norms; each is looked at once, a model may have thousands of norms in one list."""

    def __init__(self, facts: Facts, called: set[str]) -> None:
        self._model, self._called, self._idle = facts.target.model, called, set(facts.not_executed)
        self._running = _with_parents(called)
        self._found: dict[str | None, bool] = {None: False}

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


def _with_parents(paths: Iterable[str]) -> set[str]:
    """Return paths and everything they lie in."""
    found: set[str] = set()
    for path in paths:
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return found
