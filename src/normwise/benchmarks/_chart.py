"""The picture of a benchmark: bars of multiples of the copy, a panel for each layer and dtype at the largest shape.

It stands alone in a README: it brings its own background and its colours for light and dark, asks the network for
nothing and runs no script.
"""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from normwise.benchmarks import _words
from normwise.benchmarks._contest import CLONE
from normwise.benchmarks._result import OURS, Result, Row
from normwise.benchmarks._text import figure, heading, title_of
from normwise.rendering.cleaning import respelled
from normwise.rendering.languages import in_language
from normwise.rendering.svg import color, element, label, picture

__all__ = ["render"]

_PAD, _COLUMN, _NAME, _FIGURE = 16, 440, 128, 44  # pixels: margin, a panel, names at its left, figures at its right
_HEAD, _TITLE, _GROUP, _ROW, _BAR, _GAP = 62, 26, 18, 15, 11, 18
_FONT = "ui-sans-serif, system-ui, 'Segoe UI', 'Noto Sans CJK SC', sans-serif"
_STYLE = (
    "svg{--nw-ink:#1d2129;--nw-muted:#5c6470;--nw-line:#dfe2e7;--nw-paper:#fff;"
    "--nw-series-0:#0b62a8;--nw-series-1:#b8500a;--nw-series-2:#14795a;--nw-series-3:#6b6f76}"
    "@media (prefers-color-scheme:dark){svg{--nw-ink:#e6e8ec;--nw-muted:#9aa3b0;--nw-line:#333a45;--nw-paper:#1c2027;"
    "--nw-series-0:#6db3f2;--nw-series-1:#f0a35e;--nw-series-2:#5cc9a3;--nw-series-3:#9aa3b0}}"
)
_SERIES = {OURS: 0, "torch.nn": 1, "torch.compile": 2}


def render(result: Result, *, lang: str = "en") -> str:
    """Return the SVG of a result.

    Args:
        result: what was measured.
        lang: "en" or "zh".
    """
    panels = list(_panels(result))
    unit = _words.SCALE if any(row.copies for rows in panels for row in rows) else _words.HEADINGS["ms"]
    columns = min(2, len(panels)) or 1
    parts, y = [], float(_HEAD)
    for start in range(0, len(panels), columns):
        line = panels[start : start + columns]
        parts += [_panel(rows, _PAD + index * (_COLUMN + _PAD), y, lang) for index, rows in enumerate(line)]
        y += max(map(_height, line)) + _GAP
    width = columns * (_COLUMN + _PAD) + _PAD
    title = f"{title_of(result, lang)} {in_language(unit, lang)}"
    head = [
        element("style", Markup(_STYLE)),
        element("rect", width=width, height=y, rx=8, style="fill:var(--nw-paper,#fff)"),
        label(_PAD, 24, f"{title_of(result, lang)}", name="ink", size=14),
        label(_PAD, 44, f"{in_language(unit, lang)}. {in_language(_words.machine_line(result), lang)}", size=10),
    ]
    page = str(picture(width, y, title, [element("g", *head, *parts, font_family=_FONT)]))
    return respelled(page, "&#{};") + "\n"


def _panels(result: Result) -> Iterator[list[Row]]:
    """Yield what is drawn: of each layer, dtype and layout the largest shape, on the most threads."""
    chosen: dict[tuple[str, str, str | None], list[Row]] = {}
    for rows in result.contests():
        key = (rows[0].layer, rows[0].dtype, rows[0].layout)
        held = chosen.get(key)
        if held is None or _rank(rows[0]) > _rank(held[0]):
            chosen[key] = rows
    for rows in chosen.values():
        drawn = [row for row in rows if row.ms is not None and row.rival != CLONE]
        if drawn:
            yield drawn


def _rank(row: Row) -> tuple[int, int]:
    elements = 1
    for each in row.shape:
        elements *= each
    return row.threads, elements


def _value(row: Row) -> float:
    return row.copies or row.ms or 0.0


def _passes(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.what for row in rows))


def _height(rows: list[Row]) -> float:
    return _TITLE + _GROUP * len(_passes(rows)) + _ROW * len(rows)


def _panel(rows: list[Row], x: float, top: float, lang: str) -> Markup:
    longest = max(map(_value, rows))
    scale = (_COLUMN - _NAME - _FIGURE) / longest
    parts, y = [label(x, top + 12, heading(rows[0], lang), name="ink", size=12)], top + _TITLE
    for what in _passes(rows):
        parts.append(label(x, y + 12, what, size=11))
        y += _GROUP
        for row in rows:
            if row.what == what:
                parts += _bar(row, x, y, scale)
                y += _ROW
    if any(row.copies for row in rows):
        parts.append(_one(x + _NAME + scale, top + _TITLE, y))
    return element("g", *parts)


def _bar(row: Row, x: float, y: float, scale: float) -> Iterator[Markup]:
    length = max(round(_value(row) * scale, 1), 1.0)
    tip = element("title", f"{row.what}, {row.rival}: {figure(row.ms)} ms ({figure(row.low)} - {figure(row.high)})")
    hue = color(f"series-{_SERIES.get(row.rival, 3)}")
    yield label(x + _NAME - 6, y + 10, row.rival, name="ink" if row.rival == OURS else "muted", anchor="end", size=11)
    yield element("rect", tip, x=x + _NAME, y=y + 1, width=length, height=_BAR, rx=2, style=hue)
    yield label(x + _NAME + length + 5, y + 10, figure(_value(row)), name="ink", size=11)


def _one(x: float, top: float, bottom: float) -> Markup:
    """Mark the copy itself."""
    style = f"stroke-dasharray:2 3;{color('ink', 'stroke')}"
    return element("line", x1=x, x2=x, y1=top, y2=bottom, style=style)
