"""A product or quotient that may be a norm, and which of several readings of it is the likeliest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from normwise.facts.terms import Term
from normwise.graph import Op

__all__ = ["Candidate", "best"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A product or quotient whose degrees cancel: a norm if the statistic is a second moment."""

    op: Op
    root: int
    numerator: Term
    statistic: Term
    core: int  # the op's output

    @property
    def members(self) -> frozenset[int]:
        """Ids of the ops between the root and the core."""
        return self.numerator.members | self.statistic.members | {self.op.id}

    @property
    def scale(self) -> float | None:
        """The constant k in core = k * x / root(mean-based statistic), where it is known."""
        a, b = self.numerator.coef, self.statistic.coef
        return None if a is None or b is None else a * b


def best(hits: Iterable[Candidate]) -> Candidate | None:
    """Return the likeliest candidate of one op.

    Prefer a second moment, then a root for which numerator and statistic are both centred, then the nearest.
    """
    hits = list(hits)
    if not hits:
        return None

    def rank(hit: Candidate) -> tuple[bool, bool, int]:
        centered = hit.numerator.centered and hit.statistic.stat == "variance"
        return (hit.statistic.second, centered, hit.root)

    return max(hits, key=rank)
