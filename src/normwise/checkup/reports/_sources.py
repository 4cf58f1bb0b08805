"""Which line of the user's own files a finding is about, for formats that annotate files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from normwise.rendering.cleaning import clean

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = ["Source", "finder"]


@dataclass(frozen=True, slots=True)
class Source:
    """A line of a file below the current folder; the file is relative, with forward slashes."""

    file: str
    line: int


def finder(report: Report) -> Callable[[str], Source | None]:
    """Return what gives the line that computes the norm, or makes the add, at a path of the model.

    Paths whose line is not known are given the first line of the file that a target names (``FILE.py:callable``).
    None is given where the file is not below the current folder: no link can lead there.

    Args:
        report: for the norms, stacks and breaks with their lines.
    """
    folder = Path.cwd().resolve()
    written: dict[str, str] = {}
    for path, line in _lines(report):
        if path:
            written.setdefault(path, line)
    length = cache(_length)
    whole = _source(f"{report.target.rpartition(':')[0]}:1", folder, length)

    def find(path: str) -> Source | None:
        return _source(written.get(path), folder, length) or whole

    return find


def _lines(report: Report) -> Iterator[tuple[str | None, str]]:
    """Yield paths with ``file:line``, those that say most first."""
    for site in (*report.norms, *report.listed_apart):
        if site.source:
            yield from ((path, site.source) for path in (site.path, site.weight_path, site.bias_path))
    yield from ((each.path, each.source) for each in report.breaks if each.source)
    for stack in report.placement.stacks:
        yield from ((member.path, member.source) for member in stack.members if member.source)


def _source(written: str | None, folder: Path, length: Callable[[Path], int]) -> Source | None:
    file, _, line = (written or "").rpartition(":")
    if not file or clean(file) != file or not line.isdecimal():
        return None
    try:
        path = (folder / file).resolve()
        relative = path.relative_to(folder)
        lines = length(path)
    except (OSError, ValueError):  # no file, or not in this folder
        return None
    return Source(relative.as_posix(), int(line)) if 1 <= int(line) <= lines else None


def _length(path: Path) -> int:
    """Return how many lines a file has: a name alone may be that of another file."""
    return path.read_bytes().count(b"\n") + 1
