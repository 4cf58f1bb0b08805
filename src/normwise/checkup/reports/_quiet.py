"""What was found and kept quiet, and what kept nothing quiet, as rows that every format shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from normwise.checkup.finding import Finding
from normwise.checkup.reports import _view
from normwise.checkup.reports._words import Words
from normwise.rendering.cleaning import clean

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = ["QuietRow", "UnusedRow", "suppressed", "unused"]

_BY = {"configuration": "configuration", "ignore": "nw.ignore", "baseline": "baseline"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietRow:
    """A suppressed finding in words: the rule, its places, who said so and why."""

    code: str
    name: str
    where: str
    message: str
    said: str  # by what, and where that stands
    reason: str
    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedRow:
    """A suppression that met nothing, in words."""

    code: str
    pattern: str
    said: str
    reason: str


def suppressed(report: Report, say: Words) -> list[QuietRow]:
    """Return the findings that do not count."""
    return [
        QuietRow(
            code=clean(each.finding.code),
            name=clean(each.finding.name),
            where=_view.places(each.finding, say)[0],
            message=clean(say.text(each.finding.message)),
            said=_said(each.by, each.where, say),
            reason=clean(say.text(each.reason)),
            finding=each.finding,
        )
        for each in report.suppressed
    ]


def unused(report: Report, say: Words) -> list[UnusedRow]:
    """Return the suppressions that met no finding."""
    return [
        UnusedRow(
            code=clean(each.code),
            pattern=clean(each.pattern),
            said=_said(each.by, each.where, say),
            reason=clean(say.text(each.reason)),
        )
        for each in report.unused
    ]


def _said(by: str, where: str, say: Words) -> str:
    return " ".join(filter(None, [say(_BY[by]) if by in _BY else clean(by), clean(where)]))
