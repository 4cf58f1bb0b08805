"""Plots in inline SVG: lines over numbers, each with the spread of its runs, measurements beside theory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Chart", "Line"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a plot.

    Args:
        name: for the legend.
        x: positions.
        y: values; None, NaN or infinite where there is none: the line is interrupted and marked there.
        low: the smallest of the runs at each position, drawn as a band with ``high``; or empty.
        high: the largest.
        theory: predicted rather than measured; drawn dashed, without dots.
        like: name of the line whose colour it has, a measurement's for its theory.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    theory: bool = False
    like: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over one axis.

    Args:
        title: what it shows.
        x_label: with its unit.
        y_label: with its unit.
        lines: at most eight are told apart by colour.
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
