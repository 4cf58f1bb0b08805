"""Repeated blocks as one line: ``layers.0.norm`` to ``layers.27.norm`` become ``layers.{0-27}.norm``.

Nothing is lost: a label stands for exactly its members, so paths merge only where the numbers
form a full grid.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Group", "collapse", "collapse_paths", "ranges"]

Item = TypeVar("Item")
_Numbers = tuple[frozenset[int], ...]
_Cell = tuple[_Numbers, tuple[int, ...]]  # the numbers of a path (or a grid of them), and which items these are

# A number that counts blocks: a whole component ("layers.3"), or the end of any component but the
# last ("layer3.norm"; norm1 and norm2 are different roles). No leading zeros: they would not come back.
# What stands before it is looked at behind its first digit: a search for digits alone is quick in a name of 10 MB.
_REST = r"(?:(?<=0)|(?<!0)[0-9]{0,8})"
_COUNTER = re.compile(
    rf"[0-9](?:(?<![^.][0-9]){_REST}(?=\.|#|$)|(?<=[^\W\d][0-9]){_REST}(?=\.))",
)
_LONGEST_LIST = 3  # numbers with a constant step are spelled out up to here


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Generic[Item]):
    """Items whose paths differ in block numbers only, under one label."""

    label: str
    members: tuple[Item, ...]


def collapse(
    items: Iterable[Item], *, path: Callable[[Item], str], key: Callable[[Item], Hashable] = lambda _: None
) -> list[Group[Item]]:
    """Merge items with equal ``key`` whose paths differ in block numbers only.

    Args:
        items: what is listed, in order.
        path: gives an item's path.
        key: gives all else that must be equal.

    Returns:
        The groups, in the order of their first members.

    Examples:
        >>> [group.label for group in collapse(["h.0.ln", "h.1.ln", "h.3.ln", "ln"], path=str)]
        ['h.{0,1,3}.ln', 'ln']
    """
    listed = list(items)
    families: dict[tuple[tuple[str, ...], Hashable], list[_Cell]] = {}
    for index, item in enumerate(listed):
        pieces, numbers = _split(path(item))
        families.setdefault((pieces, key(item)), []).append((numbers, (index,)))
    merged = [
        (indexes, _label(pieces, numbers))
        for (pieces, _), cells in families.items()
        for numbers, indexes in _merged(cells, len(pieces) - 1)
    ]
    return [Group(label=label, members=tuple(listed[i] for i in sorted(indexes))) for indexes, label in sorted(merged)]


def collapse_paths(paths: Iterable[str]) -> list[Group[str]]:
    """Merge paths that differ in block numbers only."""
    return collapse(paths, path=str)


def ranges(numbers: Iterable[int]) -> str:
    """Spell a set of numbers shortly.

    Examples:
        >>> ranges([0, 1, 2, 3, 5, 6, 7])
        '0-3,5-7'
        >>> ranges([0, 2, 4, 6])
        '0,2,…,6'
    """
    given = sorted(set(numbers))
    steps = {after - before for before, after in itertools.pairwise(given)}
    if len(given) > _LONGEST_LIST and len(steps) == 1 and steps != {1}:
        return f"{given[0]},{given[1]},…,{given[-1]}"
    return ",".join(_run(first, last) for first, last in _runs(given))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _run(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first},{last}" if last == first + 1 else f"{first}-{last}"


def _split(path: str) -> tuple[tuple[str, ...], _Numbers]:
    pieces = tuple(_COUNTER.split(path))
    return pieces, tuple(frozenset([int(number)]) for number in _COUNTER.findall(path))


def _merged(cells: list[_Cell], positions: int) -> list[_Cell]:
    """Unite cells along one position after the other, from the right; each union is an exact grid."""
    for position in reversed(range(positions)):
        united: dict[_Numbers, tuple[frozenset[int], tuple[int, ...]]] = {}
        for numbers, indexes in cells:
            others = numbers[:position] + numbers[position + 1 :]
            seen, before = united.get(others, (frozenset[int](), ()))
            united[others] = (seen | numbers[position], before + indexes)
        cells = [((*rest[:position], here, *rest[position:]), indexes) for rest, (here, indexes) in united.items()]
    return cells if positions else [((), tuple(index for _, indexes in cells for index in indexes))]


def _label(pieces: Sequence[str], numbers: _Numbers) -> str:
    spelled = [str(next(iter(some))) if len(some) == 1 else f"{{{ranges(some)}}}" for some in numbers]
    return "".join(piece + number for piece, number in zip(pieces, [*spelled, ""], strict=True))
