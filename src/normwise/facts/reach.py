"""Which elements share one statistic of a norm, found by perturbing one of them, beside what its module declares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from normwise.facts.calls import random_input
from normwise.facts.flow import through_casts
from normwise.facts.norms import NormCall
from normwise.spec import NormSpec

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Contradiction", "Reach", "contradictions", "measure"]

_GROUPS = ("num_groups", "groups", "n_groups", "ngroups", "num_heads", "n_heads")
_AXES = ("axis", "axes", "dim", "dims")
_SHAPE = "normalized_shape"
# how frameworks write the layout of an activation, whatever the attribute is called; N or B batch, C channels
_FIRST = frozenset({"channels_first", "channel_first", "nchw", "bchw", "ncl", "nct", "bct", "ncw", "ncdhw", "bcdhw"})
_LAST = frozenset({"channels_last", "channel_last", "nhwc", "bhwc", "nlc", "ntc", "btc", "nwc", "ndhwc", "bdhwc"})
# float64, one element moved by ten standard deviations: what shares its statistic moves by far more than this
_MOVED = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How many elements of each axis of a norm's input move with one of them."""

    shape: tuple[int, ...]
    moved: tuple[int, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes, counted from the end, along which a statistic spans several elements."""
        return tuple(a - len(self.shape) for a, n in enumerate(self.moved) if n > 1)

    @property
    def groups(self) -> int:
        """Into how many parts the statistics split the axis that they split least, of those that they span."""
        parts = [size // n for size, n in zip(self.shape, self.moved, strict=True) if n > 1]
        return min(parts, default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """An attribute of a norm's module, and what the norm does instead."""

    attribute: str
    declared: object
    measured: object


def measure(facts: Facts, call: NormCall) -> Reach:
    """Return the reach of a norm's statistics, from two replays of it alone; torch's own ops say it themselves.

    Raises:
        NotKnown: the norm cannot be replayed by itself.
    """
    shape = facts.graph.values[call.input].shape
    if call.native and call.spec is not None:
        return _of_spec(call.spec, shape)
    x = random_input(shape, None)
    other = x.clone()
    other[(0,) * len(shape)] += 10.0
    apart = (facts.rows.double(call.core, {call.input: other}) - facts.rows.double(call.core, {call.input: x})).abs()
    moved = apart > _MOVED
    if apart.shape != torch.Size(shape):
        return Reach(shape=tuple(apart.shape), moved=_counts(moved))
    return Reach(shape=shape, moved=_counts(moved))


def _of_spec(spec: NormSpec, shape: tuple[int, ...]) -> Reach:
    reduced = {axis % len(shape): 1 for axis in spec.axes}
    if spec.groups:
        reduced[min(spec.axes) % len(shape)] = spec.groups
    return Reach(shape=shape, moved=tuple(n // reduced[a] if a in reduced else 1 for a, n in enumerate(shape)))


def _counts(moved: torch.Tensor) -> tuple[int, ...]:
    return tuple(
        int(moved.movedim(a, 0).flatten(1).any(1).sum()) if moved.ndim > 1 else int(moved.sum())
        for a in range(moved.ndim)
    )


def contradictions(facts: Facts, call: NormCall, reach: Reach) -> list[Contradiction]:
    """Return the attributes of a norm's module that its statistics do not follow."""
    record = facts.graph.calls[call.call]
    module = facts.modules.get(record.path)
    if module is None or not any(reach.moved) or not _is_norm_alone(module):
        return []
    found = []
    regrouped = through_casts(facts.flow, call.input) not in record.inputs
    for name in _GROUPS:
        declared = _number(module, name)
        if declared is not None and declared > 1 and not _splits(reach, declared, merged=regrouped):
            found.append(Contradiction(attribute=name, declared=declared, measured=reach.groups))
    if regrouped:
        return found  # its axes are numbered in a layout that the declaration does not speak of
    for name in _AXES:
        axes = _negative(module, name)
        if axes and _wide(reach, axes) != set(reach.axes) and not _kept(module, reach, axes):
            found.append(Contradiction(attribute=name, declared=list(axes), measured=list(reach.axes)))
    found += [
        Contradiction(attribute=name, declared=said, measured=list(reach.axes))
        for name, said, axis in _layouts(module)
        if _along_another(reach, axis, closing=call.native)
    ]
    sizes = _sizes(module)
    if sizes and reach.shape[-len(sizes) :] == sizes:
        trailing = tuple(range(-len(sizes), 0))
        if _wide(reach, trailing) != set(reach.axes) or any(reach.moved[a] != reach.shape[a] for a in trailing):
            found.append(Contradiction(attribute=_SHAPE, declared=list(sizes), measured=list(reach.axes)))
    return found


def _is_norm_alone(module: nn.Module) -> bool:
    """Whether nothing but gains and shifts is in a module: the groups of a convolution are no norm's."""
    return all(p.ndim <= 1 or p.numel() == max(p.shape) for p in module.parameters())


def _splits(reach: Reach, groups: int, *, merged: bool) -> bool:
    """Whether some axis behind the first is split into so many groups; the first, if merged with groups."""
    if any(n * groups == size for size, n in zip(reach.shape[1:], reach.moved[1:], strict=True)):
        return True
    return merged and reach.moved[0] == 1 and reach.shape[0] % groups == 0


def _layouts(module: nn.Module) -> list[tuple[str, object, int]]:
    """Return the attributes that say where the channels are, with their axis: 1 or -1."""
    found: list[tuple[str, object, int]] = []
    for name, value in vars(module).items():
        said = value.lower() if isinstance(value, str) else name.lower() if value is True else ""
        if said in _FIRST | _LAST:
            found.append((name, value, 1 if said in _FIRST else -1))
    return found


def _along_another(reach: Reach, channels: int, *, closing: bool) -> bool:
    """Whether a norm along one axis is along another than that of the channels.

    In three dimensions the statistics of an instance norm span one axis as well, that of the steps; only an op whose
    gain lies along what it spans (``closing``) is told from it.
    """
    dims = len(reach.shape)
    if dims < 3 or len(reach.axes) != 1 or (dims == 3 and not closing):
        return False
    axis = channels - dims if channels > 0 else channels
    return reach.shape[axis] > 1 and reach.axes[0] != axis and reach.moved[reach.axes[0]] == reach.shape[reach.axes[0]]


def _kept(module: nn.Module, reach: Reach, axes: tuple[int, ...]) -> bool:
    """Whether the declared axes are those of the channels, as Keras means them: statistics span all others.

    One axis besides batch and channels is what a layer norm along the wrong one spans as well.
    """
    others = {a - len(reach.shape) for a, n in enumerate(reach.shape) if n > 1} - set(axes)
    spanned = set(reach.axes)
    grouped = any(_number(module, name) for name in _GROUPS)
    apart = others - {-len(reach.shape)} if len(spanned) > 1 else others
    return grouped or (bool(spanned) and not spanned & set(axes) and spanned >= apart)


def _wide(reach: Reach, axes: tuple[int, ...]) -> set[int]:
    return {a for a in axes if -a <= len(reach.shape) and reach.shape[a] > 1}


def _number(module: nn.Module, name: str) -> int | None:
    value = getattr(module, name, None)
    return value if type(value) is int else None


def _negative(module: nn.Module, name: str) -> tuple[int, ...]:
    """Return declared axes counted from the end; a positive number may be a width as well."""
    value = getattr(module, name, None)
    axes = (value,) if type(value) is int else tuple(value) if isinstance(value, (tuple, list)) else ()
    return axes if axes and all(type(a) is int and a < 0 for a in axes) else ()


def _sizes(module: nn.Module) -> tuple[int, ...]:
    value = getattr(module, _SHAPE, None)
    value = (value,) if type(value) is int else value
    return tuple(value) if isinstance(value, (tuple, list)) and all(type(n) is int for n in value) else ()
