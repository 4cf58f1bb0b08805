"""Switches of placement: a flag of the blocks, such as ``norm_first``, that moves their norms when it is flipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from normwise.errors import NormwiseError
from normwise.facts.records import StackKind

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Switch", "switch_of"]

_MOST = 4  # flags that are tried: each costs a pass, and blocks have one to three
_KINDS = frozenset({StackKind.PRE, StackKind.POST, StackKind.RES_POST, StackKind.SANDWICH})


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A flag that changes where the norms of a model stand."""

    name: str
    paths: tuple[str, ...]  # of the modules that have it
    value: bool  # as it is
    kinds: tuple[str, ...]  # of the stacks, as they are
    others: tuple[str, ...]  # with the flag flipped

    def flip(self, model: nn.Module) -> None:
        """Set the flag the other way, in place."""
        for path in self.paths:
            setattr(model.get_submodule(path), self.name, not self.value)


def switch_of(facts: Facts) -> Switch | None:
    """Return the flag of the blocks that changes the placement of the model's norms; None if there is none."""
    stacks = facts.placement.stacks
    if not any(s.kind in _KINDS for s in stacks):
        return None
    paths = tuple(dict.fromkeys(m.path for s in stacks for m in s.members))
    for name, value in _flags(facts.target.model, paths)[:_MOST]:
        holders = tuple(p for p in paths if name in vars(facts.target.model.get_submodule(p)))
        facts.spend()
        with _flipped(facts.target.model, holders, name, value):
            try:
                others = _kinds(type(facts)(facts.target, "read"))
            except NormwiseError:
                continue
        if others and others != _kinds(facts):
            return Switch(name=name, paths=holders, value=value, kinds=_kinds(facts), others=others)
    return None


def _kinds(facts: Facts) -> tuple[str, ...]:
    return tuple(str(s.kind) for s in facts.placement.stacks)


def _flags(model: nn.Module, paths: tuple[str, ...]) -> list[tuple[str, bool]]:
    """Return the flags that have one value in all blocks."""
    found: dict[str, set[bool]] = {}
    for path in paths:
        for name, value in vars(model.get_submodule(path)).items():
            if type(value) is bool and name != "training" and not name.startswith("_"):
                found.setdefault(name, set()).add(value)
    return [(name, values.pop()) for name, values in found.items() if len(values) == 1]


@contextmanager
def _flipped(model: nn.Module, paths: tuple[str, ...], name: str, value: bool) -> Iterator[None]:
    modules = [model.get_submodule(path) for path in paths]
    try:
        for module in modules:
            setattr(module, name, not value)
        yield
    finally:
        for module in modules:
            setattr(module, name, value)
