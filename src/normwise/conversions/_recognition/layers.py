"""Our layer of a spec, and how it takes over the tensors of the module it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from normwise import layers
from normwise.conversions._apply import tensors_of
from normwise.conversions._recognition.renamed import rename
from normwise.layers.scale_norm import SCALE
from normwise.spec import Gate, NormSpec, Scope, Weight

__all__ = ["Options", "Then", "build", "natural", "take_over"]

Options = Mapping[str, Any]


def natural(spec: NormSpec, rank: int) -> Iterator[tuple[str, Options]]:
    """Yield the layers that may compute a spec, the one a person would choose first, with their options.

    Args:
        spec: what is computed on inputs of ``rank`` axes.
        rank: of the input that ``spec.axes`` count in.
    """
    trailing = spec.axes == tuple(range(-len(spec.axes), 0))
    if spec.scope is Scope.BATCH:
        channel = next(axis for axis in range(-rank, 0) if axis not in spec.axes)
        dim = {"channel_dim": -1 if channel == -1 and rank > 2 else channel + rank}
        yield "FrozenBatchNorm", dim
        if dim["channel_dim"] == 1:
            yield from ((f"BatchNorm{n}d", {}) for n in (1, 2, 3))
        yield "BatchNorm", dim
        return
    if spec.scope is Scope.INSTANCE or (spec.weight is Weight.NONE and trailing and spec.center):
        yield from ((f"InstanceNorm{n}d", {}) for n in (1, 2, 3))
    if spec.scope is Scope.GROUP:
        yield "GroupNorm", {}
    if spec.scope is Scope.HIDDEN:
        if spec.gate is not Gate.NONE:
            yield "GatedRMSNorm", {}
        elif replace(spec, eps=SCALE.eps, axes=SCALE.axes) == SCALE:
            yield "ScaleNorm", {}
        elif trailing:
            yield "LayerNorm" if spec.center else "RMSNorm", {}
        elif len(spec.axes) == 1:
            name = "ChannelLayerNorm" if spec.center else "ChannelRMSNorm"
            yield name, {"channel_dim": spec.axes[0] + rank}
    yield "Norm", {}


def usual_layer(spec: NormSpec) -> str:
    """Return the name of the layer for a spec over the last axes, where nothing more is known."""
    return next(layer for layer, _ in natural(spec, len(spec.axes) + 1) if _computes(layer, spec))


def _computes(layer: str, spec: NormSpec) -> bool:
    try:
        made = build(layer, spec, (2,) * len(spec.axes), {})
    except (TypeError, ValueError):
        return False
    return getattr(made, "spec", None) == spec


def build(layer: str, spec: NormSpec, shape: tuple[int, ...], options: Options) -> nn.Module:
    """Return a layer on the meta device: its tensors come from the module it replaces.

    Args:
        layer: its name in ``normwise.layers``.
        spec: what it computes.
        shape: sizes of gain and shift.
        options: of its constructor, beyond those that the spec tells.

    Raises:
        ValueError: the layer does not compute such a spec.
    """
    return _BUILDERS.get(layer, _hidden)(getattr(layers, layer), spec, shape, {**options, "device": "meta"})


def _hidden(cls: Any, spec: NormSpec, shape: tuple[int, ...], options: Options) -> nn.Module:
    return cls(shape, spec=spec, **options)


def _one_axis(cls: Any, spec: NormSpec, shape: tuple[int, ...], options: Options) -> nn.Module:
    return cls(*shape, spec=spec, **options)


def _general(cls: Any, spec: NormSpec, shape: tuple[int, ...], options: Options) -> nn.Module:
    return cls(spec, shape, **options)


def _scale(cls: Any, spec: NormSpec, shape: tuple[int, ...], options: Options) -> nn.Module:
    return cls(shape, spec.eps, **options)


def _group(cls: Any, spec: NormSpec, shape: tuple[int, ...], options: Options) -> nn.Module:
    return cls(spec.groups, *shape, spec.eps, **_affine(spec), **options)


def _batch(cls: Any, spec: NormSpec, shape: tuple[int, ...], options: Options) -> nn.Module:
    return cls(*shape, spec.eps, spec.momentum, track_running_stats=spec.running, **_affine(spec), **options)


def _frozen(cls: Any, spec: NormSpec, shape: tuple[int, ...], options: Options) -> nn.Module:
    return cls(*shape, spec.eps, **options)


def _affine(spec: NormSpec) -> dict[str, bool]:
    return {"affine": spec.weight is not Weight.NONE, "bias": spec.bias}


_BUILDERS: Mapping[str, Callable[[Any, NormSpec, tuple[int, ...], Options], nn.Module]] = {
    **dict.fromkeys(("ChannelLayerNorm", "ChannelRMSNorm", "GatedRMSNorm"), _one_axis),
    "Norm": _general,
    "ScaleNorm": _scale,
    "GroupNorm": _group,
    "FrozenBatchNorm": _frozen,
    **{f"InstanceNorm{n}d": _batch for n in (1, 2, 3)},
    **{f"BatchNorm{n}": _batch for n in ("", "1d", "2d", "3d")},
    "SyncBatchNorm": _batch,
}


class Then:
    """A forward hook: the activation of a norm that has one built in, kept as a child under its name."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            output = module.get_submodule(name)(output)
        return output


def take_over(
    old: nn.Module,
    new: nn.Module,
    names: Mapping[str, str],
    then: tuple[str, ...] = (),
    *,
    creates: tuple[str, ...] = (),
    learns: bool | None = None,
) -> None:
    """Give a new layer the tensors of an old module: the same objects, under the names they have there.

    A parameter stays a parameter and a buffer a buffer, so ``requires_grad``, dtype, device and ties stay, too.

    Args:
        old: is not changed.
        new: a layer of ``build``.
        names: what the old module calls each tensor, by the new layer's word ("weight": "gamma").
        then: children of the old module that are applied to what the new layer returns.
        creates: tensors that the old module does not have; they are filled with zeros: a count of batches.
        learns: whether gain and shift are parameters or buffers; None: what they were.

    Raises:
        ValueError: the new layer needs a tensor that the old module does not have.
    """
    renamed: dict[str, tuple[str, tuple[int, ...]]] = {}
    for word, name in names.items():
        made = getattr(new, word, None)
        held = getattr(old, name)
        if made is None or made.numel() != held.numel():
            raise ValueError(f"{type(new).__name__} has no {word} of {held.numel()} numbers")
        if name != word and hasattr(new, name):
            raise ValueError(f"{type(new).__name__} has something else under the name {name!r}")
        new._parameters.pop(word, None)
        new._buffers.pop(word, None)
        new._non_persistent_buffers_set.discard(word)
        parameter = name in old._parameters
        if learns is not None and word in ("weight", "bias"):
            held = held if parameter is learns else nn.Parameter(held.detach()) if learns else held.detach()
            parameter = learns
        if parameter:
            new.register_parameter(name, held)
        else:
            new.register_buffer(name, held, persistent=name not in old._non_persistent_buffers_set)
        if name != word or held.shape != made.shape:
            renamed[word] = (name, tuple(made.shape))
    missing = [word for word in tensors_of(new) if word not in names.values() and word not in creates]
    if missing:
        raise ValueError(f"{type(new).__name__} needs a {missing[0]}, which the module does not have")
    device = next(iter(tensors_of(old).values())).device if creates else None
    for word in creates:
        made = new.get_buffer(word)
        new.register_buffer(word, torch.zeros(made.shape, dtype=made.dtype, device=device))
    rename(new, renamed)
    for name in then:
        new.add_module(name, old.get_submodule(name))
    if then:
        new.register_forward_hook(Then(then))
    new.train(old.training)
