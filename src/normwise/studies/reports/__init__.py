"""Formats of what a study found.

A format is a module here with a docstring (its page), ``SUFFIXES`` (of the files that hold it) and
``render(evidence, **options)``, which returns text, or bytes where ``BINARY`` is true: such a format is a file only.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normwise._parts import collect
from normwise.rendering.files import replace
from normwise.studies.reports import csv as csv
from normwise.studies.reports import html as html
from normwise.studies.reports import json as json
from normwise.studies.reports import jsonl as jsonl
from normwise.studies.reports import markdown as markdown
from normwise.studies.reports import parquet as parquet
from normwise.studies.reports import text as text

if TYPE_CHECKING:
    from normwise.studies._evidence import Evidence

__all__ = ["names", "render", "require", "save", "suffixes"]

FORMATS = collect(globals(), needs=("SUFFIXES", "BINARY", "render"))
_LANGUAGES = ("en", "zh")


def names() -> tuple[str, ...]:
    """Return the names of the formats that are text."""
    return tuple(name for name, part in FORMATS.items() if not part.BINARY)


def suffixes() -> dict[str, str]:
    """Return every known suffix of a file with the name of its format."""
    return {suffix: name for name, part in FORMATS.items() for suffix in part.SUFFIXES}


def render(evidence: Evidence, format: str, *, lang: str = "en", **options: Any) -> str:
    """Render what a study found.

    Args:
        evidence: what to show.
        format: one of ``names()``.
        lang: of the words, "en" or "zh".
        options: ``color`` and ``width`` of text. A format leaves aside what other formats know.

    Raises:
        ValueError: an unknown format or language.
    """
    if format not in names():
        hint = ": it is a file only, save it" if format in FORMATS else f": choose from {', '.join(names())}"
        raise ValueError(f"no text format is called {format!r}{hint}")
    return _made(evidence, format, lang, options)


def save(evidence: Evidence, path: str | Path, *, lang: str = "en") -> Path:
    """Write what a study found in the format its suffix names; an interrupted write leaves nothing behind.

    Args:
        evidence: what to write.
        path: the file; its suffix is one of ``suffixes()``.
        lang: of the words, "en" or "zh".

    Returns:
        The path.

    Raises:
        ValueError: a suffix no format has, or an unknown language.
        StudyError: the package of the format is missing.
        OSError: the file cannot be written.
    """
    path = Path(path)
    known = suffixes()
    if path.suffix.lower() not in known:
        raise ValueError(f"{path} names no format of a study: let it end in {', '.join(sorted(known))}")
    options = {"color": False, "width": 120}
    replace(path, _made(evidence, known[path.suffix.lower()], lang, options))
    return path


def require(path: Path) -> None:
    """Do nothing where a file could be written, as far as packages go.

    Raises:
        StudyError: the package of its format is missing.
    """
    part = FORMATS[suffixes()[path.suffix.lower()]]
    if hasattr(part, "require"):
        part.require()


def _made(evidence: Evidence, format: str, lang: str, options: dict[str, Any]) -> Any:
    if lang not in _LANGUAGES:
        raise ValueError(f"no words in {lang!r}: choose from {', '.join(_LANGUAGES)}")
    part = FORMATS[format]
    taken = set(inspect.signature(part.render).parameters)
    return part.render(evidence, **{name: value for name, value in {**options, "lang": lang}.items() if name in taken})
