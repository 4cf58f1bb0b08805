"""Annotations on GitHub: a workflow command for each finding, then one line that sums up.

Print them in a step of a workflow (`--format github`); GitHub shows each beside its line where that is in the
repository. https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normwise.checkup.finding import Finding, Severity
from normwise.checkup.reports import _quiet, _view
from normwise.checkup.reports._sources import Source, Sources
from normwise.checkup.reports._words import Words, words
from normwise.rendering.cleaning import clean, obeyed_by_none, shorten

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = ["render"]

SUFFIXES = ()  # a file of commands would be read by nobody
FILE_OPTIONS: dict[str, Any] = {}

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"})
_LONGEST_TARGET = 200


def render(report: Report, *, lang: str = "en") -> str:
    """Return the report as commands of a workflow.

    Args:
        report: what to show.
        lang: language of the words around the data, "en" or "zh".
    """
    say = words(lang)
    sources = Sources(report)
    lines = []
    for each in report.findings:
        lines.append(_command(_COMMANDS[each.severity], _title(each), _message(each, say), sources.of(each.path)))
    for row in _quiet.unused(report, say):
        said = f"{say('unused suppression')}: {row.code} {row.pattern}, {row.said}"
        lines.append(_command("warning", f"normwise ({row.code})", said, None))
    return "\n".join([*lines, _summary(report, say)]) + "\n"


def _command(name: str, title: str, message: str, source: Source | None) -> str:
    """Write a command; `%`, line ends and, in properties, `:` and `,` would end what they stand in."""
    properties = {"title": title} | ({"file": source.file, "line": str(source.line)} if source else {})
    given = ",".join(f"{key}={value.translate(_PROPERTY)}" for key, value in properties.items())
    return f"::{name} {given}::{message.translate(_DATA)}"


def _title(finding: Finding) -> str:
    return f"normwise ({clean(finding.code)}) {clean(finding.name)}"


def _message(finding: Finding, say: Words) -> str:
    places, count = _view.places(finding, say)
    lines = [f"{places} ×{count}" if count > 1 else places, clean(say.text(finding.message))]
    if finding.counterfactual:
        lines.append(f"{say('effect')}: {_view.effect(finding, say)}")
    lines += [f"{say('fix')}: {clean(say.text(finding.fix))}", f"{say('why')}: {_view.explained(finding, say)}"]
    return "\n".join(lines)


def _summary(report: Report, say: Words) -> str:
    verb = "check" if report.rules_run else "map"
    verdict = " · ".join(part for part, _ in _view.headline(report, say))
    return obeyed_by_none(f"normwise {verb} {shorten(clean(report.target), _LONGEST_TARGET)}: {verdict}")
