"""Text for the terminal: tables, charts as sparklines, then, next to the prompt, the verdict of every claim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table as Drawn
from rich.text import Text

from normwise.rendering import in_language
from normwise.rendering.numbers import number, sparkline
from normwise.rendering.plots import Chart, Line
from normwise.rendering.tables import by_terminal, draw, pairs, plain_ascii
from normwise.rendering.tables import text as safe
from normwise.studies._study import Table, Verdict
from normwise.studies.reports import _view

if TYPE_CHECKING:
    from normwise.studies._evidence import Evidence

__all__ = ["render"]

SUFFIXES = (".txt",)
BINARY = False

_STYLES = {"good": "bold green", "error": "bold red", "warning": "bold yellow", "plain": "bold"}
_SPARKLINE, _BESIDE_SPARKLINE = 40, 46  # at most so many bars; so many columns for the name and the ends
_LEAST_HEADING = 9  # columns; a shorter heading stays on one line
_MOST_UNRUN = 8  # lines of trials without a result


def render(evidence: Evidence, *, color: bool | None = None, width: int | None = None, lang: str = "en") -> str:
    """Return what a study found as text.

    Args:
        evidence: what to show.
        color: with escape sequences for colour; None: on a terminal only.
        width: columns; None: those of the terminal, 100 without one.
        lang: language of the words, "en" or "zh".
    """
    width, color = by_terminal(width, color)
    sections = [section for section in _sections(evidence, lang, width) if section]
    parts = [part for section in sections for part in (Text(""), *section)][1:]
    return plain_ascii(draw(parts, width=width, color=color))


def _sections(evidence: Evidence, lang: str, width: int) -> Iterator[list[RenderableType]]:
    yield _headline(evidence, lang)
    for figure in evidence.figures:
        yield _table(figure, lang) if isinstance(figure, Table) else _chart(figure, lang, width)
    yield [line for verdict in evidence.verdicts for line in _verdict(verdict, lang)]
    yield _unrun(evidence, lang)
    yield [pairs(((Text(name, "dim"), safe(value)) for name, value in _view.conditions(evidence, lang)), indent=0)]


def _headline(evidence: Evidence, lang: str) -> list[RenderableType]:
    outcome = Text(" · ").join(Text(f"{n} {word}", _STYLES[tone]) for n, word, tone in _view.counts(evidence, lang))
    return [
        Text.assemble(("normwise study ", "bold"), safe(evidence.study, "bold cyan"), "   ", outcome),
        safe(_view.title(evidence, lang), "bold"),
        safe(_view.about(evidence, lang), "dim"),
    ]


def _heading(figure: Table | Chart, lang: str, aside: str = "") -> RenderableType:
    return Text.assemble(safe(in_language(figure.title, lang), "bold"), (f"  {aside}" if aside else "", "dim"))


def _note(figure: Table | Chart, lang: str) -> list[RenderableType]:
    note = in_language(figure.note, lang)
    return [_indent(note, "dim")] if note else []


def _table(table: Table, lang: str) -> list[RenderableType]:
    made = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    cells = [[_view.cell(value, lang) for value in row] for row in table.rows]
    for index, (heading, right) in enumerate(zip(table.columns, _view.numeric(table), strict=True)):
        said = safe(in_language(heading, lang))
        width = _needed(said, [row[index] for row in cells]) if right else None
        made.add_column(said, justify="right" if right else "left", width=width, overflow="fold")
    for row in cells:
        made.add_row(*map(safe, row))
    return [_heading(table, lang), Padding(made, (0, 0, 0, 2)), *_note(table, lang)]


def _needed(heading: Text, cells: Sequence[str]) -> int:
    """Return the width of a column of numbers: numbers are never broken, headings between words."""
    words = min(heading.cell_len, max(_LEAST_HEADING, *map(cell_len, heading.plain.split())))
    return max(words, *map(cell_len, cells), 1)


def _chart(chart: Chart, lang: str, width: int) -> list[RenderableType]:
    rows = [(in_language(line.name, lang), line) for line in chart.lines if line.y]
    longest = min(max((cell_len(name) for name, _ in rows), default=0), max(width // 3, 16))
    bars = min(_SPARKLINE, max(width - longest - _BESIDE_SPARKLINE, 8))
    lines = [(safe(name), _curve(line, chart.log_y, bars, lang)) for name, line in rows]
    aside = f"{_view.axes(chart, lang)}{_view.said('; each to its own scale', '；各有各的刻度', lang)}"
    return [_heading(chart, lang, aside), *([pairs(lines)] if lines else []), *_note(chart, lang)]


def _curve(line: Line, log: bool, bars: int, lang: str) -> Text:
    theory = _view.said("theory, ", "理论，", lang) * line.theory
    drawn = Text(sparkline(line.y, bars, log=log), "dim cyan" if line.theory else "cyan")
    return Text.assemble(drawn, f"  {_ends(line.y, '→')}", (f"  ({theory}{_ends(line.x, '…')})", "dim"))


def _ends(values: Sequence[float | None], between: str) -> str:
    first, *others = map(number, values)
    return f"{first} {between} {others[-1]}" if others else first


def _verdict(verdict: Verdict, lang: str) -> list[RenderableType]:
    word = Text(f"{in_language(_view.OUTCOMES[verdict.outcome], lang)}  ", _STYLES[_view.TONES[verdict.outcome]])
    says, source = (in_language(each, lang) for each in (verdict.says, verdict.source))
    return [word.append_text(safe(in_language(verdict.claim, lang), "bold")), _indent(says), _indent(source, "dim")]


def _unrun(evidence: Evidence, lang: str) -> list[RenderableType]:
    left = _view.unrun(evidence, lang)
    if not left:
        return []
    heading = _view.said(f"Without a result  {len(left)}", f"没有结果  {len(left)}", lang)
    lines = [_indent(f"{params}: {why}") for params, why in left[:_MOST_UNRUN]]
    if (more := len(left) - _MOST_UNRUN) > 0:
        lines.append(_indent(_view.said(f"and {more} more", f"另有 {more} 个", lang), "dim"))
    return [Text(heading, "bold yellow"), *lines]


def _indent(content: str, style: str = "") -> RenderableType:
    return Padding(safe(content, style), (0, 0, 0, 2))
