"""A run of the toy study from outside: its processes, its ledger, and how it is ended."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from normwise import studies
from normwise.errors import StudyError
from normwise.studies._ledger import read
from tests.file_limit import file_limit

__all__ = ["Elsewhere", "alive", "done", "eventually", "intact", "starts"]


def starts(log: Path) -> list[list[int]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [[int(number) for number in line.split()] for line in lines if line.count(" ") == 1]


def alive(pid: int) -> bool:
    """Return whether a process runs: one that is over and not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(holds: Callable[[], Any], within: float = 20) -> bool:
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def intact(path: Path) -> bool:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def done(path: Path) -> dict[int, float]:
    """Return the values that are in the ledger, by trial."""
    try:
        records = read(path)[1]
    except (StudyError, KeyError):  # it is being begun
        return {}
    return {record.params["at"]: record.metrics["value"] for record in records if record.state == "done"}


class Elsewhere:
    """A run in a process of its own, in a group of its own, as in a terminal."""

    def __init__(self, path: Path, **given: Any) -> None:
        context = get_context("fork")  # a fresh interpreter would take seconds to load torch
        self.said, sends = context.Pipe(duplex=False)
        self.process = context.Process(target=_run_elsewhere, args=(sends, path, given))
        self.process.start()
        sends.close()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        eventually(lambda: os.getpgid(self.process.pid or 0) == self.process.pid)
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def result(self) -> Any:
        self.process.join(20)
        return self.said.recv()


def _run_elsewhere(sends: Connection, path: Path, given: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    limit = file_limit(given.pop("largest_file")) if "largest_file" in given else nullcontext()
    try:
        with limit:
            evidence = studies.study("toy", ledger=path, seeds=1, **given)
        sends.send((len(evidence.rows), len(evidence.unrun)))
    except BaseException as error:
        sends.send((type(error).__name__, str(error)))
