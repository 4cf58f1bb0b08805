"""Every row of ``torch_differences``: ours is right, and torch's is still what the row says."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.layers.torch_differences import DIFFERENCES, OURS, TORCH, Difference, Home, Value

each_row = pytest.mark.parametrize("row", DIFFERENCES, ids=[row.what for row in DIFFERENCES])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep to one thread: sums that end at 256 do so in each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def value(row: Difference, home: Home) -> Value:
    torch.manual_seed(0)
    try:
        return row.measure(home)
    except (ValueError, TypeError, RuntimeError) as error:
        return type(error).__name__


def is_right(row: Difference, found: Value) -> bool:
    if isinstance(found, str) or isinstance(row.exact, str):
        return found == row.exact
    return abs(found - row.exact) <= row.within


@each_row
def test_ours_is_right(row: Difference) -> None:
    found = value(row, OURS)
    assert is_right(row, found), f"{row.what}: {found}, exactly {row.exact}"


@each_row
def test_torch_still_differs(row: Difference) -> None:
    assert not is_right(row, value(row, TORCH)), f"{row.what}: torch now agrees: remove this row"


@each_row
def test_torch_still_returns_what_the_row_says(row: Difference) -> None:
    found = value(row, TORCH)
    if isinstance(found, str) or isinstance(row.torch, str) or row.torch == 0:
        assert found == row.torch
    elif math.isfinite(row.torch):  # errors depend on the order of additions
        assert 0.1 < found / row.torch < 10
    else:
        assert str(found) == str(row.torch)
