"""Parameters that the example run did not use: experts without a token, parts for inputs that were not given.

What they do is not known. An expert is what its siblings are, whose code it shares: a parameter whose name differs
in one number from others that are all centred is centred with them. Of the rest the user is told.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from normwise.facts.facts import Facts
from normwise.graph import ValueKind

__all__ = ["idle_parameters", "like_their_siblings", "not_checked"]

_NUMBERS = re.compile(r"(?<![^.])\d+(?![^.])")


def idle_parameters(facts: Facts) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that the run did not read, by name, those of one number apart."""
    used = {
        name
        for value in facts.graph.values
        if value.kind is ValueKind.PARAM and any(True for _ in facts.graph.consumers(value.id))
        for name in value.names
    }
    return {name: tuple(p.shape) for name, p in facts.parameters.items() if name not in used and p.numel() > 1}


def like_their_siblings(idle: Mapping[str, tuple[int, ...]], axes: Mapping[str, int]) -> dict[str, int]:
    """Return the axis along which an idle parameter is to be centred, for those whose siblings are.

    Args:
        idle: names and shapes.
        axes: of each parameter that was used: its axis, or 0 where it is not centred.
    """
    found: dict[str, int] = {}
    for name in idle:
        for pattern in _patterns(name):
            siblings = {axes[other] for other in axes if pattern.fullmatch(other)}
            if siblings:
                if len(siblings) == 1 and 0 not in siblings:
                    found[name] = siblings.pop()
                break
    return found


def not_checked(idle: Mapping[str, tuple[int, ...]], widths: Collection[int]) -> Iterator[str]:
    """Yield the note on matrices that stood idle and have an axis of one of the widths, if there are any."""
    names = [name for name, shape in idle.items() if len(shape) > 1 and set(widths) & set(shape)]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"not checked: this run did not use {', '.join(names[:3])}{more}; convert with inputs that use them"


def _patterns(name: str) -> Iterator[re.Pattern[str]]:
    """Yield what matches the names that differ in one number, the innermost first."""
    for number in reversed(list(_NUMBERS.finditer(name))):
        yield re.compile(re.escape(name[: number.start()]) + r"\d+" + re.escape(name[number.end() :]))
