"""The method: rivals take turns, so that a busy moment of the machine hits all of them alike.

Every round measures each rival once and starts with another one than the round before. A measurement prepares (builds
the graph of a backward pass, for example), calls once where a call is short, and then times as many calls as fill the
time asked for.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

__all__ = ["Method", "Prepare", "Race", "Run", "quartiles", "race", "repeated"]

Run = Callable[[int], Any]  # calls as many times as it is told
Prepare = Callable[[], Run]
LONG = 0.3  # seconds: from here on one call says as much as several do, and rivals of seconds would take an hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How often is measured.

    Args:
        rounds: each measures every rival once.
        fill: seconds that the calls of one measurement take together, at least.
        least: calls of one measurement, at least, where a call is shorter than ``LONG``.
    """

    rounds: int = 7
    fill: float = 0.03
    least: int = 3

    def calls(self, seconds: float) -> int:
        """Return how many calls of so many seconds a measurement has.

        Examples:
            >>> Method().calls(1e-3), Method().calls(0.1), Method().calls(2.0)
            (30, 3, 1)
        """
        if seconds > LONG:
            return 1
        return max(self.least, math.ceil(self.fill / max(seconds, 1e-9)))


@dataclass(slots=True)
class Race:
    """Seconds a call by rival and round, why a rival did not run, and whether all rounds were run."""

    seconds: list[list[float]]
    calls: list[int]
    why: list[str | None]
    finished: bool = True
    order: list[int] = field(default_factory=list)  # of the rivals, as they were measured


def race(
    rivals: Sequence[Prepare],
    method: Method,
    *,
    clock: Callable[[], float] = time.perf_counter,
    settle: Callable[[], Any] = lambda: None,
    advance: Callable[[], Any] = lambda: None,
) -> Race:
    """Measure rivals in turns; Ctrl-C ends it with the rounds that were complete.

    Args:
        rivals: each prepares what is timed and returns it; one that raises on its first calls is left out.
        method: how often.
        clock: seconds.
        settle: waits until all that was called has run, on devices that answer before.
        advance: called after each measurement and each first call.
    """
    done = Race([[] for _ in rivals], [0] * len(rivals), [None] * len(rivals))
    long = [False] * len(rivals)
    try:
        for index, prepare in enumerate(rivals):
            try:
                run = prepare()
                run(1)  # compiles, fills caches
                first = _timed(run, 1, clock, settle)
                done.calls[index], long[index] = method.calls(first), first >= method.fill
            except Exception as failure:  # whatever a rival lacks, the others are measured
                done.why[index] = _reason(failure)
            advance()
        running = [index for index, why in enumerate(done.why) if why is None]
        for turn in range(method.rounds):
            shift = turn % max(len(running), 1)
            for index in running[shift:] + running[:shift]:
                run = rivals[index]()
                if not long[index]:  # else what it finds in caches does not matter
                    run(1)
                done.order.append(index)
                done.seconds[index].append(_timed(run, done.calls[index], clock, settle))
                del run  # its graph goes before the next rival builds one
                advance()
    except KeyboardInterrupt:
        complete = min((len(done.seconds[index]) for index in range(len(rivals)) if done.calls[index]), default=0)
        done.seconds = [each[:complete] for each in done.seconds]
        done.finished = False
    return done


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile.

    Examples:
        >>> quartiles([4.0, 1.0, 2.0, 3.0, 5.0]), quartiles([7.0])
        ((2.0, 3.0, 4.0), (7.0, 7.0, 7.0))
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def repeated(call: Callable[[], Any]) -> Run:
    """Return what calls so often as it is told."""

    def run(calls: int) -> None:
        for _ in repeat(None, calls):
            call()

    return run


def _timed(run: Run, calls: int, clock: Callable[[], float], settle: Callable[[], Any]) -> float:
    """Return seconds a call."""
    with _no_collection():
        settle()
        start = clock()
        run(calls)
        settle()
        return (clock() - start) / calls


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of what is timed: it would hit one rival and not the next."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _reason(failure: Exception) -> str:
    """Return the first line of a failure that says something; a line that ends in a colon says it in the next."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    told = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(failure).__name__}: {told}" if told else type(failure).__name__
