"""Markdown for a pull request, an issue or a job's summary: tables of findings and of what was not checked.

The map of norms is folded. Names are code or escaped: none of them can be markup, a link, a mention or a cell border.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from normwise.checkup.finding import Finding
from normwise.checkup.reports import _quiet, _view
from normwise.checkup.reports._sources import Sources
from normwise.checkup.reports._words import Words, words
from normwise.facts.records import Stack
from normwise.rendering.cleaning import clean, shorten
from normwise.rendering.collapse import collapse_paths
from normwise.rendering.markdown import code, prose, table

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = ["render"]

SUFFIXES = (".md",)
FILE_OPTIONS: dict[str, Any] = {}

_MOST_ROWS = 300  # of the map, as on the HTML page; a comment on GitHub holds 65,536 characters
_LONGEST_PLACES = 240


def render(report: Report, *, full: bool = False, lang: str = "en") -> str:
    """Return the report as Markdown.

    Args:
        report: what to show.
        full: every norm on its own line, and every place of a finding.
        lang: language of the words around the data, "en" or "zh".
    """
    return "\n\n".join(filter(None, _sections(report, words(lang), full))) + "\n"


def _sections(report: Report, say: Words, full: bool) -> Iterator[str]:
    verb = "check" if report.rules_run else "map"
    yield f"# normwise {verb}: {code(report.target)}"
    said = (f"**{prose(part)}**" if tone != "plain" else prose(part) for part, tone in _view.headline(report, say))
    yield " · ".join(said)
    yield prose(_view.about(report, say))
    yield "\n".join(f"- {say('note')}: {prose(say.text(note))}" for note in report.notes)
    yield from _findings(report, say, full)
    yield from _verdicts(report, say)
    yield f"## {say('Placement')}"
    yield "\n".join(_stack(index, stack, say) for index, stack in enumerate(report.placement.stacks)) or say(
        _view.no_stacks(report)
    )
    yield from _norms(report, say, full)
    yield from _besides(report, say)
    yield f"## {say('Environment')}"
    yield table([say("cost"), say("versions")], [[prose(_view.cost(report, say)), _versions(report)]])


def _findings(report: Report, say: Words, full: bool) -> Iterator[str]:
    if report.findings:
        yield f"## {say('Findings')} ({len(report.findings)})"
        heading = [say("level"), say.noun("rule"), *map(say, ("where", "what", "fix", "basis"))]
        sources = Sources(report)
        yield table(heading, (_finding(each, sources.code(each.path), say, full) for each in report.findings))


def _finding(finding: Finding, source: str | None, say: Words, full: bool) -> list[str]:
    places, count = _view.places(finding, say, most=len(finding.paths) if full else _view.MOST_PLACES)
    where = code(places if full else shorten(places, _LONGEST_PLACES)) + (f" ×{count}" if count > 1 else "")
    where += f"<br>{code(source)}" if source else ""
    what = [prose(say.text(finding.message))]
    what += [f"{prose(name)}: {prose(value)}" for name, value in _view.evidence(finding.evidence, say)]
    if finding.counterfactual:
        what.append(f"{say('effect')}: {prose(_view.effect(finding, say))}")
    rule = f"{code(finding.code)} {prose(finding.name)}"
    fix = f"{prose(say.text(finding.fix))}<br>{code(_view.explained(finding, say))}"
    return [say.noun(str(finding.severity)), rule, where, "<br>".join(what), fix, say(str(finding.basis))]


def _verdicts(report: Report, say: Words) -> Iterator[str]:
    if not report.rules_run:
        return
    if not report.findings and not report.passed:
        yield f"**{say('no rule could be judged')}**"
    heading = [say.noun("rule"), say("where"), say("reason"), say("said by")]
    if rows := _quiet.suppressed(report, say):
        yield f"## {say('Suppressed')} ({len(rows)})"
        rules = [f"{code(row.code)} {prose(row.name)}" for row in rows]
        rest = [[code(row.where), prose(row.reason), code(row.said)] for row in rows]
        yield table(heading, ([rule, *cells] for rule, cells in zip(rules, rest, strict=True)))
    if rows := _quiet.unused(report, say):
        yield f"## {say('Unused suppressions')} ({len(rows)})"
        yield table(heading, ([code(row.code), code(row.pattern), prose(row.reason), code(row.said)] for row in rows))
    if report.not_checked:
        yield f"## {say('Not checked')} ({len(report.not_checked)})"
        cells = ([prose(why), " ".join(map(code, codes))] for why, codes in _view.reasons(report, say))
        yield table([say("reason"), say("rules")], cells)
    if report.passed:
        yield f"## {say('Passed')} ({len(report.passed)})"
        yield " ".join(map(code, report.passed))


def _stack(index: int, stack: Stack, say: Words) -> str:
    kind, *rest = _view.stack_words(stack, say)
    formula = _view.FORMULAS.get(stack.kind, "")
    parts = [f"**{prose(kind)}**" + (f" {code(formula)}" if formula else ""), *map(prose, rest)]
    return f"- {say.noun('stack')} {index}: {' · '.join(parts)}"


def _norms(report: Report, say: Words, full: bool) -> Iterator[str]:
    if not report.norms:
        yield f"## {say(_view.nothing(report))}"
        yield _view.no_norms(report, say)
        return
    rows = _view.norm_rows(report.norms, say, full=full)
    shown = rows if full else rows[:_MOST_ROWS]
    names = ("path", "calls", "kind", "axes", "eps", "stats", "gain", "place", "evidence", "note")
    heading = [say(name) for name in names]
    heading[1:1] = ["×"]
    several = any(row.calls != 1 for row in rows)
    yield f"<details><summary>{say('Norms')} ({len(report.norms)})</summary>"
    yield table(heading, (_norm(row, several) for row in shown))
    if len(shown) < len(rows):
        yield f"+{len(rows) - len(shown)} {say('in the JSON report')}"
    yield "</details>"


def _norm(row: _view.NormRow, several: bool) -> list[str]:
    count, calls = str(row.count) if row.count > 1 else "", str(row.calls) if several else ""
    known = (row.kind, row.axes, row.eps, row.statistics, row.gain, row.placement)
    return [code(row.label), count, calls, *map(prose, (*known, f"{row.mark} {row.evidence}", row.note))]


def _besides(report: Report, say: Words) -> Iterator[str]:
    """Yield what is not in the map, and where it may be incomplete."""
    apart = [site.path for site in report.listed_apart]
    for heading, paths in (("Listed apart", apart), ("Never executed", report.not_executed)):
        if paths:
            yield f"## {say(heading)} ({len(paths)})"
            yield ", ".join(code(group.label) for group in collapse_paths(paths)[:_MOST_ROWS])
    if report.breaks:
        yield f"## {say('Dataflow lost')}"
        heading = [say("path"), say("what"), say("source")]
        lost = report.breaks
        yield table(
            heading,
            ([code(each.path or say("model")), prose(say.text(each.what)), code(each.source or "")] for each in lost),
        )


def _versions(report: Report) -> str:
    return ", ".join(f"{prose(name)} {prose(clean(version))}" for name, version in report.versions.items())
