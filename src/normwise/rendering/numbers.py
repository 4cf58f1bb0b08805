"""Numbers as people read them: three digits, powers without padding, sparklines over a log scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["BARS", "number", "quantity", "ratio", "size", "sparkline"]

BARS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "!"
_FLAT = 1.05  # below this ratio of largest to smallest a curve is drawn flat


def number(value: float | None, digits: int = 3) -> str:
    """Spell a number with so many significant digits; None is a dash.

    Examples:
        >>> number(1e-06), number(0.12345), number(41234.5), number(float("nan")), number(None)
        ('1e-6', '0.123', '4.12e4', 'NaN', '-')
    """
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = f"{value:.{digits}g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def ratio(before: float, after: float) -> str:
    """Spell how much a positive value grew or shrank; nothing where it hardly changed.

    Examples:
        >>> ratio(2.0, 30.0), ratio(30.0, 2.0), ratio(0.01, 4.56), ratio(1.0, 1.01)
        ('×15', '÷15', '×460', '')
    """
    if not (math.isfinite(before) and math.isfinite(after)) or before <= 0 or after <= 0:
        return ""
    if max(before, after) / min(before, after) < _FLAT:
        return ""
    return f"×{_plain(after / before)}" if after >= before else f"÷{_plain(before / after)}"


def _plain(factor: float) -> str:
    if factor >= 1e6:
        return number(factor, 2)
    return number(factor, 2) if factor < 99.5 else f"{float(f'{factor:.2g}'):.0f}"


def size(count: int) -> str:
    """Spell a number of bytes.

    Examples:
        >>> size(900), size(3_400_000_000)
        ('900 bytes', '3.4 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} bytes"


def quantity(seconds: float) -> str:
    """Spell a duration.

    Examples:
        >>> quantity(0.0123), quantity(12.34), quantity(250)
        ('12 ms', '12.3 s', '250 s')
    """
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def sparkline(values: Sequence[float | None], width: int = 56, *, log: bool = True) -> str:
    """Draw values in one line of block characters, by default over a log scale.

    Absent values are spaces; NaN, infinity and, over a log scale, what is not positive is ``!``. Several values
    that share a column show the largest.

    Examples:
        >>> sparkline([1, 10, 100, None, float("nan")]), sparkline([-1.0, 0.0, 1.0], log=False)
        ('▁▅█ !', '▁▅█')
    """
    columns = [_largest(values[start:end], log) for start, end in _bins(len(values), width)]
    heights = [_height(value, log) for value in columns if value is not None and _drawable(value, log)]
    low, high = min(heights, default=0.0), max(heights, default=0.0)
    flat = high - low < (math.log(_FLAT) if log else (_FLAT - 1) * max(abs(low), abs(high)))
    return "".join(_bar(value, low, low if flat else high, log) for value in columns)


def _drawable(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _height(value: float, log: bool) -> float:
    return math.log(value) if log else value / 2  # differences of halves are always finite


def _bins(count: int, width: int) -> list[tuple[int, int]]:
    width = min(count, max(width, 1))
    return [(column * count // width, (column + 1) * count // width) for column in range(width)]


def _largest(values: Sequence[float | None], log: bool) -> float | None:
    present = [value for value in values if value is not None]
    odd = [value for value in present if not _drawable(value, log)]
    return odd[0] if odd else max(present, default=None)


def _bar(value: float | None, low: float, high: float, log: bool) -> str:
    if value is None:
        return " "
    if not _drawable(value, log):
        return _NOT_FINITE
    if high == low:
        return BARS[3]
    return BARS[round((_height(value, log) - low) / (high - low) * (len(BARS) - 1))]
