"""One self-contained page: verdict, findings, placement, profile by depth and the norm map.

No script, no network, no file beside it: the page can be attached to a ticket or opened from a
build artifact. Everything a model named is cleaned and escaped on its way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from normwise.checkup.finding import Finding
from normwise.checkup.reports import _view
from normwise.checkup.reports._words import Words, words
from normwise.facts.records import ProfileRow, Stack, StackKind, Sublayer
from normwise.rendering.cleaning import clean, shorten
from normwise.rendering.collapse import collapse_paths
from normwise.rendering.drawing import Block, block
from normwise.rendering.numbers import number, quantity, size
from normwise.rendering.svg import Cell, Pin, Series, line_chart, strip

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
_MOST_PINS = 10  # beyond, their labels would cover each other
_MOST_PATHS = 80  # of one finding or one line of the map; the JSON report has all
_LONGEST_TILE = 24  # characters
_MOST_ROWS = 300  # of the map, or a page could grow without end


@dataclass(frozen=True, slots=True, kw_only=True)
class _StackView:
    index: int
    words: list[str]
    formula: str
    picture: Markup
    strip: Markup | None
    shades: list[tuple[int, str]]
    chart: Markup | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _FindingView:
    finding: Finding
    where: str
    count: int
    paths: list[str]
    left_out: int
    evidence: list[tuple[str, str]]
    effect: str


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
    return _template().render(
        report=report,
        say=say,
        lang="zh-CN" if lang == "zh" else "en",
        unchanged=_view.unchanged(report, say),
        tiles=_tiles(report, rows, say),
        inputs=_view.inputs(report, say),
        weights=_view.weights(report, say),
        nothing=say(_view.nothing(report)),
        no_norms=_view.no_norms(report, say),
        findings=[_finding(finding, say, most_paths) for finding in report.findings],
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
        environment=_environment(report, say),
    )


@cache
def _template() -> Template:
    """Compile the page once; every expression in it passes ``_shown``, then the autoescape."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    source = files("normwise.checkup.reports").joinpath("report.html.jinja").read_text("utf-8")
    return environment.from_string(source)


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else clean(value)


def _tiles(report: Report, rows: Sequence[_view.NormRow], say: Words) -> list[tuple[str, str, str]]:
    """Return the numbers on top: value, name, tone."""
    tiles = []
    if report.rules_run:
        tiles += [_tile(text, tone, say) for text, tone in _view.headline(report, say) if tone != "plain"]
        tiles.append(_tile(say.count(len(report.passed), "passed"), "plain", say))
        tiles.append(_tile(say.count(len(report.not_checked), "not checked"), "plain", say))
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


def _finding(finding: Finding, say: Words, most: int | None) -> _FindingView:
    where, count = _view.places(finding, say)
    paths = _collapsed(finding.paths or (finding.path,), None)
    return _FindingView(
        finding=finding,
        where=where,
        count=count,
        paths=paths[:most] if len(paths) > _view.MOST_PLACES else [],
        left_out=len(paths) - len(paths[:most]),
        evidence=_view.evidence(finding.evidence),
        effect=_view.effect(finding, say),
    )


def _collapsed(paths: Sequence[str], most: int | None) -> list[str]:
    groups = collapse_paths(paths)[:most]
    return [f"{group.label} ×{len(group.members)}" if len(group.members) > 1 else group.label for group in groups]


def _stack(index: int, stack: Stack, report: Report, say: Words) -> _StackView:
    sentence = _view.stack_words(stack, say)
    rows = _view.profiles(report).get(index, [])
    kinds = list(dict.fromkeys(member.signature for member in stack.members))
    return _StackView(
        index=index,
        words=sentence,
        formula=_view.FORMULAS.get(stack.kind, ""),
        picture=_picture(stack, ", ".join(sentence)),
        strip=_strip(stack, kinds, report, ", ".join(sentence)) if stack.members else None,
        shades=[(shade, say(_view.KINDS[kind])) for shade, kind in enumerate(kinds)] if len(kinds) > 1 else [],
        chart=_chart(rows, report, say) if rows else None,
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


def _strip(stack: Stack, kinds: list[StackKind], report: Report, sentence: str) -> Markup:
    pinned = {step for step, _ in _hits(report, [member.path for member in stack.members])}
    return strip(
        [_cell(step, member, kinds, step in pinned) for step, member in enumerate(stack.members)], title=sentence
    )


def _cell(step: int, member: Sublayer, kinds: list[StackKind], pinned: bool) -> Cell:
    branch = " ".join(member.branch)
    title = f"{step}: {member.path} {branch} ({member.signature})"
    return Cell(title=title, shade=kinds.index(member.signature), pinned=pinned)


def _chart(rows: Sequence[ProfileRow], report: Report, say: Words) -> Markup | None:
    curves = {name: values for name in _view.CURVES if (values := _view.curve(rows, name))}
    if not curves:
        return None
    series = [Series(name=say(name), values=values, dashed=name == "predicted") for name, values in curves.items()]
    hits = _hits(report, [row.path for row in rows])
    first: dict[str, list[int]] = {}
    for step, finding in hits:
        first.setdefault(finding.code, []).append(step)
    pins = [
        Pin(at=min(steps), text=f"{code} ×{len(steps)}" if len(steps) > 1 else code) for code, steps in first.items()
    ]
    return line_chart(series, title=say("Profile by depth"), x_label=say.noun("sublayer"), pins=pins[:_MOST_PINS])


def _hits(report: Report, paths: Sequence[str]) -> list[tuple[int, Finding]]:
    """Return at which steps of depth which findings are; what holds in every module is pinned nowhere."""
    found = []
    for finding in report.findings:
        steps = {step for place in finding.paths or (finding.path,) if (step := _first(place, paths)) is not None}
        if len(steps) < len(set(paths)):
            found += [(step, finding) for step in sorted(steps)]
    return found


def _first(place: str, paths: Sequence[str]) -> int | None:
    """Return the first step whose module holds the place; a module that holds every step is no place."""
    if not place or all(path == place or path.startswith(f"{place}.") for path in paths):
        return None
    inside = (step for step, path in enumerate(paths) if path and f"{place}.".startswith(f"{path}."))
    return next(inside, next((step for step, path in enumerate(paths) if path.startswith(f"{place}.")), None))


def _environment(report: Report, say: Words) -> list[tuple[str, str]]:
    cost = report.cost
    passes = [say.count(cost.forward_passes, "forward pass"), say.count(cost.backward_passes, "backward pass")]
    spent = [quantity(cost.seconds), *passes]
    if cost.peak_bytes:
        spent.append(f"{say('peak memory')} {size(cost.peak_bytes)}")
    versions = [(clean(name), clean(version)) for name, version in report.versions.items()]
    return [(say("cost"), ", ".join(spent)), *versions]
