"""What a page draws over the depth of one stack: its blocks, what was measured there, the findings pinned to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from normwise.checkup.finding import Finding
from normwise.checkup.reports import _view
from normwise.checkup.reports._words import Words
from normwise.facts.records import ProfileRow, Stack, StackKind, Sublayer
from normwise.rendering.charts import Cell, Panel, Pin, Series, depth_chart

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = ["draw", "first"]

_FEWEST_STEPS = 2  # a single one has no depth to draw over
_MOST_PINS = 10  # beyond, their labels would cover each other


def draw(index: int, stack: Stack, kinds: Sequence[StackKind], report: Report, say: Words) -> Markup | None:
    """Draw a stack over depth; nothing for a single sublayer, or where neither blocks nor numbers are known.

    Args:
        index: of the stack in the report.
        stack: the stack.
        kinds: the signatures of its sublayers; their order is that of the colours.
        report: for the profile and the findings.
        say: the words of a language.
    """
    rows = _view.profiles(report).get(index, [])
    panels = list(_panels(rows, say))
    paths = [row.path for row in rows] or [member.path for member in stack.members]
    if max(len(rows), len(stack.members)) < _FEWEST_STEPS:
        return None
    hits = _hits(report, paths)
    pinned = {step for step, _ in hits}
    cells = [_cell(step, member, kinds, step in pinned) for step, member in enumerate(stack.members)]
    return depth_chart(
        panels, title=", ".join(_view.stack_words(stack, say)), x_label=say.noun("sublayer"), cells=cells,
        pins=_pins(hits, say)[:_MOST_PINS],
    )  # fmt: skip


def _panels(rows: Sequence[ProfileRow], say: Words) -> Iterator[Panel]:
    """Yield a panel for each measure that has numbers."""
    for name, lines in _view.PANELS.items():
        series = tuple(
            Series(name=say(line), values=values, dashed=line == _view.PREDICTED, sparse=name in _view.SPARSE)
            for line, read in lines.items()
            if (values := _view.along(rows, read))
        )
        if series:
            yield Panel(name=say(name), series=series, log=name not in _view.LINEAR)


def _cell(step: int, member: Sublayer, kinds: Sequence[StackKind], pinned: bool) -> Cell:
    branch = " ".join(member.branch)
    title = f"{step}: {member.path} {branch} ({member.signature})"
    return Cell(title=title, shade=kinds.index(member.signature), pinned=pinned)


def _pins(hits: Sequence[tuple[int, Finding]], say: Words) -> list[Pin]:
    """Return a pin for each code, at the first place where it was found."""
    steps: dict[str, list[int]] = {}
    said: dict[str, str] = {}
    for step, finding in hits:
        steps.setdefault(finding.code, []).append(step)
        said.setdefault(finding.code, f"{finding.code} {finding.name}: {say.text(finding.message)}")
    return [
        Pin(at=min(at), text=f"{code} ×{len(at)}" if len(at) > 1 else code, title=said[code])
        for code, at in steps.items()
    ]


def _hits(report: Report, paths: Sequence[str]) -> list[tuple[int, Finding]]:
    """Return at which steps of depth which findings are; what holds in every module is pinned nowhere."""
    found = []
    for finding in report.findings:
        steps = {step for place in finding.paths or (finding.path,) if (step := first(place, paths)) is not None}
        if len(steps) < len(set(paths)):
            found += [(step, finding) for step in sorted(steps)]
    return found


def first(place: str, paths: Sequence[str]) -> int | None:
    """Return the first step whose module holds the place; a module that holds every step is no place."""
    if not place or all(path == place or path.startswith(f"{place}.") for path in paths):
        return None
    inside = (step for step, path in enumerate(paths) if path and f"{place}.".startswith(f"{path}."))
    return next(inside, next((step for step, path in enumerate(paths) if path.startswith(f"{place}.")), None))
