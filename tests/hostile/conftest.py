"""One warm process for all tests of a worker."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.hostile.warm import Warm


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Give the process that forks."""
    if os.name != "posix":
        pytest.skip("processes are forked")
    with Warm() as process:
        yield process
