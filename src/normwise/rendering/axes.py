"""Axes of charts: turn values into pixels, and say where the ticks stand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from normwise.rendering.numbers import number

__all__ = ["Axis", "tick_labels"]

_SMALLEST, _LARGEST = 1e-300, 1e300  # what an axis holds, so that its ends can be widened without overflow
_FEWEST_FOR_LOG = 1.2  # a range below this ratio is widened, or its ticks would all read the same
_NARROWEST = 1e-9  # so is a linear range that is narrower than this part of its values
_FACTORS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))  # of ticks within a decade
_STEPS = (1, 2, 2.5, 5, 10)  # of ticks on a linear axis, times a power of ten
_FEWEST_DIGITS, _MOST_DIGITS = 4, 12


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic axis.

    Args:
        low: the smallest value on it.
        high: the largest.
        log: whether it is logarithmic.
        start: where ``low`` stands, in pixels.
        end: where ``high`` stands.
    """

    low: float
    high: float
    log: bool
    start: float
    end: float

    @classmethod
    def around(cls, values: Iterable[float | None], *, log: bool, start: float, end: float) -> Axis:
        """Make the axis that holds the values; those that no axis can hold are left aside."""
        usable = [float(value) for value in values if value is not None and _fits(value, log)]
        low, high = min(usable, default=1.0), max(usable, default=10.0)
        if log and high / low < _FEWEST_FOR_LOG:
            low, high = low / 2, high * 2
        elif not log and high - low <= _NARROWEST * max(abs(low), abs(high), _NARROWEST):
            margin = max(abs(low), abs(high)) / 2 or 1.0
            low, high = low - margin, high + margin
        return cls(low, high, log, start, end)

    def at(self, value: float) -> float | None:
        """Return where a value stands, to a tenth of a pixel; None where the axis cannot hold it."""
        if not _fits(value, self.log):
            return None
        low, high, at = (
            (math.log(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return round(self.start + (self.end - self.start) * ((at - low) / (high - low)), 1)

    def edge(self, value: float) -> float:
        """Return where a value that the axis cannot hold is marked: what is too small at the low end."""
        return self.start if value < self.low else self.end

    def ticks(self, most: int, fewest: int = 2) -> list[float]:
        """Return round values within the axis, in order.

        Args:
            most: how many at most.
            fewest: on a logarithmic axis, decades are divided until there are so many.
        """
        return self._decades(most, fewest) if self.log else self._steps(most)

    def _decades(self, most: int, fewest: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        inside: list[float] = []
        for factors in _FACTORS:
            ticks = [factor * 10.0**decade for decade in range(first, last + 1) for factor in factors]
            inside = [tick for tick in ticks if self.low * 0.999 <= tick <= self.high * 1.001]
            if len(inside) >= fewest:
                break
        return inside[:: math.ceil(len(inside) / most)] if len(inside) >= 2 else [self.low, self.high]

    def _steps(self, most: int) -> list[float]:
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in _STEPS if factor * power >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-6), math.floor(self.high / step + 1e-6)
        return [index * step for index in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Spell ticks with so many digits that each can be read back.

    Examples:
        >>> tick_labels([1.0, 1.005, 1.01]), tick_labels([0.0, 1000.0]), tick_labels([1e-6, 1e6])
        (['1', '1.005', '1.01'], ['0', '1000'], ['1e-6', '1e6'])
    """
    gaps = [abs(b - a) for a, b in pairwise(ticks)]
    within = 0.02 * min(gaps, default=math.inf)
    digits = next(
        (d for d in range(_FEWEST_DIGITS, _MOST_DIGITS) if all(abs(float(f"{t:.{d}g}") - t) <= within for t in ticks)),
        _MOST_DIGITS,
    )
    return [number(tick, digits) for tick in ticks]


def _fits(value: float, log: bool) -> bool:
    return (_SMALLEST if log else -_LARGEST) <= value <= _LARGEST
