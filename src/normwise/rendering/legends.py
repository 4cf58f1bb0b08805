"""Legends of plots: entries side by side in rows, none over another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup

from normwise.rendering.cleaning import clean, shorten
from normwise.rendering.strokes import Stroke, text_width
from normwise.rendering.svg import element, label

__all__ = ["Entry", "legend"]

_ROW, _SAMPLE, _GAP, _BETWEEN, _SIZE = 19, 26, 7, 22, 12


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the plot, or, without a stroke, words on how to read it."""

    text: str
    stroke: Stroke | None = None


def legend(entries: Iterable[Entry], *, left: float, top: float, right: float) -> tuple[Markup, float]:
    """Draw a legend and return where it ends below.

    Args:
        entries: in order; a text that is wider than a row is cut in its middle.
        left: where rows start, in pixels.
        top: where the first one starts.
        right: where rows end.
    """
    x, y, parts, words_before = left, top, [], False
    for entry in entries:
        lead = _SAMPLE + _GAP if entry.stroke else 0
        said = _fitted(clean(entry.text), right - left - lead)
        wide = lead + text_width(said, _SIZE)
        starts_words = not entry.stroke and not words_before and x > left
        words_before = not entry.stroke
        if x > left and (x + wide > right or starts_words):
            x, y = left, y + _ROW
        if entry.stroke:
            parts.append(_sample(entry.stroke, x, y + _ROW / 2))
        parts.append(label(round(x + lead, 1), y + _ROW / 2 + 4, said, name="ink" if entry.stroke else "muted"))
        x += wide + _BETWEEN
    return element("g", *parts), y + _ROW if parts else y


def _fitted(text: str, room: float) -> str:
    """Cut the middle out of a text until it fits."""
    limit = len(text)
    said = text
    while text_width(said, _SIZE) > room and limit > 1:
        limit = max(1, int(limit * 0.9))
        said = shorten(text, limit)
    return said


def _sample(stroke: Stroke, x: float, y: float) -> Markup:
    line = element(
        "line", x1=round(x, 1), x2=round(x + _SAMPLE, 1), y1=y, y2=y, stroke_dasharray=stroke.dashes, style=stroke.style
    )
    return element("g", line, *([stroke.marker(round(x + _SAMPLE / 2, 1), y)] if stroke.marked else []))
