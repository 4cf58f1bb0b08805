"""The result of a check or a map: verdicts, norm map, placement, profile, versions and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normwise.checkup.finding import Finding, NotChecked, Severity, Suppressed, Unused
from normwise.facts.records import Break, NormSite, Placement, ProfileRow

__all__ = ["Cost", "Report"]

_PYTHON = "nw."


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the check cost: wall seconds, passes of the model and the peak of resident memory in bytes."""

    seconds: float = 0.0
    forward_passes: int = 0
    backward_passes: int = 0
    repair_passes: int = 0  # of the two above: they ran the model with one thing changed, to prove a finding
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that is known about a target. ``print(report)`` is the table, notebooks show the page."""

    target: str
    inputs: str = "given"
    checkpoint_only: bool = False  # the target is a checkpoint by itself: there is nothing to run
    weights: str = "given"
    effort: str = "normal"
    call: str = ""  # how the same check is called again: Python, or a command line
    configuration: str | None = None  # FILE:LINE of the [tool.normwise] that was followed
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
    suppressed: tuple[Suppressed, ...] = ()  # found, and kept quiet by configuration, ``nw.ignore`` or a baseline
    unused: tuple[Unused, ...] = ()  # suppressions that kept nothing quiet
    rules_run: bool = True  # False for a map
    tolerances: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the rules that ran, by code
    unchanged: bool | None = None  # parameters and buffers bit-identical afterwards; None: not compared

    def worst(self) -> Severity | None:
        """Return the highest severity among the findings."""
        return min((f.severity for f in self.findings), key=lambda s: s.rank, default=None)

    def to_json(self) -> str:
        """Return the report in JSON, schema 1."""
        from normwise.checkup import reports

        return reports.render(self, "json")

    def reproduce(self, finding: Finding) -> str:
        """Return the line that makes this check again by the rule of one finding alone."""
        if self.call.startswith(_PYTHON):
            return f'{self.call[:-1]}, select=["{finding.code}"])'
        return f"{self.call} --select {finding.code}" if self.call else ""

    def to_html(self, *, lang: str = "en") -> str:
        """Return the report as one self-contained page, in English ("en") or Chinese ("zh")."""
        from normwise.checkup import reports

        return reports.render(self, "html", lang=lang)

    def to_markdown(self, *, lang: str = "en") -> str:
        """Return the report as Markdown, in English ("en") or Chinese ("zh")."""
        from normwise.checkup import reports

        return reports.render(self, "markdown", lang=lang)

    def to_sarif(self, *, full: bool = False) -> str:
        """Return the findings as a SARIF 2.1.0 log; ``full``: also the other rules and what is suppressed."""
        from normwise.checkup import reports

        return reports.render(self, "sarif", full=full)

    def to_text(self, *, lang: str = "en", full: bool = False) -> str:
        """Return the report as text, in English ("en") or Chinese ("zh"); ``print`` shows the English one."""
        from normwise.checkup import reports

        return reports.render(self, "text", lang=lang, full=full)

    def save(self, path: str | Path, *, lang: str = "en") -> Path:
        """Write the report; the suffix (.json, .html, .txt, .md, .sarif, .xml for JUnit) chooses the format.

        JSON and SARIF are English in any language.
        """
        from normwise.checkup import reports

        return reports.save(self, Path(path), lang=lang)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return self.to_html()
