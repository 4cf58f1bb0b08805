"""A Dask cluster that runs already: ``dask://HOST:PORT`` is the address of its scheduler.

Every thread of its workers runs one trial at a time, in a process of its own. A worker that dies loses nothing but the
trials it was at: Dask gives them to another. The workers need the same normwise and Python as here.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

from normwise.errors import StudyError
from normwise.studies._execute import Answer, Order
from normwise.studies.engines._apart import apart
from normwise.studies.engines._threads import Function, Run, Threads

__all__ = ["EXAMPLE", "check", "claims", "start"]

EXAMPLE = "dask://HOST:PORT"

_PATIENCE = 8.0  # s for the scheduler to answer
_QUEUED = 256  # trials that Dask knows of at a time, so that workers which join find some
_TICK = 0.2  # s between two looks at whether a trial is still wanted
_INTERRUPTED = Answer(outcome="killed", error="interrupted")


def claims(text: str) -> bool:
    """Return whether the text means a Dask cluster."""
    return re.match(r"dask\b", text) is not None


def check(text: str) -> None:
    """Refuse what is no address."""
    _address(text)


@contextmanager
def start(text: str, workers: int | None, folder: Path) -> Iterator[Threads]:
    """Attach to a cluster; whoever started it ends it."""
    address = _address(text)
    client = _client(address)
    try:
        found = _workers(client, address, needed=workers is None)
        session = Threads(workers or found, _through(client, address), waiting=workers or _QUEUED)
        try:
            yield session
        finally:
            session.end()
    finally:
        client.close()


def _address(text: str) -> str:
    found = re.fullmatch(r"dask://((?:tcp|tls|ws|wss)://)?((?:[\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5}))/?", text)
    if found is None or not 0 < int(found[3]) < 2**16:
        raise StudyError(f"{text} is no address of a Dask scheduler: give one such as dask://localhost:8786")
    return (found[1] or "tcp://") + found[2]


def _client(address: str) -> Any:
    try:
        from distributed import Client
        from distributed.comm.core import connect
    except ImportError:
        raise StudyError("Dask is not installed: pip install 'normwise[dask]'") from None

    async def knock() -> None:
        # The client alone waits for ever where something listens that is no scheduler and says nothing.
        async with asyncio.timeout(_PATIENCE):
            await (await connect(address, timeout=_PATIENCE)).close()

    try:
        with ThreadPoolExecutor(1) as apart:  # a notebook has a loop of its own in this thread
            apart.submit(asyncio.run, knock()).result()
        return Client(address, timeout=_PATIENCE, set_as_default=False, name="normwise")
    except Exception as failure:  # what is no scheduler can answer anything
        said = f"{type(failure).__name__}: {failure}".rstrip(": ")
        raise StudyError(
            f"no Dask scheduler answers at {address} ({said}): start one with `dask scheduler`, or correct the address"
        ) from None


def _workers(client: Any, address: str, *, needed: bool) -> int:
    """Return how many trials its workers run at a time."""
    here = importlib.metadata.version("normwise")
    for worker, there in client.run(importlib.metadata.version, "normwise", on_error="return").items():
        if there != here:
            has = "no normwise" if isinstance(there, Exception) else f"normwise {there}"
            raise StudyError(f"{worker}, a worker of the Dask cluster at {address}, has {has}: install {here} there")
    threads = sum(client.nthreads().values())
    if needed and not threads:
        raise StudyError(
            f"the Dask cluster at {address} has no workers: start one with `dask worker {address}`, or, where the "
            "cluster starts them itself, say how many with --workers"
        )
    return threads


def _through(client: Any, address: str) -> Run:
    """Return what has the cluster run a trial, and waits."""

    def run(function: Function, order: Order, stop: Event) -> Answer:
        # Not pure: the same order tried again is another task.
        future = client.submit(_at_worker(function), asdict(order), key=f"normwise-trial-{uuid4()}", pure=False)
        ended = Event()
        future.add_done_callback(lambda _: ended.set())
        while not ended.wait(_TICK):
            if stop.is_set():
                future.cancel()
                return _INTERRUPTED
        if future.cancelled():  # by nobody here
            raise StudyError(f"the Dask scheduler at {address} was lost: what was done is kept, resume when it is back")
        return Answer(**future.result())

    return run


def _at_worker(function: Function) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what runs a trial in a worker until nobody waits for it: it was cancelled, or the runner is dead."""
    work = apart(function)

    def run(order: dict[str, Any]) -> dict[str, Any]:
        from distributed import get_worker

        worker = get_worker()
        key = worker.get_current_task()

        def unwanted() -> bool:
            task = worker.state.tasks.get(key)
            return task is None or task.state != "executing"

        return work(order, unwanted)

    return run
