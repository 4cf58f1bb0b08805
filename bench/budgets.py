"""What the kernels are held to: each promise with its limit, the figure measured here, and ok or over.

``python bench/budgets.py`` runs ``normwise bench`` on one and two threads (``--threads N`` for others) and exits with 1
if anything is over its limit or could not be measured. Figures are medians of interleaved rounds; a machine that is
busy with something else says nothing about the kernels. ``--quick`` takes a shape or two and few rounds.

Every shape and dtype is measured in a process of its own: what others leave in the C library's heap decides whether a
copy gets memory that it has to fault in, and with that by a factor of ten what a multiple of a copy is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from normwise import benchmarks
from normwise.benchmarks import (
    ADD_CLONE,
    BACKWARD,
    BOTH,
    COMPILED,
    FORWARD,
    OURS,
    TORCH,
    TRANSFORMERS,
    Result,
    Row,
)
from normwise.benchmarks.small import OUR_FUNCTION, TORCH_FUNCTION

BENCHMARKS = ("norms", "batch-norm", "small", "llama")


@dataclass(frozen=True)
class Promise:
    """One line: a ratio of two rows of a contest, and what it may be."""

    what: str
    limit: float
    value: float | None
    at_least: bool = False

    @property
    def kept(self) -> bool:
        """Return whether the figure is within its limit."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        """Return the line."""
        figure = "not measured" if self.value is None else f"{self.value:.3g}"
        limit = f"{'>=' if self.at_least else '<='} {self.limit:g}"
        return f"{'ok' if self.kept else 'OVER':5} {figure:>12} {limit:>8}  {self.what}"


Lines = list[Promise | str]


def in_a_process(work: Callable[[], Lines]) -> Lines:
    """Return what ``work`` returns in a process of its own."""
    context = get_context("fork")  # the parent computes nothing, so there are no threads to lose
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(work()))
    process.start()
    there.close()  # so that a process that dies ends what is read
    lines = here.recv()
    process.join()
    return lines


def main(apart: Callable[[Callable[[], Lines]], Lines] = in_a_process) -> int:
    """Run, print, and say by the exit code whether everything is kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="one of the benchmarks")
    given = parser.parse_args()
    promises: list[Promise] = []
    parts = [
        (name, threads, shape, dtype, given.quick)
        for name in given.only or BENCHMARKS
        for threads in given.threads or (1, 2)
        for shape in _asked(name, "SHAPES", given.quick)
        for dtype in _asked(name, "DTYPES", given.quick)
    ]
    for each in parts:
        for line in apart(partial(_measured, *each)):
            print(line, flush=True)
            if isinstance(line, Promise):
                promises.append(line)
    over = sum(not promise.kept for promise in promises)
    print(f"{len(promises) - over} of {len(promises)} kept")
    return int(over > 0)


def _asked(name: str, what: str, quick: bool) -> tuple[Any, ...]:
    return getattr(benchmarks.find(name), f"QUICK_{what}" if quick else what)


def _measured(name: str, threads: int, shape: tuple[int, ...], dtype: torch.dtype, quick: bool) -> Lines:
    result = benchmarks.run(name, threads=(threads,), shapes=(shape,), dtypes=(dtype,), quick=quick)
    return list(promised(result) if name != "llama" else told(result))


def promised(result: Result) -> Iterator[Promise]:
    """Yield what is promised about the contests of a result."""
    for rows in result.contests():
        held = {(row.what, row.rival): row for row in rows}
        first = rows[0]
        name = _name(first)
        if result.benchmark == "norms":
            yield from _of_rows(name, first.layer, held)
        elif result.benchmark == "small":
            yield from _of_calls(name, held)
        elif first.layer == "BatchNorm2d" and first.dtype == "float32" and not first.layout:
            value = _ratio(held, (FORWARD, TORCH), (FORWARD, OURS))
            yield Promise(f"{name}: training forward, torch.nn over ours", 3.0, value, at_least=True)


def _of_rows(name: str, layer: str, held: dict[tuple[str, str], Row]) -> Iterator[Promise]:
    ours = held.get((FORWARD, OURS)), held.get((BACKWARD, OURS)), held.get((BOTH, OURS))
    forward, backward, both = ours
    if layer.startswith("Add"):
        value = _ratio(held, (FORWARD, OURS), (FORWARD, ADD_CLONE))
        yield Promise(f"{name}: forward over torch.add and clone", 1.3, value)
    else:
        yield Promise(f"{name}: forward over x.clone()", 1.3, forward and forward.copies)
        yield Promise(f"{name}: backward over x.clone()", 2.5, backward and backward.copies)
    yield Promise(f"{name}: kept for backward over the input", 1.01, both and both.saved)
    against = {"RMSNorm": {TORCH: 5.0, COMPILED: 1.5}, "LayerNorm": {TORCH: 1.0}}.get(layer, {})
    for rival, limit in against.items():
        value = _ratio(held, (BOTH, rival), (BOTH, OURS))
        yield Promise(f"{name}: forward+backward, {rival} over ours", limit, value, at_least=True)


def _of_calls(name: str, held: dict[tuple[str, str], Row]) -> Iterator[Promise]:
    for what in (FORWARD, BOTH):
        value = _ratio(held, (what, OUR_FUNCTION), (what, TORCH_FUNCTION))
        yield Promise(f"{name}: {what}, {OUR_FUNCTION} over {TORCH_FUNCTION}", 1.3, value)


def told(result: Result) -> Iterator[str]:
    """Yield what the training steps took; nothing is promised about them."""
    for rows in result.contests():
        ours, theirs = (next(row for row in rows if row.rival == name) for name in (OURS, TRANSFORMERS))
        if ours.ms and theirs.ms and ours.peak_bytes and theirs.peak_bytes:
            yield (
                f"{_name(ours)}: a training step takes "
                f"{theirs.ms:.0f} ms as it is, {ours.ms:.0f} ms with our norms ({theirs.ms / ours.ms:.2f}x); peak "
                f"{theirs.peak_bytes / 1e6:.0f} MB, {ours.peak_bytes / 1e6:.0f} MB"
            )


def _name(row: Row) -> str:
    layout = f" {row.layout}" if row.layout else ""
    return f"{row.layer} {list(row.shape)} {row.dtype}{layout}, {row.threads} thread{'s' * (row.threads > 1)}"


def _ratio(held: dict[tuple[str, str], Row], one: tuple[str, str], other: tuple[str, str]) -> float | None:
    over, under = (row and row.ms for row in (held.get(one), held.get(other)))
    return over / under if over and under else None


if __name__ == "__main__":
    sys.exit(main())
