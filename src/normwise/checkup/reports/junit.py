"""JUnit XML for the test pages of CI services: a test case for each rule.

A finding is a failure, a rule that could not judge is skipped with its reason, and so is one whose findings are all
suppressed. The elements are those that Ant's JUnit task writes (https://llg.cubic.org/docs/junit/).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from normwise.checkup.finding import Finding
from normwise.checkup.reports import _pages, _quiet, _view
from normwise.checkup.reports._sources import Sources
from normwise.checkup.reports._words import Words, words
from normwise.rendering.cleaning import clean, respelled

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = ["render"]

SUFFIXES = (".xml",)
FILE_OPTIONS: dict[str, Any] = {}

# What XML 1.0 has no way to write (https://www.w3.org/TR/xml/#charsets) and ``clean`` leaves: two noncharacters.
_NO_XML = re.compile("[\ufffe\uffff]")


def render(report: Report, *, lang: str = "en") -> str:
    """Return the report as JUnit XML.

    Args:
        report: what to show.
        lang: language of the words around the data, "en" or "zh".
    """
    say = words(lang)
    cases = list(_cases(report, say))
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": "0",
        "skipped": str(sum(case.find("skipped") is not None for case in cases)),
        "time": f"{report.cost.seconds:.3f}",
    }
    root = Element("testsuites", {"name": "normwise", **counts})
    suite = SubElement(root, "testsuite", {"name": _shown(report.target), **counts})
    properties = SubElement(suite, "properties")
    for name, value in [(say("inputs"), report.inputs), (say("effort"), report.effort), *report.versions.items()]:
        SubElement(properties, "property", name=_shown(name), value=_shown(value))
    suite.extend(cases)
    if said := list(_besides(report, say)):
        SubElement(suite, "system-out").text = "\n".join(said)
    ElementTree.indent(root)
    page = respelled(ElementTree.tostring(root, encoding="unicode"), "&#{};")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{page}\n'


def _cases(report: Report, say: Words) -> Iterator[Element]:
    """Yield a case for each rule, in the order of their codes."""
    sources = Sources(report)
    found: dict[str, list[Finding]] = {}
    for finding in report.findings:
        found.setdefault(finding.code, []).append(finding)
    quiet: dict[str, list[_quiet.QuietRow]] = {}
    for row in _quiet.suppressed(report, say):
        quiet.setdefault(row.finding.code, []).append(row)
    whys = {each.code: each.why for each in report.not_checked}
    for code in sorted({*found, *quiet, *whys, *report.passed}):
        case = Element("testcase", classname=f"normwise.{_shown(code[:3])}", name=_name(code, report))
        for finding in found.get(code, ()):
            message, kind = _shown(say.text(finding.message)), str(finding.severity)
            text = "\n".join(_lines(finding, sources.code(finding.path), say))
            SubElement(case, "failure", message=message, type=kind).text = text
        if not len(case) and (rows := quiet.get(code)):
            said = "; ".join(f"{row.where}: {row.reason} ({row.said})" for row in rows)
            SubElement(case, "skipped", message=_shown(f"{say.count(len(rows), 'suppressed')}: {said}"))
        elif not len(case) and code in whys:
            SubElement(case, "skipped", message=_shown(f"{say('Not checked')}: {say.text(whys[code])}"))
        yield case


def _name(code: str, report: Report) -> str:
    everywhere = (*report.findings, *(each.finding for each in report.suppressed), *report.not_checked)
    name = next((each.name for each in everywhere if each.code == code), "") or _pages.name_of(code)
    return _shown(f"{code} {name}".strip())


def _lines(finding: Finding, code: str | None, say: Words) -> Iterator[str]:
    places, count = _view.places(finding, say)
    yield _shown(f"{say('where')}: {places}" + (f" ×{count}" if count > 1 else ""))
    if code:
        yield _shown(f"{say('source')}: {code}")
    yield f"{say('basis')}: {say(str(finding.basis))}"
    yield from (_shown(f"{name}: {value}") for name, value in _view.evidence(finding.evidence, say))
    if finding.counterfactual:
        yield _shown(f"{say('effect')}: {_view.effect(finding, say)}")
    yield _shown(f"{say('fix')}: {say.text(finding.fix)}")
    yield _shown(f"{say('why')}: {_view.explained(finding, say)}")


def _besides(report: Report, say: Words) -> Iterator[str]:
    for row in _quiet.unused(report, say):
        yield _shown(f"{say('unused suppression')}: {row.code} {row.pattern}, {row.said}")


def _shown(text: object) -> str:
    return _NO_XML.sub(lambda found: found[0].encode("ascii", "backslashreplace").decode(), clean(text))
