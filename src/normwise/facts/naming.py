"""Which placement a stack has: its sublayers' wirings beside what ``normwise.placements`` would wire.

A placement is recognised by structure and by how its constants go with depth, not by their size: DeepNorm with the
alpha of another depth is still DeepNorm, and another rule says that its constant is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from normwise import placements
from normwise.placements import Placement
from normwise.spec import Gain, Wiring

__all__ = ["SHARE", "MatrixGain", "Wired", "has_twins", "named", "with_initial_gains"]

# a stack is named after a signature, or a placement, only if this share of its adds has it (DESIGN 5)
SHARE = 0.85
# constants come through float32
_AGREE = 1e-3
_CONSTANTS = ("input_scale", "skip_scale", "branch_scale")
_FLAGS = ("before", "after_branch", "after_add", "inner", "parallel", "shares_norm", "adds_block_input")
# A standard deviation of n numbers strays by 1 / sqrt(2n), relative: of hundreds of matrices one may by 4 of these.
_SIGMAS = 4
_LAYERS = 2  # of one layer, gains that go with depth are 1


@dataclass(frozen=True, slots=True)
class Wired:
    """A sublayer as it was found."""

    wiring: Wiring
    layer: int  # of the stack, from 0
    sublayer: str  # one of ``placements.SUBLAYERS``


def named(seen: Sequence[Wired], depth: int, plain: str, *, summed_twice: bool) -> str | None:
    """Return the placement of a stack of ``depth`` layers, or None where none fits.

    Of several that fit, ``plain`` is named, that of the stack's kind: at depth 1 constants that go with depth are 1.
    Else it is one without initial gains: see ``with_initial_gains``. ``summed_twice``: the branches are added up beside
    the stream, too.
    """
    fits = [
        each
        for each in map(placements.get, placements.names())
        if (each.streams > 1) == summed_twice and _fits(each, seen, depth)
    ]
    fits.sort(key=lambda each: (each.name != plain, bool(each.gains(0, depth))))
    return fits[0].name if fits else None


def _fits(placement: Placement, seen: Sequence[Wired], depth: int) -> bool:
    wanted = [placement.wire(each.layer, depth, sublayer=each.sublayer) for each in seen]
    alike = sum(_alike(want, each.wiring) for want, each in zip(wanted, seen, strict=True))
    shown = {_flags(want) for want in wanted}
    whole = {_flags(placement.wire(layer, depth, sublayer=s)) for layer in range(depth) for s in ("attention", "mlp")}
    # a placement whose sublayers differ is told by all of them, and from a few odd ones by all that it wires otherwise
    if not whole <= shown or alike < (SHARE * len(seen) if len(shown) == 1 else len(seen)):
        return False
    return all(
        _go_alike([(getattr(want, name), getattr(each.wiring, name)) for want, each in zip(wanted, seen, strict=True)])
        for name in _CONSTANTS
    )


def _flags(wiring: Wiring) -> tuple[bool, ...]:
    return tuple(getattr(wiring, name) for name in _FLAGS)


def _alike(want: Wiring, found: Wiring) -> bool:
    """Whether norms and learned factors stand at the same places; head gains and norms of q and k are not compared."""
    if _flags(want) != _flags(found) or ("v" in want.qkv and "v" not in found.qkv):
        return False
    return _same_gain(want.skip_gain, found.skip_gain) and _same_gain(want.branch_gain, found.branch_gain)


def _same_gain(want: Gain | None, found: Gain | None) -> bool:
    if want is None or found is None:
        return want is found
    return want.vector == found.vector and (want.vector or want.shared == found.shared)


def _go_alike(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether constants found are those wanted up to one factor, on the same side of 1; no constant is 1."""
    if all(abs(want - 1) < _AGREE for want, _ in pairs):
        return all(abs(found - 1) < _AGREE for _, found in pairs)
    if any(found <= 0 for _, found in pairs):
        return False
    ratios = [found / want for want, found in pairs]
    if max(ratios) > (1 + _AGREE) * min(ratios):
        return False
    return any((found - 1) * (want - 1) > 0 and abs(found - 1) > _AGREE for want, found in pairs)


class MatrixGain(NamedTuple):
    """With what gain a matrix of a branch was drawn.

    Args:
        layer: of the stack, from 0.
        gain: the standard deviation over Xavier's, sqrt(2 / (fan_in + fan_out)).
        numel: how many numbers it holds.
    """

    layer: int
    gain: float
    numel: int


def has_twins(name: str, depth: int) -> bool:
    """Return whether placements that are wired like this one draw their weights with gains."""
    return any(True for _ in _twins(name, depth))


def _twins(name: str, depth: int) -> Iterator[Placement]:
    like = placements.get(name)
    for each in map(placements.get, placements.names()):
        if each is not like and each.gains(0, depth) and each.wire(0, depth) == like.wire(0, depth):
            yield each


def with_initial_gains(name: str, gains: Sequence[MatrixGain], depth: int) -> str:
    """Return the placement that is wired like ``name`` and draws its weights with these gains, or ``name``.

    ``gains`` are those of all matrices of the ``depth`` layers but those that make queries and keys.
    """
    if depth < _LAYERS or len({each.layer for each in gains}) < depth:
        return name
    return next((each.name for each in _twins(name, depth) if _drawn_with(each, gains, depth)), name)


def _drawn_with(placement: Placement, gains: Sequence[MatrixGain], depth: int) -> bool:
    """Whether each matrix has a gain of its layer, and each layer has all its gains."""
    for layer in range(depth):
        by_role = placement.gains(layer, depth)
        wanted = {round(by_role.get(role, 1.0), 6) for role in ("v", "out", "up", "down")}
        met = set[float]()
        for each in gains:
            if each.layer == layer:
                nearest = min(wanted, key=lambda want: abs(want - each.gain))
                if abs(each.gain / nearest - 1) > _SIGMAS / (2 * each.numel) ** 0.5:
                    return False
                met.add(nearest)
        if met != wanted:
            return False
    return True
