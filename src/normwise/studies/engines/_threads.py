"""Threads that wait for work done elsewhere, one for each trial under way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TypeAlias

from normwise.studies._execute import Answer, Order

__all__ = ["Function", "Run", "Threads"]

Function: TypeAlias = Callable[..., Answer]
Run: TypeAlias = Callable[[Function, Order, Event], Answer]


class Threads:
    """A session of an engine.

    Args:
        workers: trials that run at a time, as far as the engine knows.
        run: takes the function, an order, and an event that is set when the trial is to be ended; waits.
        waiting: trials handed over at a time; those that the engine queues itself are more than it runs.
    """

    def __init__(self, workers: int, run: Run, *, waiting: int | None = None) -> None:
        self.workers = workers
        self._run = run
        self._stop = Event()
        self._pool = ThreadPoolExecutor(waiting or workers, thread_name_prefix="study")

    def submit(self, function: Function, order: Order) -> Future[Answer]:
        """Queue a trial."""
        return self._pool.submit(self._run, function, order, self._stop)

    def end(self) -> None:
        """End what runs, and wait until it has."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
