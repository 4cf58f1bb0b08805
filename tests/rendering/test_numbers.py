from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normwise.rendering.numbers import BARS, number, ratio, sparkline


@given(st.floats(-1e300, 1e300))
def test_a_number_keeps_three_digits(value: float) -> None:
    assert float(number(value)) == pytest.approx(value, rel=5.1e-3)


@given(st.lists(st.none() | st.floats(), max_size=200), st.integers(1, 80), st.booleans())
def test_a_sparkline_fits_its_width_whatever_is_measured(values: list[float | None], width: int, log: bool) -> None:
    line = sparkline(values, width, log=log)
    assert len(line) == min(len(values), width)
    assert set(line) <= set(BARS) | {" ", "!"}


def test_one_nan_among_many_is_seen() -> None:
    values: list[float | None] = [1.0] * 200
    values[77] = math.nan
    assert sparkline(values, 20).count("!") == 1


def test_a_rising_curve_rises_from_the_lowest_to_the_highest_bar() -> None:
    line = sparkline([1.5**i for i in range(28)])
    assert line == "".join(sorted(line))
    assert (line[0], line[-1]) == (BARS[0], BARS[-1])


def test_a_flat_curve_is_drawn_flat() -> None:
    assert len(set(sparkline([1.0, 1.001, 0.999]))) == 1


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (-1.0, 2.0)])
def test_no_ratio_is_given_where_there_is_none(before: float, after: float) -> None:
    assert ratio(before, after) == ""


def test_over_a_linear_scale_only_what_is_not_finite_is_marked() -> None:
    assert sparkline([-1e308, 0.0, 1e308, math.nan, -math.inf], log=False) == "▁▅█!!"
    assert sparkline([0.0, 0.0], log=False) == sparkline([-5.0, -5.001], log=False) == BARS[3] * 2
