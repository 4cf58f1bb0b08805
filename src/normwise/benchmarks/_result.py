"""What a benchmark measured: rows, and the conditions they were measured under."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from normwise.benchmarks._machine import Machine
from normwise.benchmarks._race import Method

__all__ = ["OURS", "Result", "Row"]

OURS = "normwise"
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: what one rival took for one thing.

    Args:
        layer: what is computed.
        shape: of the input.
        dtype: of input and parameters.
        layout: of memory, where it is not the usual one.
        threads: of torch.
        what: forward, backward, ...
        rival: who computes it.
        ms: median over rounds of the milliseconds of a call; None where it did not run.
        low: lower quartile of the same.
        high: upper quartile of the same.
        rounds: behind the median.
        calls: of one round.
        gb_per_s: bytes that must move, over the median, in 10^9 bytes a second.
        copies: the median over that of ``x.clone()`` in the same rounds.
        relative: the median over ours for the same thing, so 2 is twice as slow as ours.
        saved: bytes kept for the backward pass, over those of the input.
        peak_bytes: most memory held at once, beyond what was held before.
        why: it did not run.
    """

    layer: str
    shape: tuple[int, ...]
    dtype: str
    threads: int
    what: str
    rival: str
    layout: str | None = None
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    calls: int = 0
    gb_per_s: float | None = None
    copies: float | None = None
    relative: float | None = None
    saved: float | None = None
    peak_bytes: int | None = None
    why: str | None = None

    @property
    def contest(self) -> tuple[int, str, tuple[int, ...], str, str | None]:
        """Return what rows share that were measured together."""
        return self.threads, self.layer, self.shape, self.dtype, self.layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A benchmark that ran.

    Args:
        benchmark: its name.
        machine: where it ran.
        kernels: each of our kernels, None if it runs there, else the reason why not; best first.
        method: how often was measured.
        rows: what was measured.
        finished: False after Ctrl-C: the rows are those measured until then.
    """

    benchmark: str
    machine: Machine
    kernels: dict[str, str | None]
    method: Method
    rows: tuple[Row, ...]
    finished: bool = True

    def contests(self) -> Iterator[list[Row]]:
        """Yield rows that were measured together."""
        for _, rows in groupby(self.rows, key=lambda row: row.contest):
            yield list(rows)

    def find(self, **wanted: Any) -> Row:
        """Return the one row with these values.

        Raises:
            LookupError: none, or several.
        """
        found = [row for row in self.rows if all(getattr(row, name) == value for name, value in wanted.items())]
        if len(found) != 1:
            raise LookupError(f"{len(found)} rows of {self.benchmark} have {wanted}")
        return found[0]

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds."""
        return {
            "schema": SCHEMA,
            "benchmark": self.benchmark,
            "machine": dataclasses.asdict(self.machine),
            "kernels": self.kernels,
            "method": dataclasses.asdict(self.method),
            "finished": self.finished,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }
