"""What every test stands on: no network, few threads, reproducible properties."""

from __future__ import annotations

import gc
import os
import socket
from typing import Any

import pytest
from hypothesis import settings

# Before torch or transformers load: two test processes share two cores, and nothing is looked up on a hub.
for name, value in {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}.items():
    os.environ.setdefault(name, value)

# No deadline: the first call of a torch operator takes about a second. Derandomized: a failure repeats.
settings.register_profile("normwise", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("normwise")

# Collecting loads torch, transformers and all tests, and nothing of it is garbage: looking for some in it meanwhile
# took 5 of 17 seconds of each process, and more in every full collection later.
gc.disable()


def pytest_collection_finish() -> None:
    """Set what was loaded apart from what the tests make, and collect that."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let go of all: at its end, nanobind of Triton looks for what is left."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn every attempt to reach another machine into a failure of the test."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1"):
            raise AssertionError(f"a test tried to reach {address!r}: normwise needs no network")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)
