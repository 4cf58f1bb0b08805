"""This machine: every worker runs one trial at a time in a process of its own.

There are as many workers as cores that this process may use; trials use one thread each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from normwise.studies._execute import Answer, Order
from normwise.studies.engines._threads import Function, Threads

__all__ = ["EXAMPLE", "check", "claims", "start"]

EXAMPLE = "local"


def claims(text: str) -> bool:
    """Return whether the text means this machine."""
    return text == "local"


def check(text: str) -> None:
    """Do nothing: there is one form."""


@contextmanager
def start(text: str, workers: int | None, folder: Path) -> Iterator[Threads]:
    """Run trials here."""
    session = Threads(workers or _cores(), _run)
    try:
        yield session
    finally:
        session.end()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(function: Function, order: Order, stop: Event) -> Answer:
    return function(order, stop.is_set)
