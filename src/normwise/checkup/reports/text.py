"""Text for the terminal: what was found, in one screen.

Repeated blocks are one line. What matters most comes last, next to the prompt: the findings, each
with its evidence, its fix and where to read more, then what could not be checked. Colour is used
on a terminal only, and no text of the model is ever taken for markup.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from normwise.checkup.finding import Finding
from normwise.checkup.reports import _view
from normwise.checkup.reports._words import Words, words
from normwise.facts.records import Evidence
from normwise.rendering.cleaning import clean, shorten
from normwise.rendering.collapse import collapse_paths
from normwise.rendering.numbers import number, ratio, sparkline
from normwise.rendering.tables import Column, by_terminal, draw, plain_ascii, table
from normwise.rendering.tables import text as safe

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = ["render"]

SUFFIXES = (".txt",)
FILE_OPTIONS: dict[str, Any] = {"color": False, "width": 120}

_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue", "good": "bold green", "plain": ""}
_EVIDENCE_WORDS = {
    Evidence.VERIFIED: "verified by replay",
    Evidence.DERIVED: "read off the graph",
    Evidence.PROBED: "probed from outside",
    Evidence.UNKNOWN: "not understood",
}
_MOST_LINES = 8  # of a list of paths, unless full
_LONGEST_WHY = 160
_SPARKLINE = 48


def render(
    report: Report, *, full: bool = False, color: bool | None = None, width: int | None = None, lang: str = "en"
) -> str:
    """Return the report as text.

    Args:
        report: what to show.
        full: every block on its own line, also repeated ones, and every path.
        color: with escape sequences for colour; None: on a terminal only.
        width: columns; None: those of the terminal, 100 without one.
        lang: language of the words around the data, "en" or "zh".
    """
    width, color = by_terminal(width, color)
    say = words(lang)
    page = draw(_join(_sections(report, say, full, width)), width=width, color=color)
    return plain_ascii(page, sys.stdout.encoding)


def _join(sections: Iterator[list[RenderableType]]) -> Iterator[RenderableType]:
    for index, section in enumerate(section for section in sections if section):
        if index:
            yield Text("")
        yield from section


def _sections(report: Report, say: Words, full: bool, width: int) -> Iterator[list[RenderableType]]:
    yield _headline(report, say, width)
    yield _placement(report, say)
    yield _norms(report, say, full, width)
    yield _profile(report, say)
    yield from _findings(report, say, full)
    yield _verdicts(report, say)


def _title(content: str, aside: str = "") -> Text:
    return Text.assemble((content, "bold"), (f"  {aside}" if aside else "", "dim"))


def _indent(content: RenderableType, by: int = 2) -> Padding:
    return Padding(content, (0, 0, 0, by))


def _headline(report: Report, say: Words, width: int) -> list[RenderableType]:
    verb = "check" if report.rules_run else "map"
    target = Text.assemble((f"normwise {verb} ", "bold"), safe(report.target, "bold cyan"))
    verdict = Text("  ").join(Text(part, _STYLES[tone]) for part, tone in _view.headline(report, say))
    gap = width - target.cell_len - verdict.cell_len
    top = [Text.assemble(target, " " * gap, verdict)] if gap >= 2 else [target, verdict]
    about = f"{say('Inputs')}: {_view.inputs(report, say)}    {say('weights')}: {_view.weights(report, say)}"
    return [*top, Text(about, "dim"), *(Text.assemble("- ", safe(note), style="dim") for note in report.notes)]


def _placement(report: Report, say: Words) -> list[RenderableType]:
    stacks, summary = report.placement.stacks, report.placement
    lines = [Text(say("no residual stream was found"), "dim")] if not stacks else []
    for index, stack in enumerate(stacks):
        kind, *rest = _view.stack_words(stack, say)
        formula = _view.FORMULAS.get(stack.kind, "")
        lines.append(
            Text.assemble(
                f"stack {index}  ",
                (kind, "bold"),
                (f"  {formula}" if formula else "", "dim"),
                *(f" · {part}" for part in rest),
            )
        )
    marks = {"embedding norm": summary.embedding_norm, "QK norm": summary.qk_norm, "inner norm": summary.inner_norm}
    also = " · ".join(f"{say(name)}: {say('yes' if present else 'no')}" for name, present in marks.items())
    return [_title(say("Placement")), *map(_indent, lines), _indent(Text(also))]


def _norms(report: Report, say: Words, full: bool, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if not report.norms:
        parts = [Text(say("No normalization found"), "bold yellow"), _indent(Text(_view.no_norms(report, say)))]
    else:
        rows = _view.norm_rows(report.norms, say, full=full)
        parts = [_title(say("Norms"), str(len(report.norms))), _map(rows, say, width), *_legend(rows, say)]
    if report.listed_apart:
        apart = _paths([site.path for site in report.listed_apart], say, full)
        parts += [_list(say("not a norm of the stream, listed apart"), apart)]
    if report.not_executed:
        parts += [_list(say("Never executed"), _paths(report.not_executed, say, full), "yellow")]
    if report.breaks:
        lost = [
            f"{each.path or say('model')}: {each.what}{f' ({each.source})' if each.source else ''}"
            for each in report.breaks
        ]
        parts += [_list(say("Dataflow lost"), _some(lost, say, full), "yellow")]
    return parts


def _map(rows: Sequence[_view.NormRow], say: Words, width: int) -> RenderableType:
    def column(name: str, cells: list[str], style: str = "", right: bool = False) -> Column:
        return Column(heading=name, cells=tuple(safe(cell, style) for cell in cells), right=right)

    columns = [column(say("path"), [row.label for row in rows], "cyan")]
    columns.append(column("×", [f"×{row.count}" if row.count > 1 else "" for row in rows], right=True))
    if any(row.calls != 1 for row in rows):
        columns.append(column(say("calls"), [str(row.calls) for row in rows], right=True))
    columns.append(column(say("kind"), [row.kind for row in rows], "bold"))
    columns.append(column(say("axes"), [row.axes for row in rows]))
    columns.append(column(say("eps"), [row.eps for row in rows]))
    columns.append(column(say("statistics"), [row.statistics for row in rows]))
    columns.append(column(say("gain"), [row.gain for row in rows]))
    columns.append(column(say("placement"), [row.placement for row in rows]))
    if len({row.stack for row in rows} - {""}) > 1:
        columns.append(column(say("stack no."), [row.stack for row in rows]))
    columns.append(column("", [row.mark for row in rows]))
    return table(columns, width)


def _legend(rows: Sequence[_view.NormRow], say: Words) -> list[RenderableType]:
    seen = {row.evidence for row in rows}
    marks = "   ".join(f"{_view.MARKS[each]} {say(_EVIDENCE_WORDS[each])}" for each in Evidence if each in seen)
    notes = [Text.assemble(safe(row.label, "cyan"), ": ", safe(row.note)) for row in rows if row.note]
    return [_indent(Text(marks, "dim")), *map(_indent, notes)]


def _list(heading: str, lines: Sequence[str], style: str = "dim") -> RenderableType:
    return Lines(Text(heading, style), *(_indent(safe(line)) for line in lines))


def _paths(paths: Sequence[str], say: Words, full: bool) -> list[str]:
    groups = collapse_paths(paths)
    return _some(
        [f"{group.label} ×{n}" if (n := len(group.members)) > 1 else group.label for group in groups], say, full
    )


def _some(lines: list[str], say: Words, full: bool) -> list[str]:
    if full or len(lines) <= _MOST_LINES:
        return lines
    return [*lines[:_MOST_LINES], f"+{len(lines) - _MOST_LINES} {say('more')} (--full)"]


def _profile(report: Report, say: Words) -> list[RenderableType]:
    by_stack = _view.profiles(report)
    lines: list[RenderableType] = []
    for stack, rows in by_stack.items():
        curves = {name: values for name in _view.CURVES if (values := _view.curve(rows, name))}
        names = {name: (f"{stack} " if len(by_stack) > 1 else "") + say(name) for name in curves}
        wide = max((cell_len(name) for name in names.values()), default=0)
        lines += [_curve(names[name], wide, values) for name, values in curves.items()]
    return (
        [_title(say("Profile by depth"), say("root mean square, first to last sublayer, log scale")), *lines]
        if lines
        else []
    )


def _curve(name: str, wide: int, values: Sequence[float | None]) -> RenderableType:
    first, last = ([value for value in values if value is not None][end] for end in (0, -1))
    ends = f"{number(first)} → {number(last)}  {ratio(first, last)}"
    pad = " " * (wide - cell_len(name) + 2)
    return _indent(Text.assemble(name, pad, (sparkline(values, _SPARKLINE), "cyan"), f"  {ends}"))


def _findings(report: Report, say: Words, full: bool) -> Iterator[list[RenderableType]]:
    if not report.findings:
        return
    yield [_title(say("Findings"), str(len(report.findings)))]
    for finding in report.findings:
        yield _finding(finding, say, full)


def _finding(finding: Finding, say: Words, full: bool) -> list[RenderableType]:
    style = _STYLES[str(finding.severity)]
    where, count = _view.places(finding, say, most=1000 if full else 3)
    head = Text.assemble((f"{finding.severity.name[0]} {finding.code} ", style), safe(finding.name, style), "  ")
    head.append_text(safe(shorten(where, 200), "cyan"))
    head.append(f"  ×{count}" if count > 1 else "").append(f"  {say('basis')}: {finding.basis}", "dim")
    body: list[RenderableType] = [safe(finding.message)]
    if facts := _view.evidence(finding.evidence):
        body.append(Text(" · ").join(Text.assemble((f"{name} ", "dim"), value) for name, value in facts))
    if measured := _view.effect(finding, say):
        body.append(_labelled(say("effect"), safe(measured)))
    body.append(_labelled(say("fix"), safe(finding.fix, "green")))
    body.append(_labelled(say("why"), Text(f"normwise explain {clean(finding.code)}", "dim")))
    return [head, *(_indent(line, 2) for line in body)]


def _labelled(name: str, content: Text) -> Text:
    return Text.assemble((f"{name}  ", "dim"), content)


def _verdicts(report: Report, say: Words) -> list[RenderableType]:
    if not report.rules_run:
        return []
    lines: list[RenderableType] = []
    if not report.findings and not report.passed:
        lines.append(Text(say("no rule could be judged"), "bold yellow"))
    if report.passed:
        lines.append(_entry(say("Passed"), safe(" ".join(report.passed), "green")))
    skipped = ", ".join(f"{each.code} ({shorten(clean(each.why), _LONGEST_WHY)})" for each in report.not_checked)
    if skipped:
        lines.append(_entry(say("Not checked"), safe(skipped)))
    return lines


def _entry(name: str, content: Text) -> Text:
    return Text.assemble((f"{name}  ", "bold"), content)
