"""Work off a list in processes under a limit of time and memory; one that dies or hangs is replaced."""

from __future__ import annotations

import collections
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["ending", "work"]

Record = dict[str, Any]
Run = Callable[[Any], Record]


def work(
    items: Sequence[Any],
    run: Run,
    failure: Callable[[Any, str], Record],
    *,
    jobs: int,
    share: int,
    seconds: float,
    memory: int,
) -> Iterator[Record]:
    """Yield the record of every item, as they are done.

    Args:
        items: what is run; must be picklable.
        run: makes the record of an item, in a process of its own; a function of a module.
        failure: the record of an item whose process ended or took too long, and why.
        jobs: processes at a time.
        share: items that a process works off before it is replaced by a fresh one.
        seconds: the longest that an item may take.
        memory: bytes of address space of a process.
    """
    pending = collections.deque(items)
    workers: list[_Worker] = []
    while pending or workers:
        while pending and len(workers) < jobs:
            part = [pending.popleft() for _ in range(min(share, len(pending)))]
            workers.append(_Worker(part, run, failure, seconds, memory))
        wait([worker.connection for worker in workers], timeout=1)
        for worker in list(workers):
            yield from worker.records()
            if worker.ended:
                workers.remove(worker)
                pending.extendleft(reversed(worker.items))


class _Worker:
    """A process that works off a list in its order; it is stopped at the first item that takes too long."""

    def __init__(
        self, items: list[Any], run: Run, failure: Callable[[Any, str], Record], seconds: float, memory: int
    ) -> None:
        self.items, self.failure, self.seconds = items, failure, seconds
        self.connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_serve, args=(items, run, theirs, memory), daemon=True)
        self.process.start()
        theirs.close()
        self.since = time.monotonic()
        self.ended = False

    def records(self) -> Iterator[Record]:
        """Yield what has arrived, or a record of the failure that ended the process."""
        try:
            while self.connection.poll():
                record = self.connection.recv()
                self.items.pop(0)
                self.since = time.monotonic()
                yield record
        except EOFError:
            self.ended = True
            self.process.join()
            if self.items and self.process.exitcode:
                yield self.failure(self.items.pop(0), ending(self.process.exitcode))
            return
        if time.monotonic() - self.since > self.seconds and self.items:
            self.process.kill()
            self.process.join()
            self.ended = True
            yield self.failure(self.items.pop(0), f"took longer than {self.seconds:g} s")


def ending(code: int) -> str:
    """Say how a process ended that did not come to the end of its items: by a signal, or with a code of its own."""
    try:
        return f"the process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"the process ended with code {code}"


def _serve(items: list[Any], run: Run, connection: Connection, memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(1)
    for item in list(items):
        connection.send(run(item))
