"""The result of a check or a map: verdicts, norm map, placement, profile, versions and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from normwise.checkup.finding import Finding, NotChecked, Severity
from normwise.facts.records import Break, NormSite, Placement, ProfileRow

__all__ = ["Cost", "Report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the check cost: wall seconds, forward passes and the peak of resident memory in bytes."""

    seconds: float = 0.0
    forward_passes: int = 0
    backward_passes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that is known about a target. ``print(report)`` is the table, notebooks show the page."""

    target: str
    inputs: str = "given"
    weights: str = "given"
    notes: tuple[str, ...] = ()  # what was reduced, generated or assumed
    versions: Mapping[str, str] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    placement: Placement = field(default_factory=Placement)
    norms: tuple[NormSite, ...] = ()
    listed_apart: tuple[NormSite, ...] = ()  # renormalised probabilities, weight standardisation: not norms
    not_executed: tuple[str, ...] = ()
    breaks: tuple[Break, ...] = ()
    profile: tuple[ProfileRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    passed: tuple[str, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    rules_run: bool = True  # False for a map
    unchanged: bool | None = None  # parameters and buffers bit-identical afterwards; None: not compared

    def worst(self) -> Severity | None:
        """Return the highest severity among the findings."""
        return min((f.severity for f in self.findings), key=lambda s: s.rank, default=None)

    def to_json(self) -> str:
        """Return the report in JSON, schema 1."""
        from normwise.checkup import reports

        return reports.render(self, "json")

    def to_html(self) -> str:
        """Return the report as one self-contained page."""
        from normwise.checkup import reports

        return reports.render(self, "html")

    def save(self, path: str | Path) -> Path:
        """Write the report; the suffix (.json, .html, .txt) chooses the format."""
        from normwise.checkup import reports

        return reports.save(self, Path(path))

    def __str__(self) -> str:
        from normwise.checkup import reports

        return reports.render(self, "text")

    def _repr_html_(self) -> str:
        return self.to_html()
