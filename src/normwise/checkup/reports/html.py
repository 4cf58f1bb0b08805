"""One self-contained page: verdict, findings with their evidence and repair, each stack over depth, the norm map.

No script, no network, no file beside it: the page can be attached to a ticket or opened from a
build artifact. Everything a model named is cleaned and escaped on its way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from normwise.checkup.finding import Finding
from normwise.checkup.reports import _depth, _pages, _quiet, _view
from normwise.checkup.reports._words import Words, words
from normwise.facts.records import Stack, StackKind
from normwise.rendering.charts import bars
from normwise.rendering.cleaning import clean, respelled, shorten
from normwise.rendering.collapse import collapse_paths
from normwise.rendering.drawing import Block, block
from normwise.rendering.numbers import number
from normwise.rendering.pages import page_template
from normwise.rendering.prose import prose

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = ["render"]

SUFFIXES = (".html", ".htm")
FILE_OPTIONS: dict[str, Any] = {}

_BRANCHES = {
    StackKind.PRE: (("N", "F"),),
    StackKind.POST: (("F",),),
    StackKind.SANDWICH: (("N", "F", "N"),),
    StackKind.RES_POST: (("F", "N"),),
    StackKind.PARALLEL: (("N", "A"), ("N", "M")),
    StackKind.PARALLEL_SHARED: (("N", "A"), ("M",)),
    StackKind.NONE: (("F",),),
}
_UNKNOWN_BRANCH = (("?",),)
_PREDICTED_PANELS = [lines for lines in _view.PANELS.values() if _view.PREDICTED in lines]
_MOST_STACKS = 6  # that are drawn; the others are in words
_MOST_PATHS = 80  # of one finding or one line of the map; the JSON report has all
_LONGEST_TILE = 24  # characters
_MOST_ROWS = 300  # of the map, or a page could grow without end


@dataclass(frozen=True, slots=True, kw_only=True)
class _StackView:
    words: list[str]
    formula: str
    picture: Markup
    shades: list[tuple[int, str]]
    chart: Markup | None
    measured: bool
    predicted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _FindingView:
    finding: Finding
    where: str
    count: int
    paths: list[str]
    left_out: int
    evidence: list[tuple[str, str]]
    effect: str
    bars: Markup | None
    again: str
    explained: str
    page: Markup
    docs: str


def render(report: Report, *, full: bool = False, lang: str = "en") -> str:
    """Return the report as one HTML page.

    Args:
        report: what to show.
        full: every norm on its own line, and no path left out.
        lang: language of the words around the data, "en" or "zh".
    """
    say = words(lang)
    rows = _view.norm_rows(report.norms, say, full=full)
    most_rows, most_paths = (None, None) if full else (_MOST_ROWS, _MOST_PATHS)
    page = page_template("normwise.checkup.reports", "report.html.jinja").render(
        report=report,
        say=say,
        lang="zh-CN" if lang == "zh" else "en",
        unchanged=_view.unchanged(report, say),
        tiles=_tiles(report, rows, say),
        about=_view.about(report, say),
        nothing=say(_view.nothing(report)),
        no_norms=_view.no_norms(report, say),
        no_stacks=say(_view.no_stacks(report)),
        findings=_findings(report, say, most_paths),
        stacks=[_stack(index, stack, report, say) for index, stack in enumerate(report.placement.stacks)],
        also=[
            (say("embedding norm"), report.placement.embedding_norm),
            (say("QK norm"), report.placement.qk_norm),
            (say("inner norm"), report.placement.inner_norm),
        ],
        rows=rows[:most_rows],
        rows_left_out=len(rows) - len(rows[:most_rows]),
        several_stacks=len({row.stack for row in rows} - {""}) > 1,
        several_calls=any(row.calls != 1 for row in rows),
        most_paths=most_paths,
        not_executed=_collapsed(report.not_executed, most_paths),
        apart=_collapsed([site.path for site in report.listed_apart], most_paths),
        passed=[(clean(code), clean(_pages.title_of(code, lang))) for code in report.passed],
        not_checked=[
            (why, [(code, clean(_pages.title_of(code, lang))) for code in codes])
            for why, codes in _view.reasons(report, say)
        ],
        suppressed=_quiet.suppressed(report, say),
        unused=_quiet.unused(report, say),
        environment=_environment(report, say),
        tolerances=_tolerances(report, say),
    )
    return respelled(page, "&#{};")


def _tiles(report: Report, rows: Sequence[_view.NormRow], say: Words) -> list[tuple[str, str, str]]:
    """Return the numbers on top: value, name, tone."""
    tiles = []
    if report.rules_run:
        tiles += [_tile(text, tone, say) for text, tone in _view.headline(report, say) if tone != "plain"]
        tiles.append(_tile(say.count(len(report.passed), "passed"), "plain", say))
        tiles.append(_tile(say.count(len(report.not_checked), "not checked"), "plain", say))
        if report.suppressed:
            tiles.append(_tile(say.count(len(report.suppressed), "suppressed"), "plain", say))
    tiles.append(_tile(say.count(len(report.norms), "norm"), "plain", say))
    if report.placement.stacks:
        largest = report.placement.stacks[0]
        kind = shorten(clean(largest.name), _LONGEST_TILE) if largest.name else say(_view.KINDS[largest.kind])
        tiles.append((kind, say.count(largest.sublayers, "sublayer"), "plain"))
    return tiles


def _tile(sentence: str, tone: str, say: Words) -> tuple[str, str, str]:
    """Split "28 norms" into the number and its name; a sentence without a number is all value."""
    head, _, rest = sentence.partition(" ")
    rest = rest[1:] if say.lang == "zh" else rest  # without its measure word
    return (head, rest, tone) if head.isdigit() else (sentence, "", tone)


def _findings(report: Report, say: Words, most: int | None) -> list[_FindingView]:
    """Return every finding; the page of a rule is with the first of its findings."""
    seen: set[str] = set()
    views = []
    for finding in report.findings:
        page = "" if finding.code in seen else _pages.page_of(finding.code, say.lang)
        views.append(_finding(finding, say, most, clean(report.reproduce(finding)), page))
        seen.add(finding.code)
    return views


def _finding(finding: Finding, say: Words, most: int | None, again: str, page: str) -> _FindingView:
    where, count = _view.places(finding, say)
    paths = _collapsed(finding.paths or (finding.path,), None)
    return _FindingView(
        finding=finding,
        where=where,
        count=count,
        paths=paths[:most] if len(paths) > _view.MOST_PLACES else [],
        left_out=len(paths) - len(paths[:most]),
        evidence=_view.evidence(finding.evidence, say),
        effect=_view.effect(finding, say),
        bars=_bars(finding, say),
        again=again,
        explained=_view.explained(finding, say),
        page=prose(page),
        docs=_pages.file_of(finding.docs, say.lang),
    )


def _bars(finding: Finding, say: Words) -> Markup | None:
    """Draw what a repair moved, where it is a number."""
    numbers = _view.moved(finding)
    if numbers is None:
        return None
    named = list(zip((say("before"), say("after")), numbers, strict=True))
    return bars(named, title=_view.effect(finding, say))


def _collapsed(paths: Sequence[str], most: int | None) -> list[str]:
    groups = collapse_paths(paths)[:most]
    return [f"{group.label} ×{len(group.members)}" if len(group.members) > 1 else group.label for group in groups]


def _stack(index: int, stack: Stack, report: Report, say: Words) -> _StackView:
    sentence = _view.stack_words(stack, say)
    rows = _view.profiles(report).get(index, [])
    kinds = list(dict.fromkeys(member.signature for member in stack.members))
    return _StackView(
        words=sentence,
        formula=_view.FORMULAS.get(stack.kind, ""),
        picture=_picture(stack, ", ".join(sentence)),
        shades=[(shade, say(_view.KINDS[kind])) for shade, kind in enumerate(kinds)] if len(kinds) > 1 else [],
        chart=_depth.draw(index, stack, kinds, report, say) if index < _MOST_STACKS else None,
        measured=any(_view.curve(rows, name) for name in _view.CURVES),
        predicted=any(_view.along(rows, lines[_view.PREDICTED]) for lines in _PREDICTED_PANELS),
    )


def _picture(stack: Stack, sentence: str) -> Markup:
    wiring = stack.members[0].wiring if stack.members else None
    return block(
        Block(
            branches=_BRANCHES.get(stack.kind, _UNKNOWN_BRANCH),
            shared=stack.kind is StackKind.PARALLEL_SHARED,
            after_add=stack.kind is StackKind.POST,
            starts_with_norm=stack.starts_with_norm,
            final_norm=stack.final_norm,
            times=stack.sublayers,
            skip=_scale(wiring.skip_scale if wiring else 1.0),
            branch=_scale(wiring.branch_scale if wiring else 1.0),
            words=sentence,
        )
    )


def _scale(factor: float) -> str:
    return "" if factor == 1.0 else f"×{number(factor)}"


def _environment(report: Report, say: Words) -> list[tuple[str, str]]:
    effort = [(say("effort"), clean(report.effort)), (say("cost"), _view.cost(report, say))]
    call = [(say("reproduce"), clean(report.call))] if report.call else []
    return [*effort, *call, *((clean(name), clean(version)) for name, version in report.versions.items())]


def _tolerances(report: Report, say: Words) -> list[tuple[str, str]]:
    """Return the numbers that each rule judged by."""
    rows = []
    for code, numbers in report.tolerances.items():
        named = [f"{name} {value}" for name, value in _view.evidence(numbers, say)]
        rows.append((clean(code), " · ".join(named)))
    return rows
