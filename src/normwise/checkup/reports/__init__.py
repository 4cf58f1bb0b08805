"""Report formats: each renders one ``Report`` to text.

A format is a module here with a docstring (its page), ``SUFFIXES`` (of the files that hold it; the longest counts),
``FILE_OPTIONS`` (what a file needs that a terminal does not) and ``render(report, **options) -> str``.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normwise._parts import collect
from normwise.checkup.reports import github as github
from normwise.checkup.reports import html as html
from normwise.checkup.reports import json as json
from normwise.checkup.reports import junit as junit
from normwise.checkup.reports import markdown as markdown
from normwise.checkup.reports import sarif as sarif
from normwise.checkup.reports import text as text
from normwise.rendering.files import replace, suffix

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = ["names", "render", "save", "suffixes"]

FORMATS = collect(globals(), needs=("SUFFIXES", "FILE_OPTIONS", "render"))


def names() -> tuple[str, ...]:
    """Return the names of the formats."""
    return tuple(FORMATS)


def suffixes() -> dict[str, str]:
    """Return every known suffix of a file with the name of its format."""
    return {suffix: name for name, part in FORMATS.items() for suffix in part.SUFFIXES}


def render(report: Report, format: str, **options: Any) -> str:
    """Render a report.

    Args:
        report: what to show.
        format: one of ``names()``.
        options: ``full`` (every block, also repeated ones; in SARIF a result for every rule), ``lang`` ("en" or
            "zh"), ``color`` and ``width`` (text only). A format leaves aside what other formats know.

    Raises:
        ValueError: an unknown format or language.
        TypeError: an option that no format has.
    """
    if format not in FORMATS:
        raise ValueError(f"no format is called {format!r}: choose from {', '.join(names())}")
    if unknown := set(options) - _options_of(*FORMATS):
        raise TypeError(f"no report format has the option {min(unknown)!r}: {', '.join(sorted(_options_of(*FORMATS)))}")
    taken = _options_of(format)
    return FORMATS[format].render(report, **{key: value for key, value in options.items() if key in taken})


def save(report: Report, path: str | Path, **options: Any) -> Path:
    """Write a report in the format its suffix names; an interrupted write leaves nothing behind.

    Args:
        report: what to write.
        path: the file; its suffix is one of ``suffixes()``.
        options: as for ``render``.

    Returns:
        The path.

    Raises:
        ValueError: a suffix no format has.
        OSError: the file cannot be written.
    """
    path = Path(path)
    known = suffixes()
    ending = suffix(path, known)
    if ending is None:
        raise ValueError(f"{path} names no report format: let it end in {', '.join(sorted(known))}")
    name = known[ending]
    replace(path, render(report, name, **{**FORMATS[name].FILE_OPTIONS, **options}))
    return path


def _options_of(*formats: str) -> set[str]:
    return {key for name in formats for key in inspect.signature(FORMATS[name].render).parameters} - {"report"}
