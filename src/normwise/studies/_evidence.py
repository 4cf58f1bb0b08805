"""What a study found: rows, verdicts, tables and charts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from normwise._parts import page
from normwise.errors import NotKnown
from normwise.rendering import Text, both
from normwise.studies._study import Claim, Figure, Outcome, Params, Rows, Table, Verdict

__all__ = ["Evidence", "Unrun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrun:
    """A trial without a result: not started yet, or given up."""

    params: Params
    attempts: int = 0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a study found.

    Args:
        study: its name.
        part: its module.
        rows: what the trials measured.
        unrun: the trials without a result.
        quick: whether the small set was asked for.
        seeds: how many seeds were asked for.
        ledger: where the rows are kept.
        data: SHA-256 of what was read, by name.
    """

    study: str
    part: ModuleType
    rows: Rows
    unrun: tuple[Unrun, ...] = ()
    quick: bool = False
    seeds: int = 1
    ledger: Path | None = None
    data: dict[str, str]

    @property
    def finished(self) -> bool:
        """Return whether every trial that was asked for has a result."""
        return not self.unrun

    @property
    def cpu_seconds(self) -> float:
        """Return what the rows cost, in seconds of processor time."""
        return sum(row.cpu_seconds for row in self.rows)

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Return what is found of each claim."""
        return tuple(self._verdict(claim) for claim in self.part.CLAIMS)

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        """Return the tables and charts whose trials have been run."""
        return tuple(found for make in self.part.FIGURES if (found := self._figure(make)) is not None)

    def page(self, lang: str = "en") -> str:
        """Return the study's page: claim, source, method, what would refute it, cost."""
        return page(self.part, lang)

    def to_json(self) -> str:
        """Return everything as JSON."""
        return self._rendered("json")

    def to_html(self) -> str:
        """Return one self-contained page."""
        return self._rendered("html")

    def save(self, path: str | Path, *, lang: str = "en") -> None:
        """Write a file; the suffix decides what: .html, .json, .csv, .jsonl, .parquet or .txt.

        Raises:
            ValueError: no such format.
            StudyError: the package of the format is missing.
            OSError: it cannot be written.
        """
        from normwise.studies import reports

        reports.save(self, Path(path), lang=lang)

    def __str__(self) -> str:
        """Return the table for a terminal."""
        return self._rendered("text")

    def _repr_html_(self) -> str:
        return self.to_html()

    def _rendered(self, format: str, **options: Any) -> str:
        from normwise.studies import reports

        return reports.render(self, format, **options)

    def _verdict(self, claim: Claim) -> Verdict:
        try:
            found = claim.judge(self.rows)
            outcome, says = found.outcome, found.says
        except NotKnown as missing:
            outcome, says = Outcome.OPEN, missing.why
        except Exception as failure:  # of rows that the study does not write: a file that somebody else made
            outcome, says = Outcome.OPEN, _unreadable(failure)
        return Verdict(claim=claim.text, source=claim.source, outcome=outcome, says=says)

    def _figure(self, make: Callable[[Rows], Figure]) -> Figure | None:
        try:
            return make(self.rows) if self.rows else None  # a figure of nothing would be its headings
        except NotKnown:
            return None
        except Exception as failure:
            return Table(title=getattr(make, "__name__", ""), columns=("",), rows=((_unreadable(failure),),))


def _unreadable(failure: Exception) -> Text:
    said = f"{type(failure).__name__}: {failure}"
    return both(f"the rows are not those of the study ({said})", f"这些数据不是该研究的数据（{said}）")
