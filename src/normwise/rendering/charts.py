"""Charts in inline SVG: small panels that share the axis of depth, and bars of a few numbers.

One picture holds a strip of blocks, the panels below it and pins through all of them, so that what is found at a
depth can be read beside what was measured there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from normwise.rendering.axes import Axis
from normwise.rendering.numbers import number, ratio
from normwise.rendering.svg import color, element, label, picture

__all__ = ["Cell", "Panel", "Pin", "Series", "bars", "depth_chart"]

_WIDTH, _LEFT, _RIGHT = 860, 56, 128
_PIN_ROW, _CELLS, _PANEL, _HEAD, _FOOT = 30, 18, 58, 30, 24  # heights
_LABEL_GAP = 15  # between the labels at the ends of the lines, in pixels
_CHARACTER = 7.6  # width of a small bold capital, in pixels
_X_TICKS, _Y_TICKS = 8, 3
_DOTS_UP_TO = 40  # points carry a dot up to here; beyond, dots would cover the line
_WIDEST_CELL, _MOST_CELLS = 34, 400
_BAR, _BAR_ROW, _BAR_NAME, _BAR_LENGTH = 12, 20, 64, 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: a value for each step of depth, None where there is none.

    A sparse line has values at some steps only (one for each block, say) and goes on over the steps between.
    """

    name: str
    values: tuple[float | None, ...]
    dashed: bool = False
    sparse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Lines that share an axis of values, which is logarithmic or linear."""

    name: str
    series: tuple[Series, ...]
    log: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A mark at one step of depth."""

    at: int
    text: str
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One block of the strip; ``shade`` is the index of its colour."""

    title: str
    shade: int = 0
    pinned: bool = False


def depth_chart(
    panels: Sequence[Panel], *, title: str, x_label: str, cells: Sequence[Cell] = (), pins: Sequence[Pin] = ()
) -> Markup:
    """Draw panels below each other over one axis of depth.

    A value that its axis cannot hold (NaN, infinity, zero or less on a log axis) is a cross at the
    upper edge, and the line is interrupted there.

    Args:
        panels: from top to bottom; as many values as there are steps of depth.
        title: read out in place of the picture.
        x_label: names the axis of depth.
        cells: the blocks in order of depth, with their names as tooltips; beyond 400 every few share one.
        pins: marks at steps of depth, through all panels.
    """
    count = max((len(each.values) for panel in panels for each in panel.series), default=len(cells))
    depth = _Depth(max(count, len(cells), 1))
    y = _PIN_ROW if pins else 0
    top, parts = y, [_strip(depth, cells, y)] if cells else []
    y += _CELLS if cells else 0
    for panel in panels:
        y += _HEAD
        parts.append(_panel(depth, panel, y))
        y += _PANEL
    parts.append(_steps(depth, x_label, y + 16))
    return picture(_WIDTH, y + _FOOT, title, [_pins(depth, pins, top, y), *parts])


def bars(values: Sequence[tuple[str, float]], *, title: str) -> Markup:
    """Draw a few numbers as bars from zero, one below the other; what is not finite fills its row.

    Args:
        values: a name and a number for each bar.
        title: read out in place of the picture.
    """
    finite = [abs(value) for _, value in values if math.isfinite(value)]
    longest = max(finite, default=0.0) or 1.0
    parts = [part for row, (name, value) in enumerate(values) for part in _bar(row, name, value, longest)]
    return picture(_BAR_NAME + _BAR_LENGTH + 90, _BAR_ROW * len(values), title, parts)


def _bar(row: int, name: str, value: float, longest: float) -> Iterator[Markup]:
    middle = row * _BAR_ROW + _BAR_ROW / 2
    share = abs(value) / longest if math.isfinite(value) else 1.0
    width = max(round(share * _BAR_LENGTH, 1), 2.0)
    yield label(_BAR_NAME - 8, middle + 4, name, anchor="end")
    hue = color(f"series-{row}") if math.isfinite(value) else color("alert")
    yield element("rect", x=_BAR_NAME, y=middle - _BAR / 2, width=width, height=_BAR, rx=2, style=hue)
    yield label(_BAR_NAME + width + 8, middle + 4, number(value, 4), name="ink")


@dataclass(frozen=True, slots=True)
class _Depth:
    """Turns steps into pixels: every step has a band of equal width."""

    count: int

    @property
    def band(self) -> float:
        return (_WIDTH - _LEFT - _RIGHT) / self.count

    def x(self, step: int) -> float:
        return round(_LEFT + (step + 0.5) * self.band, 1)


def _panel(depth: _Depth, panel: Panel, top: float) -> Markup:
    values = [value for each in panel.series for value in each.values]
    scale = Axis.around(values, log=panel.log, start=top + _PANEL, end=top)
    parts = [label(_LEFT, top - 8, panel.name, name="ink", size=12), *_grid(scale)]
    parts += [_line(depth, scale, index, each) for index, each in enumerate(panel.series)]
    parts.append(_end_labels(scale, panel.series))
    return element("g", *parts)


def _grid(scale: Axis) -> Iterator[Markup]:
    for tick in scale.ticks(_Y_TICKS) if scale.log else _thirds(scale):
        y = scale.at(tick)
        yield element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, style=color("line", "stroke"))
        yield label(_LEFT - 8, (y or 0) + 4, number(tick, 2), anchor="end", size=11)


def _thirds(scale: Axis) -> list[float]:
    return [scale.low + (scale.high - scale.low) * part / 2 for part in range(3)]


def _line(depth: _Depth, scale: Axis, index: int, series: Series) -> Markup:
    hue = f"series-{index}"
    pieces: list[list[str]] = [[]]
    marks = []
    points = sum(value is not None for value in series.values) if series.sparse else len(series.values)
    for step, value in enumerate(series.values):
        if value is None and series.sparse:
            continue
        y = None if value is None else scale.at(value)
        if y is not None:
            pieces[-1].append(f"{depth.x(step)},{y}")
            if points <= _DOTS_UP_TO and not series.dashed:
                tip = element("title", f"{series.name} {step}: {number(value)}")
                marks.append(element("circle", tip, cx=depth.x(step), cy=y, r=2.4, style=color(hue)))
            continue
        pieces.append([])
        if value is not None:
            marks.append(_cross(depth.x(step), scale.end, f"{series.name} {step}: {number(value)}"))
    style = f"fill:none;stroke-width:2;stroke-linejoin:round;{color(hue, 'stroke')}"
    dashes = "5 4" if series.dashed else None
    lines = [
        element("polyline", points=" ".join(piece), stroke_dasharray=dashes, style=style) for piece in pieces if piece
    ]
    return element("g", *lines, *marks)


def _cross(x: float, top: float, tip: str) -> Markup:
    style = f"stroke-width:2.4;{color('alert', 'stroke')}"
    return element("path", element("title", tip), d=f"M{x - 4:.1f},{top - 4:g}l8,8m-8,0l8,-8", style=style)


def _end_labels(scale: Axis, series: Sequence[Series]) -> Markup:
    """Write each line's name at its end, or how far a single line came; pushed apart where they would overlap."""
    ends = [(_last_y(scale, each), index) for index, each in enumerate(series)]
    floor, placed = -math.inf, []
    for y, index in sorted(ends):
        floor = max(y, floor + _LABEL_GAP)
        placed.append((floor, index))
    over = max(0.0, floor - (scale.start))
    texts = [
        label(_WIDTH - _RIGHT + 10, y - over + 4, _ending(series, index), name=f"series-{index}") for y, index in placed
    ]
    return element("g", *texts, font_weight="600")


def _ending(series: Sequence[Series], index: int) -> str:
    if len(series) > 1:
        return series[index].name
    usable = [value for value in series[index].values if value is not None]
    return f"{number(usable[-1], 2)} {ratio(usable[0], usable[-1])}".strip() if usable else ""


def _last_y(scale: Axis, series: Series) -> float:
    drawn = (y for v in reversed(series.values) if v is not None and (y := scale.at(v)) is not None)
    return next(drawn, scale.end + 10.0)


def _steps(depth: _Depth, x_label: str, y: float) -> Markup:
    shown = range(0, depth.count, _round_step(max(depth.count - 1, 1) / _X_TICKS))
    steps = [label(depth.x(step), y, str(step), anchor="middle", size=11) for step in shown]
    return element("g", *steps, label(_WIDTH - _RIGHT + 10, y, x_label, size=11))


def _round_step(step: float) -> int:
    """Return the next of 1, 2, 5, 10, 20, 50, ..."""
    power = 10 ** math.floor(math.log10(max(step, 1)))
    return next(int(factor * power) for factor in (1, 2, 5, 10) if factor * power >= step)


def _pins(depth: _Depth, pins: Sequence[Pin], top: float, bottom: float) -> Markup:
    return element("g", *(_pin(depth, x, pin, top, bottom) for x, pin in _spread(depth, pins)))


def _spread(depth: _Depth, pins: Sequence[Pin]) -> list[tuple[float, Pin]]:
    """Give every pin the x of its text, so that neighbours do not cover each other and none is cut off."""
    ordered = sorted(pins, key=lambda pin: pin.at)
    right, placed = -math.inf, []
    for pin in ordered:
        x = max(depth.x(pin.at), right + _half(pin) + 4, _half(pin))
        right = x + _half(pin)
        placed.append(x)
    left = _WIDTH
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], left - _half(ordered[index]))
        left = placed[index] - _half(ordered[index]) - 4
    return list(zip(placed, ordered, strict=True))


def _half(pin: Pin) -> float:
    return len(pin.text) * _CHARACTER / 2 + 7


def _pin(depth: _Depth, text_x: float, pin: Pin, top: float, bottom: float) -> Markup:
    x, half = depth.x(pin.at), _half(pin)
    style = f"fill:none;stroke-dasharray:2 3;{color('alert', 'stroke')}"
    stem = element("path", d=f"M{text_x:.1f},18L{x},{top:g}V{bottom:g}", style=style)
    badge = element(
        "rect", x=round(text_x - half, 1), y=1, width=round(2 * half, 1), height=17, rx=8, style=color("alert")
    )
    words = element(
        "text", pin.text, x=round(text_x, 1), y=13.5, text_anchor="middle", font_size=11, font_weight="600",
        style="fill:var(--nw-on-alert,#fff)",
    )  # fmt: skip
    return element("g", element("title", pin.title or pin.text), stem, badge, words)


def _strip(depth: _Depth, cells: Sequence[Cell], top: float) -> Markup:
    """Draw the blocks side by side, each above its step of depth."""
    step = math.ceil(len(cells) / _MOST_CELLS) or 1
    groups = [(start, cells[start : start + step]) for start in range(0, len(cells), step)]
    return element("g", *(_cell(depth, start, some, top) for start, some in groups))


def _cell(depth: _Depth, start: int, cells: Sequence[Cell], top: float) -> Markup:
    titles = [cell.title for cell in cells]
    tip = element("title", titles[0] if len(titles) == 1 else f"{titles[0]} … {titles[-1]}")
    band = depth.band * len(cells)
    gap = 2 if band > 6 else 0.2 * band
    width = min(band - gap, _WIDEST_CELL)
    left = (depth.x(start) + depth.x(start + len(cells) - 1) - width) / 2
    pinned = any(cell.pinned for cell in cells)
    outline = f";stroke-width:2;{color('alert', 'stroke')}" if pinned else ""
    return element(
        "rect", tip, x=round(left, 2), y=top + 2, width=round(width, 2), height=_CELLS - 6, rx=min(3.0, width / 4),
        style=color(f"series-{cells[0].shade}") + outline,
    )  # fmt: skip
