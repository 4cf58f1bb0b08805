"""Markdown: verdicts, tables and conditions, for an issue or a page of the docs; charts as tables of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from normwise.rendering import clean, in_language, obeyed_by_none
from normwise.rendering.plots import Chart
from normwise.studies._study import Table, Verdict
from normwise.studies.reports import _view

if TYPE_CHECKING:
    from normwise.studies._evidence import Evidence

__all__ = ["cell", "line", "render", "results"]

SUFFIXES = (".md",)
BINARY = False


def render(evidence: Evidence, *, lang: str = "en") -> str:
    """Return what a study found as Markdown.

    Args:
        evidence: what to show.
        lang: of the words, "en" or "zh".
    """
    found = results(evidence, lang, picture=lambda _, chart: _values(chart, lang))
    return obeyed_by_none(f"# {line(_view.title(evidence, lang))}\n\n{found}")


def results(evidence: Evidence, lang: str, *, picture: Callable[[int, Chart], str]) -> str:
    """Return verdicts, figures and conditions as sections.

    Args:
        evidence: what to show.
        lang: of the words.
        picture: the Markdown of a chart; it gets the chart and its number, from 1.
    """
    parts = [f"## {_view.said('What was found', '结果', lang)}", _view.about(evidence, lang)]
    parts += [_verdict(each, lang) for each in evidence.verdicts]
    charts = 0
    for figure in evidence.figures:
        charts += isinstance(figure, Chart)
        body = picture(charts, figure) if isinstance(figure, Chart) else _table(figure, lang)
        note = " ".join((line(in_language(figure.note, lang)), f"({line(_view.short_conditions(evidence, lang))})"))
        parts += [f"### {line(in_language(figure.title, lang))}", body, note.strip()]
    if left := _view.unrun(evidence, lang):
        parts += [f"### {_view.said('Without a result', '没有结果', lang)}", _list(left)]
    parts += [f"### {_view.said('Conditions', '条件', lang)}", _list(_view.conditions(evidence, lang))]
    return "\n\n".join(parts) + "\n"


def _list(items: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- {line(name)}: {line(value)}" for name, value in items)


def _verdict(verdict: Verdict, lang: str) -> str:
    word = in_language(_view.OUTCOMES[verdict.outcome], lang)
    claim, says, source = (line(in_language(each, lang)) for each in (verdict.claim, verdict.says, verdict.source))
    return f"**{word}**{_view.said(': ', '：', lang)}{claim}\n\n> {says}\n>\n> {source}"


def _table(table: Table, lang: str) -> str:
    rows = ([_view.cell(value, lang) for value in row] for row in table.rows)
    return _drawn([in_language(each, lang) for each in table.columns], rows, _view.numeric(table))


def _values(chart: Chart, lang: str) -> str:
    """Return the values of a chart, a row a position and a column a line."""
    positions = sorted({x for each in chart.lines for x in each.x})
    by_line = [dict(zip(each.x, each.y, strict=True)) for each in chart.lines]
    rows = ([_view.cell(v, lang) for v in (x, *(each.get(x) for each in by_line))] for x in positions)
    heading = [chart.x_label, *(each.name for each in chart.lines)]
    return _drawn([in_language(each, lang) for each in heading], rows, [True] * len(heading))


def _drawn(heading: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[bool]) -> str:
    rule = "|" + "".join("---:|" if number else "---|" for number in numbers)
    return "\n".join(
        [f"| {' | '.join(map(cell, heading))} |", rule, *(f"| {' | '.join(map(cell, row))} |" for row in rows)]
    )


def line(text: str) -> str:
    """Return text of ours on one line; a star or a bracket of it is no markup."""
    return clean(text).replace("\\", r"\\").replace("*", r"\*").replace("<", "&lt;").replace("[", r"\[")


def cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return line(text).replace("|", r"\|")
