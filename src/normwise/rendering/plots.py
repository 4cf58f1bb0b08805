"""Plots in inline SVG: lines over numbers, each with the spread of its runs, measurements beside theory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from normwise.rendering.axes import Axis, tick_labels
from normwise.rendering.cleaning import clean, shorten
from normwise.rendering.languages import both, in_language
from normwise.rendering.legends import Entry, legend
from normwise.rendering.numbers import number
from normwise.rendering.strokes import Stroke, cross, strokes, text_width
from normwise.rendering.svg import color, element, label, picture

__all__ = ["Chart", "Line", "plot"]

_WIDTH, _HEIGHT = 760, 280  # of the whole picture and of the frame, in pixels
_LEFT, _RIGHT, _TOP = 64, 20, 14
_TICK_ROW, _NAME_ROW = 18, 22
_X_TICKS, _Y_TICKS, _FEWEST = 8, 6, 3
_TICK_GAP = 10  # between the labels of neighbouring ticks, in pixels
_MOST_MARKERS, _SOME_MARKERS = 32, 12  # of a line; beyond, only some points carry one
_CROSS_STEP = 11  # between crosses that would cover each other
_LONGEST_LABEL = 90

_THEORY = both("dashed: theory", "虚线：理论")
_SPREAD = both("shaded: smallest to largest over the seeds", "阴影：各种子的最小值到最大值")
_OFF = both("× off the axis: NaN, infinite, or zero on a log axis", "× 不在轴上：NaN、无穷，或对数轴上的零")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a plot.

    Args:
        name: for the legend.
        x: positions.
        y: values; None where there is none: the line is interrupted. NaN, infinity and what a logarithmic axis cannot
            hold are crosses at the edge.
        low: the smallest of the runs at each position, drawn as a band with ``high``; or empty.
        high: the largest.
        theory: predicted rather than measured; drawn dashed, without dots.
        like: name of the line whose colour it has, a measurement's for its theory.

    Raises:
        ValueError: not as many values as positions.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    theory: bool = False
    like: str = ""

    def __post_init__(self) -> None:
        for name, given in (("y", self.y), ("low", self.low), ("high", self.high)):
            if len(given) != len(self.x) and (given or name == "y"):
                raise ValueError(f"line {self.name!r} has {len(self.x)} positions and {len(given)} values of {name}")
        if bool(self.low) != bool(self.high):
            raise ValueError(f"line {self.name!r} has only one of low and high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over one axis.

    Args:
        title: what it shows.
        x_label: with its unit.
        y_label: with its unit.
        lines: at most eight are told apart by colour and marker; beyond, by their dashes too.
        log_x: a logarithmic axis.
        log_y: a logarithmic axis.
        note: the conditions, and how to read it.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False
    note: str = ""


def plot(chart: Chart, *, lang: str = "en") -> Markup:
    """Draw a chart: its legend on top, every point with its figures as tooltip, the note as description.

    Args:
        chart: what to draw.
        lang: of the words, "en" or "zh".
    """
    drawn = strokes([(line.name, line.like, line.theory) for line in chart.lines])
    key, top = legend(_entries(chart, drawn, lang), left=_LEFT, top=_TOP, right=_WIDTH - _RIGHT)
    top += 6 + _NAME_ROW
    x = Axis.around((x for line in chart.lines for x in line.x), log=chart.log_x, start=_LEFT, end=_WIDTH - _RIGHT)
    values = (value for line in chart.lines for value in (*line.y, *line.low, *line.high))
    frame = _Frame(x, Axis.around(values, log=chart.log_y, start=top + _HEIGHT, end=top), lang)
    parts = [
        *([element("desc", said)] if (said := in_language(chart.note, lang)) else []),
        key,
        *_grid(frame, chart),
        *(_band(frame, line, stroke) for line, stroke in zip(chart.lines, drawn, strict=True) if line.low),
        *(_line(frame, line, stroke) for line, stroke in zip(chart.lines, drawn, strict=True)),
        _crosses(frame, chart.lines, drawn),
    ]
    height = top + _HEIGHT + _TICK_ROW + _NAME_ROW + 4
    return picture(_WIDTH, height, in_language(chart.title, lang), parts)


@dataclass(frozen=True, slots=True)
class _Frame:
    x: Axis
    y: Axis
    lang: str

    def at(self, x: float, y: float | None) -> tuple[float, float] | None:
        """Return the pixels of a point; None for one that its axes cannot hold."""
        if y is None or (across := self.x.at(x)) is None or (up := self.y.at(y)) is None:
            return None
        return across, up

    def tip(self, line: Line, index: int) -> Markup:
        """Return the tooltip of a point: the line, the position, the value and its spread."""
        said = f"{in_language(line.name, self.lang)} · {number(line.x[index], 4)}: {number(line.y[index], 4)}"
        if line.low and line.low[index] is not None:
            said += f" ({number(line.low[index], 4)} … {number(line.high[index], 4)})"
        return element("title", said)


def _entries(chart: Chart, drawn: Sequence[Stroke], lang: str) -> Iterator[Entry]:
    for line, stroke in zip(chart.lines, drawn, strict=True):
        yield Entry(in_language(line.name, lang), stroke)
    for said, needed in (
        (_THEORY, any(line.theory for line in chart.lines)),
        (_SPREAD, any(line.low != line.high for line in chart.lines)),
        (_OFF, any(_off(chart, line, index) for line in chart.lines for index in range(len(line.x)))),
    ):
        if needed:
            yield Entry(in_language(said, lang))


def _off(chart: Chart, line: Line, index: int) -> bool:
    y = line.y[index]
    return y is not None and not (_drawable(line.x[index], chart.log_x) and _drawable(y, chart.log_y))


def _drawable(value: float, log: bool) -> bool:
    return Axis(1.0, 2.0, log, 0.0, 1.0).at(value) is not None


def _grid(frame: _Frame, chart: Chart) -> Iterator[Markup]:
    x, y, lang = frame.x, frame.y, frame.lang
    rows = y.ticks(_Y_TICKS, _FEWEST)
    for tick, said in zip(rows, tick_labels(rows), strict=True):
        yield element("line", x1=x.start, x2=x.end, y1=y.at(tick), y2=y.at(tick), style=color("line", "stroke"))
        yield label(x.start - 8, (y.at(tick) or 0.0) + 4, said, anchor="end", size=11)
    yield element("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, style=color("muted", "stroke"))
    for tick, said in _x_ticks(x, chart.lines):
        at = x.at(tick)
        yield element("line", x1=at, x2=at, y1=y.start, y2=y.start + 4, style=color("muted", "stroke"))
        yield label(at or 0.0, y.start + _TICK_ROW, said, anchor="middle", size=11)
    across, up = (shorten(clean(in_language(name, lang)), _LONGEST_LABEL) for name in (chart.x_label, chart.y_label))
    yield label((x.start + x.end) / 2, y.start + _TICK_ROW + _NAME_ROW - 2, across, anchor="middle")
    yield label(8, y.end - 12, up)


def _x_ticks(x: Axis, lines: Sequence[Line]) -> list[tuple[float, str]]:
    """Return the measured positions where they are few and their labels have room, else round values."""
    positions = sorted({float(each) for line in lines for each in line.x if x.at(each) is not None})
    for ticks in (positions, x.ticks(_X_TICKS, _FEWEST)):
        labels = tick_labels(ticks)
        if 0 < len(ticks) <= _X_TICKS and _have_room(x, ticks, labels):
            return list(zip(ticks, labels, strict=True))
    few = x.ticks(_FEWEST)
    return list(zip(few, tick_labels(few), strict=True))


def _have_room(x: Axis, ticks: Sequence[float], labels: Sequence[str]) -> bool:
    right = -math.inf
    for tick, said in zip(ticks, labels, strict=True):
        half = text_width(said, 11) / 2
        if (at := x.at(tick)) is None or at - half < right + _TICK_GAP:
            return False
        right = at + half
    return True


def _line(frame: _Frame, line: Line, stroke: Stroke) -> Markup:
    pieces: list[list[str]] = [[]]
    points = [frame.at(x, y) for x, y in zip(line.x, line.y, strict=True)]
    for point in points:
        if point is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{point[0]:g},{point[1]:g}")
    lines = [
        element("polyline", points=" ".join(piece), stroke_dasharray=stroke.dashes, style=stroke.style)
        for piece in pieces
        if len(piece) > 1
    ]
    every = 1 if len(points) <= _MOST_MARKERS else math.ceil(len(points) / _SOME_MARKERS)
    alone = {piece[0] for piece in pieces if len(piece) == 1}
    markers = [
        stroke.marker(*point, frame.tip(line, index))
        for index, point in enumerate(points)
        if point is not None and (f"{point[0]:g},{point[1]:g}" in alone or (stroke.marked and index % every == 0))
    ]
    return element("g", *lines, *markers)


def _band(frame: _Frame, line: Line, stroke: Stroke) -> Markup:
    """Shade the spread; a stretch of one position is a vertical stroke."""
    parts: list[Markup] = []
    stretch: list[tuple[float, float, float]] = []
    for x, low, high in (*zip(line.x, line.low, line.high, strict=True), (0.0, None, None)):
        across = frame.x.at(x)
        if across is None or low is None or high is None or math.isnan(low) or math.isnan(high):
            parts += _shade(stretch, stroke)
            stretch = []
        else:
            stretch.append((across, _held(frame.y, low), _held(frame.y, high)))
    return element("g", *parts)


def _shade(stretch: Sequence[tuple[float, float, float]], stroke: Stroke) -> Iterator[Markup]:
    if len(stretch) == 1:
        x, low, high = stretch[0]
        yield element("line", x1=x, x2=x, y1=low, y2=high, style=f"stroke-width:2;opacity:.45;{stroke.ink}")
    elif stretch:
        outline = [(x, low) for x, low, _ in stretch] + [(x, high) for x, _, high in reversed(stretch)]
        yield element("polygon", points=" ".join(f"{x:g},{y:g}" for x, y in outline), style=stroke.shade)


def _held(axis: Axis, value: float) -> float:
    """Return where a value stands, or the edge of the axis that is nearest to it."""
    at = axis.at(value)
    return axis.edge(value) if at is None else at


def _crosses(frame: _Frame, lines: Sequence[Line], drawn: Sequence[Stroke]) -> Markup:
    """Mark what the axes cannot hold at their edge, in the colour of its line; several at one place are apart."""
    taken: dict[tuple[float, float], int] = {}
    parts = []
    for line, stroke in zip(lines, drawn, strict=True):
        for index, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
            if y is None or frame.at(x, y) is not None:
                continue
            across, up = _held(frame.x, x), _held(frame.y, y)
            step = taken[across, up] = taken.get((across, up), -1) + 1
            inwards = _CROSS_STEP if up < (frame.y.start + frame.y.end) / 2 else -_CROSS_STEP
            inside = min(max(up + inwards * step, frame.y.end), frame.y.start)
            parts.append(cross(across, inside, stroke, frame.tip(line, index)))
    return element("g", *parts)
