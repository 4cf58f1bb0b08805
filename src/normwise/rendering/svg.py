"""Pictures in inline SVG: a line chart over depth and a strip of blocks. No script; text stays text.

Colours are CSS variables (``--nw-ink``, ``--nw-series-0``, ...) with a light fallback, so a page can
give them other values in the dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from normwise.rendering.cleaning import clean, shorten
from normwise.rendering.numbers import number

__all__ = ["SERIES_COLORS", "Cell", "Pin", "Series", "color", "element", "label", "line_chart", "strip"]

SERIES_COLORS = ("#0b62a8", "#b8500a", "#14795a", "#6b6f76")
_INK = {"ink": "#1d2129", "muted": "#626a76", "line": "#d5d9df", "alert": "#b42318"}

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 56, 128, 34, 34
_PLOT_HEIGHT = 190
_LABEL_GAP = 15  # between the labels at the ends of the lines, in pixels
_CHARACTER = 7.6  # width of a small bold capital, in pixels
_X_TICKS, _Y_TICKS = 8, 6
_SMALLEST, _LARGEST = 1e-300, 1e300  # what an axis holds, so that its ends can be widened without overflow
_FEWEST_FOR_LOG = 1.2  # a range below this ratio is widened, or its ticks would all read the same
_DOTS_UP_TO = 40  # points carry a dot up to here; beyond, dots would cover the line
_STRIP_HEIGHT, _WIDEST_CELL, _MOST_CELLS = 22, 34, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: a value for each step of depth, None where there is none."""

    name: str
    values: tuple[float | None, ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A mark at one step of depth."""

    at: int
    text: str
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One block of a strip; ``shade`` is the index of its colour."""

    title: str
    shade: int = 0
    pinned: bool = False


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
    """Return a style declaration: a named colour, or ``series-n``."""
    fallback = _INK.get(name) or SERIES_COLORS[int(name.rpartition("-")[2]) % len(SERIES_COLORS)]
    return f"{property_}:var(--nw-{name},{fallback})"


def label(x: float, y: float, content: str, *, name: str = "muted", anchor: str = "start", size: int = 12) -> Markup:
    """Place a text."""
    return element("text", content, x=x, y=y, text_anchor=anchor, font_size=size, style=color(name))


def line_chart(
    series: Sequence[Series], *, title: str, x_label: str, log: bool = True, pins: Sequence[Pin] = ()
) -> Markup:
    """Draw lines over depth with their names at their ends.

    A value that the axis cannot hold (NaN, infinity, zero or less on a log axis) is a cross at the
    upper edge, and the line is interrupted there.

    Args:
        series: the lines; as many values as there are steps of depth.
        title: read out in place of the picture.
        x_label: names the axis of depth.
        log: a logarithmic axis.
        pins: marks at steps of depth.
    """
    count = max((len(each.values) for each in series), default=0)
    frame = _Frame.around([value for each in series for value in each.values], count, log)
    parts = [frame.grid(x_label), *(_pin(frame, row, pin) for row, pin in enumerate(_spread(frame, pins)))]
    parts += [_line(frame, index, each) for index, each in enumerate(series)]
    parts.append(_end_labels(frame, series))
    return _picture(_WIDTH, _TOP + _PLOT_HEIGHT + _BOTTOM, title, parts, top=0 if pins else _TOP - 16)


def strip(cells: Sequence[Cell], *, title: str) -> Markup:
    """Draw blocks side by side, each with its name as a tooltip.

    Args:
        cells: the blocks in order of depth; beyond 400 every few share one.
        title: read out in place of the picture.
    """
    step = math.ceil(len(cells) / _MOST_CELLS) or 1
    shown = [cells[start : start + step] for start in range(0, len(cells), step)]
    width = min(_WIDEST_CELL, (_WIDTH - 2) / max(len(shown), 1))
    parts = [_cell(index * width, width, some) for index, some in enumerate(shown)]
    return _picture(_WIDTH, _STRIP_HEIGHT + 8, title, parts)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Turns steps and values into pixels."""

    count: int
    low: float
    high: float
    log: bool

    @classmethod
    def around(cls, values: Sequence[float | None], count: int, log: bool) -> _Frame:
        usable = [value for value in values if value is not None and _fits(value, log)]
        low, high = min(usable, default=1.0), max(usable, default=10.0)
        if log and high / low < _FEWEST_FOR_LOG:
            low, high = low / 2, high * 2
        elif high == low:
            margin = max(abs(low) / 2, 1.0)
            low, high = low - margin, high + margin
        return cls(count, low, high, log)

    def x(self, step: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * (step / max(self.count - 1, 1)), 1)

    def y(self, value: float) -> float | None:
        if not _fits(value, self.log):
            return None
        low, high, at = (
            (math.log(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return round(_TOP + _PLOT_HEIGHT * (1 - (at - low) / (high - low)), 1)

    def grid(self, x_label: str) -> Markup:
        rows = [(tick, self.y(tick)) for tick in self._y_ticks()]
        lines = [
            element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, style=color("line", "stroke")) for _, y in rows
        ]
        texts = [label(_LEFT - 8, (y or 0) + 4, number(tick), anchor="end") for tick, y in rows]
        below = _TOP + _PLOT_HEIGHT + 18
        steps = [label(self.x(step), below, str(step), anchor="middle") for step in self._x_ticks()]
        name = label(_WIDTH - _RIGHT + 14, below, x_label)
        return element("g", *lines, *texts, *steps, name)

    def _x_ticks(self) -> range:
        return range(0, self.count, _round_step(max(self.count - 1, 1) / _X_TICKS))

    def _y_ticks(self) -> list[float]:
        if not self.log:
            return [self.low + (self.high - self.low) * part / 4 for part in range(5)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = range(first, last + 1)
        for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
            ticks = [factor * 10.0**decade for decade in decades for factor in factors]
            inside = [tick for tick in ticks if self.low * 0.999 <= tick <= self.high * 1.001]
            if len(inside) >= 3:
                return inside[:: math.ceil(len(inside) / _Y_TICKS)]
        return [self.low, self.high]


def _fits(value: float, log: bool) -> bool:
    return (_SMALLEST if log else -_LARGEST) <= value <= _LARGEST


def _round_step(step: float) -> int:
    """Return the next of 1, 2, 5, 10, 20, 50, ..."""
    power = 10 ** math.floor(math.log10(max(step, 1)))
    return next(int(factor * power) for factor in (1, 2, 5, 10) if factor * power >= step)


def _line(frame: _Frame, index: int, series: Series) -> Markup:
    hue = f"series-{index}"
    pieces: list[list[str]] = [[]]
    marks = []
    for step, value in enumerate(series.values):
        y = None if value is None else frame.y(value)
        if y is not None:
            pieces[-1].append(f"{frame.x(step)},{y}")
            if len(series.values) <= _DOTS_UP_TO and not series.dashed:
                tip = element("title", f"{series.name} {step}: {number(value)}")
                marks.append(element("circle", tip, cx=frame.x(step), cy=y, r=2.6, style=color(hue)))
            continue
        pieces.append([])
        if value is not None:
            marks.append(_cross(frame.x(step), f"{series.name} {step}: {number(value)}"))
    style = f"fill:none;stroke-width:2;stroke-linejoin:round;{color(hue, 'stroke')}"
    dashes = "5 4" if series.dashed else None
    lines = [
        element("polyline", points=" ".join(piece), stroke_dasharray=dashes, style=style) for piece in pieces if piece
    ]
    return element("g", *lines, *marks)


def _cross(x: float, tip: str) -> Markup:
    style = f"stroke-width:2.4;{color('alert', 'stroke')}"
    path = f"M{x - 4:.1f},{_TOP - 4}l8,8m-8,0l8,-8"
    return element("path", element("title", tip), d=path, style=style)


def _end_labels(frame: _Frame, series: Sequence[Series]) -> Markup:
    """Write each line's name at its end, pushed apart where they would overlap."""
    ends = [(frame.y(last) if (last := _last(frame, each)) else None, index) for index, each in enumerate(series)]
    wanted = sorted((_TOP + 10.0 if y is None else y, index) for y, index in ends)
    floor, placed = -math.inf, []
    for y, index in wanted:
        floor = max(y, floor + _LABEL_GAP)
        placed.append((floor, index))
    over = max(0.0, floor - (_TOP + _PLOT_HEIGHT))
    texts = [
        label(_WIDTH - _RIGHT + 14, y - over + 4, series[index].name, name=f"series-{index}") for y, index in placed
    ]
    return element("g", *texts, font_weight="600")


def _last(frame: _Frame, series: Series) -> float | None:
    return next((v for v in reversed(series.values) if v is not None and frame.y(v) is not None), None)


def _spread(frame: _Frame, pins: Sequence[Pin]) -> list[tuple[float, Pin]]:
    """Give every pin the x of its text, so that neighbours do not cover each other."""
    placed: list[tuple[float, Pin]] = []
    right = -math.inf
    for pin in sorted(pins, key=lambda pin: pin.at):
        half = len(pin.text) * _CHARACTER / 2 + 7
        x = max(frame.x(pin.at), right + half + 4)
        right = x + half
        placed.append((x, pin))
    return placed


def _pin(frame: _Frame, row: int, placed: tuple[float, Pin]) -> Markup:
    text_x, pin = placed
    x, half = frame.x(pin.at), len(pin.text) * _CHARACTER / 2 + 7
    stem = f"M{text_x:.1f},20L{x},{_TOP}V{_TOP + _PLOT_HEIGHT}"
    style = f"fill:none;stroke-dasharray:2 3;{color('alert', 'stroke')}"
    badge = element(
        "rect", x=round(text_x - half, 1), y=3, width=round(2 * half, 1), height=17, rx=8, style=color("alert")
    )
    words = element(
        "text", pin.text, x=round(text_x, 1), y=15.5, text_anchor="middle", font_size=11, font_weight="600",
        style="fill:var(--nw-on-alert,#fff)",
    )  # fmt: skip
    return element("g", element("title", pin.title or pin.text), element("path", d=stem, style=style), badge, words)


def _cell(x: float, width: float, cells: Sequence[Cell]) -> Markup:
    titles = [cell.title for cell in cells]
    tip = element("title", titles[0] if len(titles) == 1 else f"{titles[0]} … {titles[-1]}")
    gap = 2 if width > 6 else 0.5
    box = element(
        "rect", tip, x=round(x, 2), y=8, width=round(width - gap, 2), height=_STRIP_HEIGHT - 2, rx=min(3.0, width / 4),
        style=color(f"series-{cells[0].shade}"),
    )  # fmt: skip
    if not any(cell.pinned for cell in cells):
        return box
    return element("g", box, element("circle", cx=round(x + (width - gap) / 2, 2), cy=4, r=3, style=color("alert")))


def _picture(width: float, height: float, title: str, parts: Sequence[Markup], top: float = 0) -> Markup:
    return element(
        "svg", element("title", shorten(clean(title), 200)), *parts, xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 {top:g} {width:g} {height - top:g}", role="img", font_family="inherit",
    )  # fmt: skip


def _attribute(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else clean(value)
