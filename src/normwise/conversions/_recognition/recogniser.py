"""Finds the layer of ours that does what a foreign module does, on every layout, mode and dtype it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from normwise.conversions._apply import tensors_of
from normwise.conversions._edits import SwapNorm
from normwise.conversions._recognition.layers import Options, build, natural, take_over
from normwise.conversions._recognition.norm_like import (
    HOOKS,
    bare,
    children_after,
    further_arguments,
    may_be_norm,
    obstacle,
)
from normwise.conversions._recognition.sameness import compare, layouts
from normwise.errors import NoNorm, NotKnown
from normwise.layers._convention_probe import quiet
from normwise.layers._convention_rounding import Match, describe
from normwise.layers.convention import match_of
from normwise.spec import Gate, NormSpec, Scope

__all__ = ["Recognised", "Recogniser"]

_COUNT = "num_batches_tracked"
_STATE = {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


# what was found, for the process: norms of one class, configuration and sizes are looked at once
_KNOWN: dict[tuple[Any, ...] | None, Recognised | NotKnown] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognised:
    """A norm, and the layer that computes the same.

    Args:
        spec: what it computes.
        shape: sizes of gain and shift.
        names: what the module calls its tensors, by the layer's words.
        layer: the layer's name in ``normwise.layers``.
        options: of its constructor.
        then: children that are applied to the normalized value, in order.
        how: the dtypes on which the layer is equal to the bit.
    """

    spec: NormSpec
    shape: tuple[int, ...]
    names: Mapping[str, str]
    layer: str
    options: Options
    then: tuple[str, ...]
    how: str

    def swap(self, path: str, *, spec: NormSpec | None = None, **changed: Any) -> SwapNorm:
        """Return the edit that puts the layer, or another one, in the norm's place.

        Args:
            path: of the norm.
            spec: of another layer.
            changed: further fields of the edit. Tensors that it does not keep go.
        """
        told = {"shape": self.shape, "keeps": tuple(self.names), "layer": self.layer, "options": self.options}
        told |= {"then": self.then, **changed}
        return SwapNorm(
            path=path,
            spec=asdict(spec or self.spec),
            names={word: self.names[word] for word in told["keeps"] if self.names[word] != word},
            drops=tuple(name for word, name in self.names.items() if word not in told["keeps"]),
            **told,
        )


class Recogniser:
    """Recognises modules.

    Args:
        mixed: the layer equals the module on inputs of other dtypes than the parameters, too.
    """

    def __init__(self, *, mixed: bool = True) -> None:
        self.mixed = mixed

    def __call__(self, module: nn.Module, shape: tuple[int, ...] = ()) -> Recognised:
        """Return what a module is.

        Args:
            module: neither called nor changed: a copy with numbers of ours is; its weights need no storage.
            shape: of its input, where that is known.

        Raises:
            NoNorm: it is something else than a norm.
            NotKnown: it is a norm whose place none of our layers can take; ``why`` says why.
        """
        if not may_be_norm(module):
            raise NoNorm("it does not hold what norms hold")
        shape = () if _tells_size(module) else shape
        key = _key(module, shape, self.mixed)
        found = _KNOWN.get(key) or _recognised(module, shape, self.mixed)
        if key is not None:
            _KNOWN[key] = found
        if isinstance(found, NotKnown):
            raise type(found)(found.why)  # a new one: the traceback of the old one would keep the model
        return found


def _key(module: nn.Module, shape: tuple[int, ...], mixed: bool) -> tuple[Any, ...] | None:
    """Return what tells norms apart beside their numbers; None where that cannot be compared."""
    told = {name: value for name, value in vars(module).items() if name not in _STATE and name not in HOOKS}
    settings = {name: value for name, value in told.items() if not name.startswith("_") or _is_plain(value)}
    if module._modules or not all(map(_is_plain, settings.values())) or obstacle(module) is not None:
        return None
    sizes = ((name, tuple(tensor.shape)) for name, tensor in tensors_of(module).items())
    return (
        type(module),
        type(module).forward,
        shape,
        mixed,
        *sizes,
        *((name, repr(value)) for name, value in settings.items()),
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, NormSpec))


def _recognised(module: nn.Module, shape: tuple[int, ...], mixed: bool) -> Recognised | NotKnown:
    try:
        if isinstance(module, torch.jit.ScriptModule):
            raise NoNorm(str(obstacle(module)))
        norm = bare(module, alone=True)
        match = _match(norm, shape)
        blocked = obstacle(module)
        if blocked is not None:
            raise NotKnown(blocked)
        counts = [name for name, held in tensors_of(norm).items() if not held.ndim and not held.is_floating_point()]
        names = {**match.roles, **dict(zip((_COUNT,), counts, strict=False))}
        idle = [name for name in tensors_of(norm) if name not in names.values()]
        if idle:
            raise NotKnown(f"its {idle[0]} is no gain, shift or running statistic")
        further = list(further_arguments(module, 1 if match.spec.gate is Gate.NONE else 2))
        if further:
            raise NotKnown(f"its forward takes {further[0]!r} as well, with which it may compute something else")
        with quiet():
            return _layer_for(bare(module, alone=False), match, names, mixed)
    except NotKnown as why:
        return why


def _match(norm: nn.Module, shape: tuple[int, ...]) -> Match:
    """Return the match of a norm; one whose tensors tell no size is tried in those that its settings name."""
    if _tells_size(norm):
        return match_of(norm)
    if shape:
        return match_of(norm, example=torch.zeros(2, *shape[1:]))
    said: NotKnown | None = None
    for size in (*_sizes_of(norm), None):
        try:
            return match_of(norm, size)
        except NotKnown as why:
            said = said or why
    assert said is not None
    raise said


def _tells_size(module: nn.Module) -> bool:
    return any(tensor.numel() > 1 for tensor in tensors_of(module).values())


def _sizes_of(norm: nn.Module) -> Iterator[tuple[int, ...]]:
    settings = [value for name, value in vars(norm).items() if name not in _STATE and not isinstance(value, bool)]
    yield from (value for value in settings if isinstance(value, tuple) and value and all(map(_is_size, value)))
    yield from ((value,) for value in sorted(filter(_is_size, settings), reverse=True))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _layer_for(full: nn.Module, match: Match, names: Mapping[str, str], mixed: bool) -> Recognised:
    """Return the first layer that equals a module wherever that takes its input.

    One that refuses what the module refuses is taken before one that does not.

    Raises:
        NotKnown: there is none.
    """
    spec, then = match.spec, children_after(full)
    best: Recognised | None = None
    nearest = ""
    tails = list(_tails(full, match, names))
    shapes = list(dict.fromkeys([match.shape, *(layout for tail in tails for layout in layouts(tail))]))
    for (layer, options), tail in ((each, tail) for each in natural(spec, len(match.shape)) for tail in tails):
        try:
            new = build(layer, spec, tail, options)
            take_over(full, new, names, then)
        except (TypeError, ValueError):  # the layer does not compute this, or not with these tensors
            continue
        same = compare(full, new, shapes, gated=spec.gate is not Gate.NONE, mixed=mixed)
        if isinstance(same, str):
            nearest = nearest if nearest and "refuses" in same else f"{layer} {same}"
            continue
        if best is not None and not same.strict:
            continue
        told = {"spec": spec, "shape": tail, "names": names, "layer": layer, "options": options, "then": then}
        best = Recognised(**told, how=str(same))
        if same.strict:
            break
    if best is None:
        raise NotKnown(f"no layer equals it ({describe(spec)}): {nearest or 'none has these tensors'}")
    return best


def _tails(full: nn.Module, match: Match, names: Mapping[str, str]) -> Iterator[tuple[int, ...]]:
    """Yield the sizes that gain and shift have, or would have."""
    held = tensors_of(full)
    for word in ("weight", "bias", "running_mean"):
        if word in names and held[names[word]].numel() > 1:
            yield tuple(size for size in held[names[word]].shape if size != 1)
            return
    spec = match.spec
    yield from _sizes_of(full)
    axes = spec.axes if spec.scope in (Scope.HIDDEN, Scope.OTHER) else (min(spec.axes),)
    yield tuple(match.shape[axis] for axis in sorted(axes))
