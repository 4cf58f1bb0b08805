"""Lines of charts from the rows of a study, the range over seeds as their band."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from normwise.rendering.plots import Line
from normwise.studies._study import Rows

__all__ = ["across", "along", "level"]


def across(name: str, cells: Iterable[tuple[float, Rows]], metric: str) -> Line:
    """Return a number by position: the rows of every position are its seeds."""
    cells = list(cells)
    ends = [some.spread(metric) for _, some in cells]
    return Line(
        name=name,
        x=tuple(float(x) for x, _ in cells),
        y=tuple(some.mean(metric) for _, some in cells),
        low=tuple(low for low, _ in ends),
        high=tuple(high for _, high in ends),
    )


def along(name: str, x: Sequence[float], rows: Rows, metric: str) -> Line:
    """Return a metric that is a list, one number for each position."""
    mean, low, high = map(tuple, rows.curve(metric))
    return Line(name=name, x=tuple(map(float, x)), y=mean, low=low, high=high)


def level(name: str, beside: Line, rows: Rows, metric: str, *, theory: bool = False) -> Line:
    """Return a number that does not depend on x, from end to end of another line."""
    return Line(name=name, x=(beside.x[0], beside.x[-1]), y=(rows.mean(metric),) * 2, theory=theory)
