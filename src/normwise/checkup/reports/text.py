"""Text for the terminal: what was found, in one screen.

Repeated blocks are one line. What matters most comes last, next to the prompt: the findings, each
with its evidence, its fix and where to read more, then what could not be checked. Colour is used
on a terminal only, and no text of the model is ever taken for markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from normwise.checkup.finding import Finding
from normwise.checkup.reports import _quiet, _view
from normwise.checkup.reports._words import Words, words
from normwise.facts.records import Evidence, Stack
from normwise.rendering.cleaning import clean, shorten
from normwise.rendering.collapse import collapse_paths
from normwise.rendering.numbers import number, ratio, sparkline
from normwise.rendering.tables import Column, by_terminal, draw, fitting, pairs, plain_ascii, table
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
    Evidence.KEYS: "read off the keys",
    Evidence.UNKNOWN: "not understood",
}
_MOST_LINES = 8  # of a list of paths, unless full
_EVIDENCE_LINES = 2  # of a finding, unless full
_SHORTEST_WHY = 40
_LONGEST_PLACES, _ALL = 240, 100_000
_SPARKLINE, _BESIDE_SPARKLINE = 48, 42  # at most so many bars; so many columns for the name and the ends
_DOT = Text.assemble((" · ", "dim"))


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
    return plain_ascii(page)


def _join(sections: Iterator[list[RenderableType]]) -> Iterator[RenderableType]:
    for index, section in enumerate(section for section in sections if section):
        if index:
            yield Text("")
        yield from section


def _sections(report: Report, say: Words, full: bool, width: int) -> Iterator[list[RenderableType]]:
    yield _headline(report, say, width)
    yield _placement(report, say)
    yield _norms(report, say, full, width)
    yield from _besides(report, say, full)
    yield _profile(report, say, width)
    yield from _findings(report, say, full, width)
    yield _verdicts(report, say, full, width)


def _title(content: str, aside: str = "") -> Text:
    return Text.assemble((content, "bold"), (f"  {aside}" if aside else "", "dim"))


def _indent(content: RenderableType, by: int = 2) -> Padding:
    return Padding(content, (0, 0, 0, by))


def _headline(report: Report, say: Words, width: int) -> list[RenderableType]:
    verb = "check" if report.rules_run else "map"
    target = Text.assemble((f"normwise {verb} ", "bold"), safe(report.target, "bold cyan"))
    verdict = _DOT.join(Text(part, _STYLES[tone]) for part, tone in _view.headline(report, say))
    gap = width - target.cell_len - verdict.cell_len
    top = [Text.assemble(target, " " * gap, verdict)] if gap >= 2 else [target, verdict]
    notes = (Text.assemble("- ", safe(say.text(note)), style="dim") for note in report.notes)
    return [*top, safe(_view.about(report, say), "dim"), *notes]


def _placement(report: Report, say: Words) -> list[RenderableType]:
    summary = report.placement
    lines = [_stack(index, stack, say) for index, stack in enumerate(summary.stacks)]
    marks = {"embedding norm": summary.embedding_norm, "QK norm": summary.qk_norm, "inner norm": summary.inner_norm}
    also = " · ".join(f"{say(name)}: {say('yes' if present else 'no')}" for name, present in marks.items())
    parts = [pairs(lines) if lines else _indent(Text(say(_view.no_stacks(report)), "dim")), _indent(Text(also))]
    return [_title(say("Placement")), *parts]


def _stack(index: int, stack: Stack, say: Words) -> tuple[Text, Text]:
    kind, *rest = _view.stack_words(stack, say)
    formula = _view.FORMULAS.get(stack.kind, "")
    sentence = Text.assemble(
        (kind, "bold"), (f"  {formula}" if formula else "", "dim"), *(f" · {part}" for part in rest)
    )
    return Text(f"{say.noun('stack')} {index}"), sentence


def _norms(report: Report, say: Words, full: bool, width: int) -> list[RenderableType]:
    if not report.norms:
        return [Text(say(_view.nothing(report)), "bold yellow"), _indent(Text(_view.no_norms(report, say)))]
    rows = _view.norm_rows(report.norms, say, full=full)
    return [_title(say("Norms"), str(len(report.norms))), *_map(rows, say, width), *_legend(rows, say)]


def _besides(report: Report, say: Words, full: bool) -> Iterator[list[RenderableType]]:
    """Yield what a reader of the map must know: what is not in it, and where it may be incomplete."""
    if report.listed_apart:
        apart = _paths([site.path for site in report.listed_apart], say, full)
        yield _list(say("Listed apart"), say("normalizes, but no activations of a stream"), apart)
    if report.not_executed:
        unseen = _paths(report.not_executed, say, full)
        yield _list(say("Never executed"), say("norms that these inputs do not reach"), unseen)
    if report.breaks:
        lost = [
            f"{each.path or say('model')}: {say.text(each.what)}" + (f" ({each.source})" if each.source else "")
            for each in report.breaks
        ]
        yield _list(say("Dataflow lost"), say("the map may be incomplete from here on"), _some(lost, say, full))


def _map(rows: Sequence[_view.NormRow], say: Words, width: int) -> list[RenderableType]:
    columns = list(_columns(rows, say))
    shown = fitting(columns, width)
    hidden = ", ".join(column.heading for column in columns if column not in shown)
    aside = [_indent(Text(f"{say('left out, the terminal is narrow')}: {hidden}", "dim"))] if hidden else []
    return [table(shown, width), *aside]


def _columns(rows: Sequence[_view.NormRow], say: Words) -> Iterator[Column]:
    def column(name: str, cells: Iterable[object], style: str = "", right: bool = False, spare: int = 0) -> Column:
        return Column(heading=name, cells=tuple(safe(cell, style) for cell in cells), right=right, spare=spare)

    yield column(say("path"), (row.label for row in rows), "cyan")
    yield column("×", (f"×{row.count}" if row.count > 1 else "" for row in rows), right=True)
    if any(row.calls != 1 for row in rows):
        yield column(say("calls"), (row.calls for row in rows), right=True, spare=2)
    yield column(say("kind"), (row.kind for row in rows), "bold")
    yield column(say("axes"), (row.axes for row in rows), spare=1)
    yield column(say("eps"), (row.eps for row in rows))
    yield column(say("stats"), (row.statistics for row in rows), spare=4)
    yield column(say("gain"), (row.gain for row in rows), spare=3)
    yield column(say("place"), (row.placement for row in rows))
    if len({row.stack for row in rows} - {""}) > 1:
        yield column(say.noun("stack"), (row.stack for row in rows), spare=5)
    yield column("", (row.mark for row in rows))


def _legend(rows: Sequence[_view.NormRow], say: Words) -> list[RenderableType]:
    seen = {row.evidence for row in rows}
    marks = "   ".join(f"{_view.MARKS[each]} {say(_EVIDENCE_WORDS[each])}" for each in Evidence if each in seen)
    notes = [Text.assemble(safe(row.label, "cyan"), ": ", safe(row.note)) for row in rows if row.note]
    return [_indent(Text(marks, "dim")), *map(_indent, notes)]


def _list(heading: str, aside: str, lines: Sequence[str]) -> list[RenderableType]:
    return [_title(heading, aside), *(_indent(safe(line)) for line in lines)]


def _paths(paths: Sequence[str], say: Words, full: bool) -> list[str]:
    groups = collapse_paths(paths)
    return _some(
        [f"{group.label} ×{n}" if (n := len(group.members)) > 1 else group.label for group in groups], say, full
    )


def _some(lines: list[str], say: Words, full: bool) -> list[str]:
    if full or len(lines) <= _MOST_LINES:
        return lines
    return [*lines[:_MOST_LINES], f"{say.more(len(lines) - _MOST_LINES)} (--full)"]


def _profile(report: Report, say: Words, width: int) -> list[RenderableType]:
    by_stack = _view.profiles(report)
    lines: list[RenderableType] = []
    for stack, rows in by_stack.items():
        curves = {name: values for name in _view.CURVES if (values := _view.curve(rows, name))}
        names = {name: (f"{stack} " if len(by_stack) > 1 else "") + say(name) for name in curves}
        wide = max((cell_len(name) for name in names.values()), default=0)
        lines += [
            _curve(names[name], wide, values, min(_SPARKLINE, max(width - _BESIDE_SPARKLINE, 8)))
            for name, values in curves.items()
        ]
    return (
        [_title(say("Profile by depth"), say("root mean square, first to last sublayer, log scale")), *lines]
        if lines
        else []
    )


def _curve(name: str, wide: int, values: Sequence[float | None], bars: int) -> RenderableType:
    first, last = ([value for value in values if value is not None][end] for end in (0, -1))
    ends = f"{number(first)} → {number(last)}  {ratio(first, last)}"
    pad = " " * (wide - cell_len(name) + 2)
    return _indent(Text.assemble(name, pad, (sparkline(values, bars), "cyan"), f"  {ends}"))


def _findings(report: Report, say: Words, full: bool, width: int) -> Iterator[list[RenderableType]]:
    for index, finding in enumerate(report.findings):
        title = [_title(say("Findings"), str(len(report.findings)))] if not index else []
        yield [*title, *_head(finding, say, full, width), *_body(finding, say, full, width)]


def _head(finding: Finding, say: Words, full: bool, width: int) -> list[RenderableType]:
    """Name the rule, the place and the basis, on one line if they fit."""
    style = _STYLES[str(finding.severity)]
    places, count = _view.places(finding, say, most=_ALL if full else _view.MOST_PLACES)
    where = safe(places if full else shorten(places, _LONGEST_PLACES), "cyan")
    where.append(f" ×{count}" if count > 1 else "")
    head = Text.assemble((f"{finding.severity.name[0]} {clean(finding.code)} {clean(finding.name)}", style))
    basis = Text(f"{say('basis')}: {say(str(finding.basis))}", "dim")
    room = width - head.cell_len - basis.cell_len - 4
    if where.cell_len <= room:
        return [Text.assemble(head, "  ", where, " " * (room - where.cell_len + 2), basis)]
    return [Text.assemble(head, " " * max(room + 4, 2), basis), _indent(where)]


def _body(finding: Finding, say: Words, full: bool, width: int) -> list[RenderableType]:
    body: list[RenderableType] = [_indent(safe(say.text(finding.message)))]
    if facts := _view.evidence(finding.evidence, say):
        named = [Text.assemble((f"{name}: ", "dim"), value) for name, value in facts]
        body += map(_indent, _packed(named, width - 2, say, most=None if full else _EVIDENCE_LINES))
    rows = [(say("effect"), safe(_view.effect(finding, say)))] if finding.counterfactual else []
    rows.append((say("fix"), safe(say.text(finding.fix), "green")))
    rows.append((say("why"), Text(_view.explained(finding, say), "dim")))
    return [*body, pairs((Text(name, "dim"), content) for name, content in rows)]


def _packed(facts: Sequence[Text], width: int, say: Words, most: int | None) -> list[Text]:
    """Fill lines with facts, so that a line ends between two of them where it can; say how many are left out."""
    lines: list[Text] = []
    for index, fact in enumerate(facts):
        left_out = Text(f" · {say.more(len(facts) - index)}", "dim")
        last = most is not None and len(lines) == most
        room = width - (left_out.cell_len if last and index + 1 < len(facts) else 0)
        if lines and lines[-1].cell_len + fact.cell_len + 3 <= room:
            lines[-1].append(" · ").append_text(fact)
        elif last:
            lines[-1].append_text(left_out)
            break
        else:
            lines.append(fact.copy())
    return lines


def _verdicts(report: Report, say: Words, full: bool, width: int) -> list[RenderableType]:
    if not report.rules_run:
        return []
    shown: list[RenderableType] = []
    if not report.findings and not report.passed:
        shown.append(Text(say("no rule could be judged"), "bold yellow"))
    if report.passed:
        shown.append(pairs([(Text(say("Passed"), "bold"), safe(" ".join(_ranges(report.passed)), "green"))], indent=0))
    shown += _kept_quiet(report, say, full)
    if report.not_checked:
        shown += [_title(say("Not checked"), str(len(report.not_checked))), *_reasons(report, say, full, width)]
    return shown


def _kept_quiet(report: Report, say: Words, full: bool) -> list[RenderableType]:
    """Return what was found and does not count, and what kept nothing quiet."""
    quiet, idle = _quiet.suppressed(report, say), _quiet.unused(report, say)
    rows = [f"{row.code} {row.name}  {row.where}: {row.reason} ({row.said})" for row in quiet]
    title = f"{say('Suppressed')}  {len(rows)}"
    shown = _list(title, say("found, and kept quiet on request"), _some(rows, say, full)) if rows else []
    loose = [f"{say('unused suppression')}: {row.code} {row.pattern}, {row.said}" for row in idle]
    return [*shown, *(safe(line, "bold yellow") for line in _some(loose, say, full))]


def _reasons(report: Report, say: Words, full: bool, width: int) -> list[RenderableType]:
    """Return a line for each reason, those of most rules first."""
    reasons = sorted(_view.reasons(report, say), key=lambda reason: -len(reason[1]))
    lines = []
    for why, codes in reasons:
        aside = Text("  " + " ".join(_ranges(codes)), "dim")
        room = max(width - 2 - aside.cell_len, _SHORTEST_WHY)
        lines.append(Text.assemble(safe(why if full else _fitted(why, room)), aside))
    left = [] if full else lines[_MOST_LINES:]
    more = [Text(f"{say.more(len(left))} (--full)", "dim")] if left else []
    return [_indent(line) for line in [*lines[: len(lines) - len(left)], *more]]


def _fitted(line: str, width: int) -> str:
    """Cut the end off a line that is wider than so many columns."""
    return line if cell_len(line) <= width else f"{set_cell_size(line, width - 1).rstrip()}…"


def _ranges(codes: Sequence[str]) -> list[str]:
    """Write codes that follow each other as one range: AXS001-003."""
    runs: list[list[str]] = []
    for code in sorted(codes):
        previous = runs[-1][-1] if runs else ""
        follows = previous[:3] == code[:3] and previous[3:].isdigit() and code[3:].isdigit()
        if follows and int(code[3:]) == int(previous[3:]) + 1:
            runs[-1].append(code)
        else:
            runs.append([code])
    return [word for run in runs for word in ([f"{run[0]}-{run[-1][3:]}"] if len(run) > 2 else run)]
