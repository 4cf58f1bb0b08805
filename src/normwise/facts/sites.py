"""Turns norm executions into the rows of the map: one site a module and position, however often it runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from normwise.facts.norms import NormCall
from normwise.facts.placing import Placed, Seat
from normwise.facts.records import Evidence, NormSite, Place
from normwise.graph import Graph
from normwise.rendering import both, in_language

__all__ = ["Site", "sites_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A row of the map with the executions behind it, for rules that need more than the row."""

    row: NormSite
    calls: tuple[NormCall, ...]


def sites_of(graph: Graph, norms: tuple[NormCall, ...], placed: Placed | None) -> tuple[Site, ...]:
    """Group executions by module and by their order within one call of it."""
    groups: dict[tuple[str, int], list[NormCall]] = defaultdict(list)
    seen: Counter[int] = Counter()
    for norm in norms:
        groups[graph.calls[norm.call].path, seen[norm.call]].append(norm)
        seen[norm.call] += 1
    several = Counter(path for path, _ in groups)
    return tuple(
        _site(graph, path if several[path] == 1 else f"{path}#{order}", members, placed)
        for (path, order), members in groups.items()
    )


def _site(graph: Graph, path: str, members: list[NormCall], placed: Placed | None) -> Site:
    first = members[0]
    seats = [placed.seats[n.op.id] for n in members] if placed else [Seat(Place.UNKNOWN)]
    place = Counter(s.place for s in seats).most_common(1)[0][0]
    seat = next(s for s in seats if s.place is place)
    worst = max((n.evidence for n in members), key=list(Evidence).index)
    notes = [n for n in (first.note, seat.note, _places_note(seats)) if n]
    row = NormSite(
        path=path,
        spec=first.spec,
        placement=place,
        stack=seat.stack,
        layer=seat.layer,
        calls=len(members),
        native=first.native,
        evidence=worst,
        source=str(first.op.source) if first.op.source else None,
        note=both("; ".join(notes), "；".join(in_language(n, "zh") for n in notes)) if notes else None,
        weight_path=_name(graph, first.weight),
        bias_path=_name(graph, first.bias),
        shape=graph.values[first.input].shape,
        dtype=graph.values[first.input].dtype,
        class_name=graph.calls[first.call].class_name,
    )
    return Site(row=row, calls=tuple(members))


def _places_note(seats: list[Seat]) -> str | None:
    counts = Counter(s.place for s in seats)
    if len(counts) < 2:
        return None
    said = ", ".join(f"{p} x{c}" for p, c in counts.most_common())
    return both(f"used in several places: {said}", f"用在多处：{said}")


def _name(graph: Graph, value: int | None) -> str | None:
    return graph.values[value].names[0] if value is not None and graph.values[value].names else None
