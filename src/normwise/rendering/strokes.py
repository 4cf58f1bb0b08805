"""How lines are told apart: by colour, by the shape of their markers and by dashes, so that no one needs the colour."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from normwise.rendering.svg import SERIES_COLORS, color, element

__all__ = ["Stroke", "cross", "strokes", "text_width"]

_NARROW, _WIDE = 0.56, 1.0  # width of a character by the size of the font: Latin on average, Chinese
_SOLID = (None, "6 2", "8 3 2 3")  # of measurements, by how often the colours have been used up
_THEORY = ("5 4", "2 3", "9 3 2 3", "1 5")  # of theories, by how many of one colour there are
# paths around (0, 0), in the order of the colours
_MARKERS = (
    "M-3.2,0a3.2,3.2 0 1,0 6.4,0a3.2,3.2 0 1,0 -6.4,0z",  # circle
    "M-3,-3h6v6h-6z",  # square
    "M0,-3.8l3.8,6.6h-7.6z",  # triangle
    "M0,-4.2l4.2,4.2l-4.2,4.2l-4.2,-4.2z",  # diamond
    "M0,3.8l3.8,-6.6h-7.6z",  # triangle, point down
    "M-1.3,-4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7z",  # plus
    "M-3.8,-2h7.6v4h-7.6z",  # bar
    "M0,-4.2l1.3,2.9h2.9l-2.2,2l.9,3.2l-2.9,-1.8l-2.9,1.8l.9,-3.2l-2.2,-2h2.9z",  # star
)


@dataclass(frozen=True, slots=True)
class Stroke:
    """How one line is drawn."""

    hue: int
    dashes: str | None = None
    marked: bool = True

    @property
    def ink(self) -> str:
        """Return the style of its colour as a stroke."""
        return color(f"series-{self.hue}", "stroke")

    @property
    def style(self) -> str:
        """Return the style of the line."""
        return f"fill:none;stroke-width:2;stroke-linejoin:round;{self.ink}"

    @property
    def shade(self) -> str:
        """Return the style of its band."""
        return f"opacity:.16;{color(f'series-{self.hue}')}"

    def marker(self, x: float, y: float, *children: Markup) -> Markup:
        """Draw its marker at a point."""
        place = f"translate({x:g} {y:g})"
        return element("path", *children, d=_MARKERS[self.hue], transform=place, style=color(f"series-{self.hue}"))


def cross(x: float, y: float, stroke: Stroke, *children: Markup) -> Markup:
    """Draw a cross in the colour of a line."""
    return element(
        "path", *children, d=f"M{x - 4:.1f},{y - 4:.1f}l8,8m-8,0l8,-8", style=f"stroke-width:2.4;{stroke.ink}"
    )


def strokes(lines: Sequence[tuple[str, str, bool]]) -> list[Stroke]:
    """Give every line its stroke.

    Args:
        lines: of each its name, the name of the line whose colour it has, and whether it is theory.
    """
    names = {name for name, _, _ in lines}
    hues: dict[int, int] = {}
    by_name: dict[str, int] = {}
    for following in (False, True):  # theory may stand before what it is like
        for index, (name, like, _) in enumerate(lines):
            if (like in names - {name}) == following:
                hues[index] = by_name.get(like, len(set(hues.values())))
                by_name.setdefault(name, hues[index])
    theories: dict[int, int] = {}
    made = []
    for index, (_, _, theory) in enumerate(lines):
        round_, hue = divmod(hues[index], len(SERIES_COLORS))
        if theory:
            theories[hue] = theories.get(hue, -1) + 1
            made.append(Stroke(hue, _THEORY[theories[hue] % len(_THEORY)], marked=False))
        else:
            made.append(Stroke(hue, _SOLID[round_ % len(_SOLID)]))
    return made


def text_width(text: str, size: float) -> float:
    """Return about how wide a text is set, in pixels; Chinese characters are as wide as they are high."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return size * (_WIDE * wide + _NARROW * (len(text) - wide))
