"""What a study is made of: claims with their judges, tables and charts; plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import nan
from typing import Any, TypeAlias, overload

from normwise.errors import NotKnown
from normwise.rendering import Text, both
from normwise.rendering.plots import Chart
from normwise.studies._seeds import mean, spelled

__all__ = ["Claim", "Figure", "Judgement", "Outcome", "Params", "Row", "Rows", "Table", "Verdict"]

Params: TypeAlias = Mapping[str, Any]  # of a trial: strings, numbers, booleans, None, lists of them


class Outcome(StrEnum):
    """What the evidence says of a claim."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    DEPENDS = "depends on"
    OPEN = "not concluded"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge found.

    Args:
        outcome: of the claim.
        says: the sentence with the figures that decided; with "depends on", the condition.
    """

    outcome: Outcome
    says: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence that people repeat, who says it, and what decides it here.

    Args:
        text: the claim, in English and Chinese.
        source: author, year, address.
        judge: reads the rows; raises ``NotKnown`` where the trials that it needs are missing.
    """

    text: Text
    source: str
    judge: Callable[[Rows], Judgement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A claim with what was found."""

    claim: Text
    source: str
    outcome: Outcome
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Figures in rows.

    Args:
        title: what it shows.
        columns: headings, with units.
        rows: a text or a number for each column; None where there is none.
        note: the conditions, and how to read it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]
    note: str = ""


Figure: TypeAlias = Table | Chart


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one trial measured.

    Args:
        params: of the trial, with its seed.
        metrics: numbers and lists of numbers by name; what diverged is NaN or infinite.
        seconds: of wall time.
        cpu_seconds: of the process.
        peak_bytes: of its resident memory.
        attempts: how often it was started.
        conditions: versions, threads, the machine.
    """

    params: Params
    metrics: Mapping[str, Any]
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    attempts: int = 1
    conditions: Mapping[str, Any] = field(default_factory=dict)


class Rows(Sequence[Row]):
    """The rows of a study, and what judges ask of them.

    Examples:
        >>> rows = Rows(Row(params={"rate": rate, "seed": seed}, metrics={"loss": rate + seed})
        ...             for rate in (1.0, 2.0) for seed in (0, 1))
        >>> rows.where(rate=1.0).mean("loss"), rows.where(rate=2.0).spread("loss"), rows.distinct("rate")
        (1.5, (2.0, 3.0), (1.0, 2.0))
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        """Return a row, or some."""
        return Rows(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def where(self, **params: Any) -> Rows:
        """Return the rows whose parameters have these values.

        Raises:
            NotKnown: there is none.
        """
        found = Rows(row for row in self if all(row.params.get(name) == value for name, value in params.items()))
        if not found:
            said = ", ".join(f"{name} {value}" for name, value in params.items())
            raise NotKnown(both(f"no trial with {said or 'any parameters'} has been run", f"没有运行过 {said} 的试验"))
        return found

    def has(self, **params: Any) -> bool:
        """Return whether there are rows with these values."""
        return any(all(row.params.get(name) == value for name, value in params.items()) for row in self)

    def distinct(self, name: str) -> tuple[Any, ...]:
        """Return the values of a parameter, in the order of the trials."""
        return tuple(dict.fromkeys(row.params[name] for row in self if name in row.params))

    def values(self, metric: str) -> list[Any]:
        """Return a metric of every row."""
        return [row.metrics[metric] for row in self if metric in row.metrics]

    def mean(self, metric: str) -> float:
        """Return the mean over the rows: NaN or infinite where one is.

        Raises:
            NotKnown: no row has it.
        """
        return mean(self._numbers(metric))

    def spread(self, metric: str) -> tuple[float, float]:
        """Return the smallest and the largest over the rows; both are NaN where one is.

        Raises:
            NotKnown: no row has it.
        """
        found = self._numbers(metric)
        return (nan, nan) if any(value != value for value in found) else (min(found), max(found))

    def said(self, metric: str, form: str = "") -> str:
        """Spell the mean and the range over the rows: see ``_seeds.spelled``.

        Raises:
            NotKnown: no row has it.
        """
        return spelled(self._numbers(metric), form)

    def groups(self, *names: str) -> list[tuple[tuple[Any, ...], Rows]]:
        """Return the rows by the values of these parameters, in the order of the trials; None for one that is absent.

        Examples:
            >>> rows = Rows(Row(params={"rate": rate, "seed": seed}, metrics={}) for seed in (0, 1) for rate in (1, 2))
            >>> [(rate, len(some)) for (rate,), some in rows.groups("rate")]
            [(1, 2), (2, 2)]
        """
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in self:
            found.setdefault(tuple(row.params.get(name) for name in names), []).append(row)
        return [(values, Rows(some)) for values, some in found.items()]

    def curve(self, metric: str) -> tuple[list[float], list[float], list[float]]:
        """Return mean, smallest and largest over the rows at every entry of a metric that is a list.

        Raises:
            NotKnown: no row has it.
        """
        lists = self.values(metric)
        if not lists:
            raise NotKnown(both(f"no trial measured {metric}", f"没有试验测量过 {metric}"))
        columns = [[float(value) for value in column] for column in zip(*lists, strict=False)]
        return [mean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]

    def _numbers(self, metric: str) -> list[float]:
        found = [float(value) for value in self.values(metric)]
        if not found:
            raise NotKnown(both(f"no trial measured {metric}", f"没有试验测量过 {metric}"))
        return found
