"""Inline SVG: elements, colours and labels. No script; text stays text.

Colours are CSS variables (``--nw-ink``, ``--nw-series-0``, ...) with a light fallback, so a page can
give them other values in the dark.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from normwise.rendering.cleaning import clean, shorten, visible

__all__ = ["SERIES_COLORS", "color", "element", "label", "picture", "standalone"]

SERIES_COLORS = ("#0b62a8", "#b8500a", "#14795a", "#6b6f76", "#8b3fae", "#8f7200", "#0b8a9e", "#c2366f")
_INK = {"ink": "#1d2129", "muted": "#626a76", "line": "#d5d9df", "alert": "#b42318"}
_LONGEST_TITLE = 200


def element(name: str, *children: Markup | str, **attributes: object) -> Markup:
    """Make one element; children and attributes are escaped unless they are markup already.

    Examples:
        >>> element("text", "a < b", x=1, text_anchor="end")
        Markup('<text x="1" text-anchor="end">a &lt; b</text>')
    """
    given = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    opening = Markup("").join(Markup(' {}="{}"').format(Markup(key), _attribute(value)) for key, value in given)
    inner = Markup("").join(child if isinstance(child, Markup) else clean(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), opening, inner)


def color(name: str, property_: str = "fill") -> str:
    """Return a style declaration: a named colour, or ``series-n``; there are eight of these, then they start again."""
    if name in _INK:
        return f"{property_}:var(--nw-{name},{_INK[name]})"
    index = int(name.removeprefix("series-")) % len(SERIES_COLORS)
    return f"{property_}:var(--nw-series-{index},{SERIES_COLORS[index]})"


def label(x: float, y: float, content: str, *, name: str = "muted", anchor: str = "start", size: int = 12) -> Markup:
    """Place a text."""
    return element("text", content, x=x, y=y, text_anchor=anchor, font_size=size, style=color(name))


def picture(width: float, height: float, title: str, parts: Sequence[Markup]) -> Markup:
    """Put parts into one picture that grows with the room it is given; ``title`` is read out in its place."""
    return element(
        "svg", element("title", shorten(clean(title), _LONGEST_TITLE)), *parts, xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}", role="img", font_family="inherit",
    )  # fmt: skip


def standalone(svg: Markup) -> str:
    """Return a picture as a file: what a page shows from a file inherits neither its font nor its ground."""
    return (
        str(svg).replace('font-family="inherit"', 'font-family="system-ui, sans-serif" style="background:#fff"', 1)
        + "\n"
    )


def _attribute(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else visible(str(value))  # a line has any number of points
