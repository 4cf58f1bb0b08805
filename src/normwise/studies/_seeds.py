"""What seeds say together: their mean and range, and whether two settings are apart."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite

from normwise.rendering.numbers import number

__all__ = ["mean", "order", "span", "spelled"]


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN or infinite where a value is."""
    return fsum(values) / len(values) if all(map(isfinite, values)) else sum(values)


def spelled(values: Sequence[float], form: str = "") -> str:
    """Spell the mean, and the range where it reads otherwise.

    Args:
        values: one for each seed.
        form: of a number, as ``format`` has it; three digits by default.

    Examples:
        >>> spelled([1.0, 2.0, 3.0]), spelled([0.25], ".0%")
        ('2 (1 … 3)', '25%')
    """
    said, ends = _number(mean(values), form), span(values, form)
    return said if ends == said else f"{said} ({ends})"


def span(values: Sequence[float], form: str = "") -> str:
    """Spell the range: once where both ends read the same.

    Examples:
        >>> span([1.0, 2.0, 3.0]), span([0.251, 0.249], ".2f")
        ('1 … 3', '0.25')
    """
    low, high = _number(min(values), form), _number(max(values), form)
    return low if low == high else f"{low} … {high}"


def order(first: Sequence[float], second: Sequence[float]) -> int:
    """Return 1 where all of the first are above all of the second, -1 where they are below, 0 where ranges meet.

    Examples:
        >>> order([2.0, 3.0], [1.0]), order([1.0], [2.0]), order([1.0, 3.0], [2.0])
        (1, -1, 0)
    """
    return int(min(first) > max(second)) - int(max(first) < min(second))


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if form else number(value)
