"""This machine: every worker runs one trial at a time in a process of its own.

There are as many workers as cores that this process may use; trials use one thread each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

from normwise.studies._execute import Answer, Order

__all__ = ["claims", "start"]


class _Session:
    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._stop = Event()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="study")

    def submit(self, function: Any, order: Order) -> Future[Answer]:
        return self._pool.submit(function, order, self._stop.is_set)

    def end(self) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)


def claims(text: str) -> bool:
    """Return whether the text means this machine."""
    return text == "local"


@contextmanager
def start(text: str, workers: int | None) -> Iterator[_Session]:
    """Run trials here."""
    session = _Session(workers or _cores())
    try:
        yield session
    finally:
        session.end()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
