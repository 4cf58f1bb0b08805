"""What a benchmark can be printed or written as."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from normwise.benchmarks import _chart, _json, _text
from normwise.benchmarks._result import Result
from normwise.rendering.files import replace

__all__ = ["formats", "render", "save", "suffixes"]

_PRINTED = {"text": _text.render, "json": _json.render, "svg": _chart.render}
_WRITTEN = {
    ".txt": partial(_text.render, color=False, width=120),
    ".json": _json.render,
    ".svg": _chart.render,
}


def formats() -> tuple[str, ...]:
    """Return what can be printed."""
    return tuple(_PRINTED)


def suffixes() -> tuple[str, ...]:
    """Return how a file may end; it decides what is written."""
    return tuple(_WRITTEN)


def render(result: Result, format: str, *, lang: str = "en") -> str:
    """Return the text, JSON or picture of a result.

    Raises:
        ValueError: no such format.
    """
    if format not in _PRINTED:
        raise ValueError(f"no format is called {format!r}: choose from {', '.join(_PRINTED)}")
    return _PRINTED[format](result, lang=lang)


def save(result: Result, path: Path, *, lang: str = "en") -> None:
    """Write a file in the format of its suffix, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    replace(path, _WRITTEN[path.suffix.lower()](result, lang=lang))
