"""exp as the compiled kernels compute it: within an ulp of float64, over all numbers."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from normwise.kernels import cpu
from tests.kernels.cpu_cases import needs_library

pytestmark = needs_library


def exponential(x: np.ndarray) -> np.ndarray:
    library = ctypes.CDLL(str(cpu._library()))
    function = library.normwise_exp32 if x.dtype == np.float32 else library.normwise_exp64
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    y = np.full_like(x, np.nan)
    function(x.ctypes.data, y.ctypes.data, x.size)
    return y


def exp_errors(step: int) -> float:
    """Return the largest error of exp in float32, in ulp, over every ``step``-th number of both signs up to 105."""
    first, last = (int(bits) for bits in np.array([2.0**-30, 105.0], np.float32).view(np.uint32))
    worst = 0.0
    for start in range(first, last, 1 << 22):
        bits = np.arange(start, min(start + (1 << 22), last), step, dtype=np.uint32)
        for sign in (0, 1 << 31):
            x = (bits | np.uint32(sign)).view(np.float32)
            y, true = exponential(x), np.exp(x.astype(np.float64))
            with np.errstate(over="ignore"):
                near = true.astype(np.float32)
            finite = np.isfinite(near)
            assert np.array_equal(y[~finite], near[~finite])
            ulp = np.spacing(near[finite]).astype(np.float64)
            worst = max([worst, *(np.abs(y[finite] - true[finite]) / ulp).max(initial=0, keepdims=True)])
    return worst


def test_exp_is_within_an_ulp() -> None:
    assert exp_errors(997) < 1


@pytest.mark.slow
def test_exp_is_within_an_ulp_of_nearly_every_number() -> None:
    assert exp_errors(7) < 1


def test_exp_in_float64_is_within_an_ulp() -> None:
    x = np.concatenate([np.linspace(-745.2, 709.78, 400_001), np.linspace(-1, 1, 100_001)])
    true = np.exp(x)  # itself within an ulp
    assert (np.abs(exponential(x) - true) / np.spacing(true)).max() <= 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_of_special_numbers(dtype: type) -> None:
    inf, nan = np.inf, np.nan
    x = np.array([inf, -inf, nan, 0.0, -0.0, 1e30, -1e30, 1000, -1000, 5e-324], dtype)
    np.testing.assert_array_equal(exponential(x), np.array([inf, 0, nan, 1, 1, inf, 0, inf, 0, 1], dtype))
