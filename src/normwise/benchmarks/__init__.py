"""Benchmarks: how fast our norms are beside everybody's, and how much memory they keep; ``normwise bench``.

A benchmark is one file with a docstring and ``ZH`` (its page in two languages), ``SHAPE`` (what a shape is made of),
``SHAPES``, ``QUICK_SHAPES``, ``DTYPES``, ``QUICK_DTYPES``, ``METHOD``, ``QUICK`` (how often is measured) and
``contests(options, threads)``: what is measured together, each with ``check()``, ``entries()`` and
``run(method, advance)``. All checks come before the first measurement: what is wrong is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch

from normwise import kernels
from normwise._parts import collect, named
from normwise.benchmarks import batch_norm as batch_norm
from normwise.benchmarks import conversions as conversions
from normwise.benchmarks import llama as llama
from normwise.benchmarks import norms as norms
from normwise.benchmarks import small as small
from normwise.benchmarks._check import Wrong as Wrong
from normwise.benchmarks._contest import ADD_CLONE as ADD_CLONE
from normwise.benchmarks._contest import BACKWARD as BACKWARD
from normwise.benchmarks._contest import BOTH as BOTH
from normwise.benchmarks._contest import CLONE as CLONE
from normwise.benchmarks._contest import FORWARD as FORWARD
from normwise.benchmarks._machine import Machine as Machine
from normwise.benchmarks._machine import describe
from normwise.benchmarks._options import Options
from normwise.benchmarks._outputs import formats as formats
from normwise.benchmarks._outputs import render as render
from normwise.benchmarks._outputs import save as save
from normwise.benchmarks._outputs import suffixes as suffixes
from normwise.benchmarks._race import Method as Method
from normwise.benchmarks._result import OURS as OURS
from normwise.benchmarks._result import Result as Result
from normwise.benchmarks._result import Row as Row
from normwise.benchmarks._rivals import COMPILED as COMPILED
from normwise.benchmarks._rivals import EAGER as EAGER
from normwise.benchmarks._rivals import TORCH as TORCH
from normwise.benchmarks._rivals import TRANSFORMERS as TRANSFORMERS
from normwise.benchmarks._words import kernels_line as kernels_line
from normwise.rendering.progress import progress as progress

__all__ = [
    "ADD_CLONE",
    "BACKWARD",
    "BENCHMARKS",
    "BOTH",
    "CLONE",
    "COMPILED",
    "DEFAULT",
    "EAGER",
    "FORWARD",
    "OURS",
    "TORCH",
    "TRANSFORMERS",
    "Machine",
    "Method",
    "Result",
    "Row",
    "Wrong",
    "find",
    "formats",
    "kernels_line",
    "names",
    "progress",
    "render",
    "run",
    "save",
    "suffixes",
]

BENCHMARKS = collect(
    globals(),
    needs=("ZH", "SHAPE", "SHAPES", "QUICK_SHAPES", "DTYPES", "QUICK_DTYPES", "METHOD", "QUICK", "contests"),
)
DEFAULT = "norms"

Advance = Callable[[str, int, int], Any]  # what is running, measurements done, measurements in all


def names() -> tuple[str, ...]:
    """Return the names of the benchmarks, the default first.

    Examples:
        >>> names()
        ('norms', 'batch-norm', 'conversions', 'llama', 'small')
    """
    return (DEFAULT, *(name for name in BENCHMARKS if name != DEFAULT))


def find(name: str) -> ModuleType:
    """Return a benchmark.

    Raises:
        ValueError: none is called so.
    """
    return named(name, {each: BENCHMARKS[each] for each in names()}, "benchmark")


def run(
    name: str = DEFAULT, *, method: Method | None = None, advance: Advance = lambda *_: None, **options: Any
) -> Result:
    """Check our layers, then measure them beside their rivals.

    Args:
        name: one of ``names()``.
        method: how often; the benchmark's own by default.
        advance: told what is running.
        options: ``threads``, ``shapes``, ``dtypes``, ``device``, ``quick``, ``eager``; see ``normwise bench --help``.

    Returns:
        What was measured; after Ctrl-C, until then.

    Raises:
        Wrong: one of our layers does not compute what it should.
        ValueError: no such benchmark, or options that it cannot have.
    """
    part = find(name)
    asked = Options.of(part, **options)
    how = method or (part.QUICK if asked.quick else part.METHOD)
    machine = describe(asked.device)
    runs = {count: part.contests(asked, count) for count in asked.threads}
    for count, contests in runs.items():
        with _threads(count):
            for each in contests:
                advance(f"checking {_title(each)}", 0, 1)
                each.check()
    rows, finished = _measured(runs, how, advance)
    return Result(
        benchmark=name,
        machine=machine,
        kernels=kernels.backends(),
        method=how,
        rows=tuple(rows),
        finished=finished,
    )


def _measured(runs: dict[int, list[Any]], method: Method, advance: Advance) -> tuple[list[Row], bool]:
    """Run the contests of each number of threads; Ctrl-C leaves those that were run."""
    total = sum((method.rounds + 1) * each.entries() for contests in runs.values() for each in contests)
    steps = iter(range(1, total + 1))
    rows: list[Row] = []
    try:
        for count, contests in runs.items():
            with _threads(count):
                for each in contests:
                    step = partial(_step, advance, _title(each), steps, total)
                    found, finished = each.run(method, step)
                    rows += found
                    if not finished:
                        return rows, False
    except KeyboardInterrupt:
        return rows, False
    return rows, True


def _step(advance: Advance, title: str, steps: Iterator[int], total: int) -> None:
    advance(title, next(steps, total), total)


def _title(contest: Any) -> str:
    setting = contest.setting
    dtype = str(setting.dtype).removeprefix("torch.")
    return f"{setting.layer} {'x'.join(map(str, setting.shape))} {dtype}"


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
