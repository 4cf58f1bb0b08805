"""A value as a homogeneous function of a root, and what arithmetic does to it."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Term", "Terms", "added", "combined", "moved", "raised"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A value as a homogeneous function of one root."""

    deg: float = 1.0
    order: float = 1.0  # exponent of the full-size factor: 2 in x * x, also after a division by max|x|
    axes: tuple[int, ...] = ()  # reduced axes, negative; empty for a full-size value
    ndim: int = 0  # of the value that was reduced
    centered: bool = False
    second: bool = False  # contains a second moment
    stat: str = ""  # "mean_square", "variance", "mean", "l1", "amax"
    coef: float | None = 1.0  # factor on the mean-based statistic
    count: int = 1  # elements under the reduction
    biased: bool = True
    eps: float | None = None
    eps_known: bool = True
    eps_at: str = ""  # "inside", "outside", "clamp_inside", "clamp_outside"
    absolute: bool = False
    log: bool = False
    deferred: bool = False  # went through a bias-free linear map
    partial: bool = False  # went through a selection of elements
    eps_value: int = -1  # the guarded value
    scaled_by: tuple[int, ...] = ()  # learned vectors multiplied in
    stat_value: int = -1  # the value whose elements were reduced
    members: frozenset[int] = frozenset()

    @property
    def reduced(self) -> bool:
        """Whether a reduction was applied."""
        return bool(self.axes)


Terms = dict[int, Term]  # by root


def moved(t: Term, partial: bool) -> Term:
    """Return a term after a view; ``partial`` if elements were left out."""
    return replace(t, partial=t.partial or (partial and not t.reduced))


def raised(t: Term, exponent: float) -> Term | None:
    """Return a term to a power."""
    if t.log:
        return None
    coef = None if t.coef is None or (t.coef <= 0 and exponent != int(exponent)) or t.coef == 0 else t.coef**exponent
    return replace(
        t, deg=t.deg * exponent, order=t.order * exponent if not t.reduced else t.order, coef=coef, absolute=False
    )


def combined(a: Term, b: Term, deg: float, sign: float) -> Term | None:
    """Both full-size (x * x) or both reduced (max * rms(x / max))."""
    coef = None if a.coef is None or b.coef is None or (sign < 0 and b.coef == 0) else a.coef * b.coef**sign
    members = a.members | b.members
    if not a.reduced:
        return replace(
            a,
            deg=deg,
            order=a.order + sign * b.order,
            centered=a.centered and b.centered,
            coef=coef,
            members=members,
            partial=a.partial or b.partial,
            scaled_by=(*a.scaled_by, *b.scaled_by),
        )
    keep, other = (a, b) if a.second or not b.second else (b, a)
    if keep.second and other.second and sign > 0 and deg == 0:
        return None
    return replace(keep, deg=deg, coef=coef, members=members, second=a.second or b.second)


def added(a: Term, b: Term, sign: float) -> Term | None:
    """x - mean(x); E[x^2] - mean(x)^2; sums of like terms."""
    if a.log or b.log or abs(a.deg - b.deg) > 1e-9:
        return None
    members = a.members | b.members
    if a.reduced and b.reduced:
        if {a.stat, b.stat} == {"mean_square", "mean"} and sign < 0:
            keep = a if a.stat == "mean_square" else b
            return replace(keep, stat="variance", centered=True, members=members)
        if {a.stat, b.stat} == {"mean_square", "mean"}:
            # sum(x^2) + sum(x)^2: the sum of squares once -sum(x) is appended, which makes n + 1 of them
            keep, other = (a, b) if a.stat == "mean_square" else (b, a)
            if keep.coef == keep.count and other.coef == keep.count**2:
                return replace(keep, stat="completed", coef=keep.count + 1.0, members=members)
        return replace(a if a.second else b, members=members, coef=None, second=a.second or b.second)
    if not a.reduced and not b.reduced:
        # a sum of two parts of x (rotary embeddings) is still of degree one
        return replace(
            a, members=members, centered=a.centered and b.centered, coef=None, partial=a.partial or b.partial
        )
    full, stat = (a, b) if b.reduced else (b, a)
    if stat.stat == "mean" and not stat.second and stat.deg == 1 and full.order == 1:
        return replace(full, centered=True, members=members)
    return None
