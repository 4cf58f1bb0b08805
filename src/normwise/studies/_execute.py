"""Runs one trial in a process of its own: what every engine calls, here or on another machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

__all__ = ["Answer", "Order", "execute"]

_WORKER = str(Path(__file__).with_name("_worker.py"))
_TICK = 0.1  # s between two looks at the clock and at ``stop``
_TAIL = 2000  # characters of what a worker printed that are kept
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One trial to run; plain data, so that it can travel.

    Args:
        study: the module of the study, as it is imported.
        version: that the module must have.
        params: of the trial, with its seed.
        data: the SHA-256 of what it reads, by name.
        time_limit: s from the start of the process.
        memory_limit: bytes that it takes, beside the libraries it loads.
    """

    study: str
    version: int
    params: Mapping[str, Any]
    data: Mapping[str, str] = field(default_factory=dict)
    time_limit: float | None = None
    memory_limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a trial.

    Args:
        outcome: "done"; "failed" for an exception of the study, "memory" and "timeout" at a limit, "killed" when the
            process ended without an answer, "stopped" when the runner ended it; "version" and "data" when the worker
            has another study or reads other bytes.
        metrics: of a trial that is done.
        error: otherwise: one line.
        seconds: of wall time.
        cpu_seconds: of the process.
        peak_bytes: of its resident memory.
        conditions: versions, threads, the machine; what was printed before it failed.
    """

    outcome: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    conditions: Mapping[str, Any] = field(default_factory=dict)


def execute(order: Order, stop: Callable[[], bool] = lambda: False) -> Answer:
    """Run a trial to its end, to its time limit, or until ``stop()``; faults of the trial never raise.

    The worker ends when its standard input closes, so also when this process dies, however it dies.
    """
    started = monotonic()
    with _started() as process:
        try:
            _send(process, order)
            printed, said, ended = _wait(process, order.time_limit, stop)
        except BaseException:
            _kill(process)
            raise
    return _answer(order, process.returncode, printed, said, ended, monotonic() - started)


def _started() -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    # -P: a study whose file is called like a module of the standard library must not stand in for it.
    like_this_one = ["-E"] if sys.flags.ignore_environment else []  # what PYTHONPATH holds is not wanted then
    command = [sys.executable, "-P", *like_this_one, "-W", "ignore", _WORKER]
    environment = os.environ | _ONE_THREAD
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True)


def _send(process: subprocess.Popen[bytes], order: Order) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it is dead already: the wait will say how
        process.stdin.write(json.dumps({**asdict(order), "path": sys.path}).encode() + b"\n")
        process.stdin.flush()


def _wait(
    process: subprocess.Popen[bytes], limit: float | None, stop: Callable[[], bool]
) -> tuple[bytes, bytes, str | None]:
    """Return what the worker answered and printed, and why it was ended, if it was."""
    deadline = None if limit is None else monotonic() + limit
    stdin, process.stdin = process.stdin, None  # communicate() would close it
    ended = None
    try:
        while True:
            try:
                return *process.communicate(timeout=_TICK), ended
            except subprocess.TimeoutExpired:
                if ended is None and stop():
                    ended = "stop"
                elif ended is None and deadline is not None and monotonic() > deadline:
                    ended = "timeout"
            # One that is over while its pipes are open has left a process of its own behind.
            if ended is not None or process.poll() is not None:
                _kill(process)
    finally:
        process.stdin = stdin


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the worker and whatever it has started."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _answer(order: Order, code: int, printed: bytes, said: bytes, ended: str | None, seconds: float) -> Answer:
    if ended == "timeout":
        return Answer(outcome="timeout", error=f"longer than the time limit of {order.time_limit:g} s", seconds=seconds)
    if ended == "stop":
        return Answer(outcome="stopped", error="interrupted", seconds=seconds)
    try:
        return Answer(**json.loads(printed))
    except (ValueError, TypeError):
        text = said.decode(errors="replace").strip()[-_TAIL:]
        error = ": ".join(filter(None, [_end(code), text.rpartition("\n")[2]]))
        return Answer(outcome="killed", error=error, seconds=seconds, conditions={"printed": text} if text else {})


def _end(code: int) -> str:
    if code >= 0:
        return f"the worker ended with exit code {code} and without an answer"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    hint = ", which is also how a system that runs out of memory ends a process" if name == "SIGKILL" else ""
    return f"the worker was killed by {name}{hint}"
