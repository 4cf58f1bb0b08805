"""SARIF 2.1.0 for code scanning: the rules that ran, and a result for each finding.

The standard is https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html. By default the results are the
findings that count: GitHub opens an alert for every result, also for one whose ``kind`` is ``pass`` (microsoft/PSRule
issue 955) or that is suppressed (github/codeql-action issue 1230), and refuses a log with a result that names no file
(issue 2459): ``Sources`` says which file that is. It shows the message and the first location, no logical ones, so the
message names the modules. With ``full`` every rule has a result, and suppressed findings are among them. A rule that
could not judge is always told of, as a notification. The text is English.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from normwise.checkup.finding import Basis, Finding, Severity, Suppressed
from normwise.checkup.reports import _pages, _view
from normwise.checkup.reports._sources import Source, Sources
from normwise.checkup.reports._words import words
from normwise.rendering.cleaning import clean, respelled, visible
from normwise.rendering.plain import plain
from normwise.rendering.prose import blocks

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = ["render"]

SUFFIXES = (".sarif", ".sarif.json")
FILE_OPTIONS: dict[str, Any] = {}

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_PRECISION = {Basis.PROOF: "very-high", Basis.MEASURED: "high", Basis.PATTERN: "medium"}  # GitHub's words
_BASELINE = "baseline"
_SAY = words("en")
_KINDS = {"ignore": "inSource", "configuration": "external"}  # where a suppression is kept
# GitHub's limits (docs.github.com, "SARIF support for code scanning"): locations of a result, characters of a
# description. Ten of its twenty tags for a rule are shown; we have one.
_MOST_LOCATIONS, _LONGEST_DESCRIPTION = 1_000, 1_024
# "{" begins a placeholder of a message and "[" a link (sections 3.11.5 and 3.11.6)
_MESSAGE = str.maketrans({"{": "{{", "}": "}}", "\\": "\\\\", "[": "\\[", "]": "\\]"})
_BRACES = str.maketrans({"{": "{{", "}": "}}"})


def render(report: Report, *, full: bool = False) -> str:
    """Return the report as a SARIF log with one run.

    Args:
        report: what to show.
        full: a result also for each rule that passed (``pass``) or could not judge (``open``), and for suppressed
            findings.
    """
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [_run(report, full)]}
    return respelled(json.dumps(_shown(log), indent=2, allow_nan=False), "\\u{:04x}") + "\n"


def _run(report: Report, full: bool) -> dict[str, Any]:
    codes = _codes(report)
    results = _Results(report, codes)
    return {
        "tool": {"driver": {**_driver(report), "rules": [_rule(code, report) for code in codes]}},
        "automationDetails": {"id": f"normwise/{clean(report.target)}/"},
        "language": "en",
        "columnKind": "unicodeCodePoints",
        "invocations": [_invocation(report, codes)],
        "results": list(results.all() if full else map(results.finding, report.findings)),
        "properties": _cleaned(
            {
                "target": report.target,
                "inputs": report.inputs,
                "weights": report.weights,
                "effort": report.effort,
                "notes": report.notes,
                "versions": report.versions,
                "cost": asdict(report.cost),
                "unchanged": report.unchanged,
                "passed": report.passed,
                "suppressed": len(report.suppressed),
            }
        ),
    }


def _codes(report: Report) -> list[str]:
    """Return the rules that ran."""
    quiet = (each.finding for each in report.suppressed)
    judged = (each.code for each in (*report.findings, *quiet, *report.not_checked))
    return sorted({*judged, *report.passed})


def _driver(report: Report) -> dict[str, Any]:
    return {"name": "normwise", "version": report.versions.get("normwise") or version("normwise")}


def _rule(code: str, report: Report) -> dict[str, Any]:
    findings = [each for each in (*report.findings, *(s.finding for s in report.suppressed)) if each.code == code]
    name = _pages.name_of(code) or next((each.name for each in findings), "")
    rule = _pages.rule_of(code)
    bag: dict[str, Any] = {"tags": [code[:3]]}
    if findings:  # that of its weakest finding here
        bag["precision"] = _PRECISION[max((each.basis for each in findings), key=lambda basis: basis.rank)]
    described: dict[str, Any] = {"id": code, "name": _pascal(name), "properties": bag}
    if rule:
        page = _pages.page_of(code, "en").strip()
        described |= {
            "shortDescription": {"text": _pages.title_of(code, "en").translate(_BRACES)},
            "fullDescription": {"text": _finds(page)[:_LONGEST_DESCRIPTION].translate(_BRACES)},
            "help": {"text": page.translate(_BRACES), "markdown": page.translate(_BRACES)},
            "defaultConfiguration": {"level": _LEVELS[rule.SEVERITY]},
        }
    return described


def _finds(page: str) -> str:
    """Return the first paragraph of a page: what the rule finds."""
    return next(("".join(words for _, words in pieces) for kind, pieces in blocks(page) if kind == "p"), "")


def _pascal(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-"))


def _invocation(report: Report, codes: Sequence[str]) -> dict[str, Any]:
    """Tell what was not checked and which suppressions are unused."""
    unused = (
        _notification(
            clean(f"unused suppression: {each.code} {each.pattern}, {each.by} {each.where}"), "warning", None, codes
        )
        for each in report.unused
    )
    return {
        "executionSuccessful": True,
        "toolExecutionNotifications": [
            _notification(clean(f"not checked: {each.why}"), "note", each.code, codes) for each in report.not_checked
        ],
        "toolConfigurationNotifications": list(unused),
    }


def _notification(text: str, level: str, code: str | None, codes: Sequence[str]) -> dict[str, Any]:
    rule = {} if code is None else {"associatedRule": {"id": code, "index": codes.index(code)}}
    return {"level": level, "message": _message(text), **rule}


def _message(text: str) -> dict[str, str]:
    """Return a message of cleaned lines."""
    return {"text": text.translate(_MESSAGE)}


class _Results:
    """Makes the results of one run; what one of them says of suppression and baseline, all of them must say."""

    def __init__(self, report: Report, codes: Sequence[str]) -> None:
        self.report = report
        self.index = {code: index for index, code in enumerate(codes)}
        self.sources = Sources(report)

    def all(self) -> Iterator[dict[str, Any]]:
        """Yield a result for each finding, suppressed finding, rule that passed and rule that could not judge."""
        report = self.report
        quiet = {"suppressions": []} if report.suppressed else {}
        compared = any(each.by == _BASELINE for each in report.suppressed)
        shared = quiet | ({"baselineState": "new"} if compared else {})
        yield from (self.finding(each) | shared for each in report.findings)
        yield from (self.finding(each.finding) | shared | _suppression(each) for each in report.suppressed)
        yield from (self._verdict(code, "pass", "passed") | shared for code in report.passed)
        for each in report.not_checked:
            yield self._verdict(each.code, "open", clean(f"not checked: {each.why}")) | shared

    def finding(self, finding: Finding) -> dict[str, Any]:
        """Return the result of a finding."""
        paths = list(dict.fromkeys(clean(path) for path in finding.paths or (finding.path,)))
        kept, left = paths[:_MOST_LOCATIONS], len(paths) - len(paths[:_MOST_LOCATIONS])
        return {
            "ruleId": finding.code,
            "ruleIndex": self.index[finding.code],
            "kind": "fail",
            "level": _LEVELS[finding.severity],
            "message": _message("\n".join(self._says(finding, left))),
            "locations": _locations(kept, self.sources),
            "partialFingerprints": {"normwise/v1": finding.fingerprint},
            "properties": _cleaned(
                {
                    "basis": finding.basis,
                    "places": len(paths),
                    "evidence": finding.evidence,
                    "counterfactual": finding.counterfactual,
                    "reproduce": self.report.reproduce(finding),
                }
            ),
        }

    def _says(self, finding: Finding, left: int) -> Iterator[str]:
        places, count = _view.places(finding, _SAY)
        code = self.sources.code(finding.path)
        yield clean(finding.message)
        yield f"Where: {places}" + (f" ×{count}" if count > 1 else "") + (f" ({clean(code)})" if code else "")
        if finding.counterfactual:
            yield f"Effect: {_view.effect(finding, _SAY)}"
        yield f"Fix: {clean(finding.fix)}"
        if left:
            yield f"{left} more places are in the JSON report."

    def _verdict(self, code: str, kind: str, text: str) -> dict[str, Any]:
        rule = {"ruleId": code, "ruleIndex": self.index[code]}
        return {**rule, "kind": kind, "level": "none", "message": _message(text)}


def _suppression(each: Suppressed) -> dict[str, Any]:
    """Return how a result is kept quiet; what a baseline holds is no choice of somebody's, but known before."""
    if each.by == _BASELINE:
        return {"baselineState": "unchanged"}
    kept = {"kind": _KINDS.get(each.by, "external"), "status": "accepted", "justification": clean(each.reason)}
    return {"suppressions": [{**kept, "properties": _cleaned({"by": each.by, "where": each.where})}]}


def _locations(paths: Sequence[str], sources: Sources) -> list[dict[str, Any]]:
    """Return a location for each line, with the modules that run it, those without a line last."""
    by_source: dict[Source | None, list[str]] = {}
    for path in paths:
        by_source.setdefault(sources.of(path), []).append(path)
    return [
        {**({"physicalLocation": _physical(source)} if source else {}), "logicalLocations": list(map(_logical, inside))}
        for source, inside in sorted(by_source.items(), key=lambda item: item[0] is None)
    ]


def _physical(source: Source) -> dict[str, Any]:
    artifact = {"uri": quote(source.file), "uriBaseId": "%SRCROOT%"}
    return {"artifactLocation": artifact, "region": {"startLine": source.line}}


def _logical(path: str) -> dict[str, Any]:
    name = path or "model"
    return {"fullyQualifiedName": name, "name": name.rpartition(".")[2], "kind": "module"}


def _cleaned(value: Any) -> Any:
    """Return what was measured as JSON has it, every text in it cleaned."""
    return _each_text(plain(value), clean)


def _shown(log: Any) -> Any:
    """Return the log without a hidden character; the line ends of messages and pages are ours."""
    return _each_text(log, lambda text: "\n".join(map(visible, text.split("\n"))))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {change(key): _each_text(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_each_text(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value
