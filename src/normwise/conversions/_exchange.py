"""One kind of norm in the place of another: batch norms with and without processes, and starts for fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from normwise.conversions._edits import SwapNorm
from normwise.conversions._plan import Recipe
from normwise.conversions._recognition.layers import usual_layer
from normwise.conversions._recognition.recogniser import Recognised
from normwise.errors import NotKnown
from normwise.functional.hidden import LAYER, RMS
from normwise.layers import SyncBatchNorm
from normwise.spec import Kind, NormSpec, Scope

__all__ = ["NotOfThisKind", "check", "count", "exchanged", "is_exact", "notes"]

_STATISTICS = ("running_mean", "running_var")
_COUNT = "num_batches_tracked"
_START = "another function than before: a start for fine-tuning, not a conversion that keeps what the model computes"
_NOTES = {
    "sync-batch-norm": "the same in evaluation, and in training on one process; on several they share statistics",
    "frozen-batch-norm": "the same in evaluation; in training gain, shift and statistics no longer move",
    "batch-norm": "the same in evaluation; in training each process uses its own batch, and statistics move",
}


class NotOfThisKind(Exception):
    """The norm is none of those that are to be exchanged."""


def check(to: str | None, groups: int) -> None:
    """Refuse a kind that does not exist, and no groups."""
    if to is not None and to not in _EXCHANGES:
        raise ValueError(f"swap-layers has no to={to!r}: choose from {', '.join(_EXCHANGES)}, or leave it out")
    if groups < 1:
        raise ValueError(f"groups={groups}: a GroupNorm has at least 1 group")


def is_exact(to: str | None) -> bool:
    """Return whether the function of the model in evaluation stays."""
    return to is None or to in _NOTES


def notes(to: str | None, any_changed: bool) -> tuple[str, ...]:
    """Return what the user must know of an exchange."""
    return () if to is None or not any_changed else (_NOTES.get(to, _START),)


def exchanged(
    path: str, module: nn.Module, found: Recognised, *, to: str, groups: int, bias: bool
) -> tuple[SwapNorm, str]:
    """Return the edit that puts the other kind of norm in a norm's place, and what becomes of its function.

    Raises:
        NotOfThisKind: the norm is none of those that are exchanged.
        NotKnown: it is, but cannot be; it says why.
    """
    edit = found.swap(path, **{"options": {}, **_EXCHANGES[to](module, found, groups, bias)})
    return edit, "the same in evaluation" if is_exact(to) else "another function"


def count(key: str) -> Recipe:
    """Return the recipe of a count of batches: none yet."""
    return Recipe(keys=(key,), steps=(), shape=(), dtype="int64")


def _keeps(found: Recognised, *words: str) -> tuple[str, ...]:
    return tuple(word for word in words if word in found.names)


def _to_rms(module: nn.Module, found: Recognised, groups: int, bias: bool) -> Mapping[str, Any]:
    if found.spec.kind is not Kind.LAYER or found.spec.scope is not Scope.HIDDEN:
        raise NotOfThisKind
    spec = replace(_base(RMS, found.spec), bias=found.spec.bias and bias)
    return {"spec": spec, "layer": _layer(spec, found), "keeps": _keeps(found, "weight", *["bias"] * bias)}


def _to_layer(module: nn.Module, found: Recognised, groups: int, bias: bool) -> Mapping[str, Any]:
    if found.spec.kind is not Kind.RMS:
        raise NotOfThisKind
    spec = replace(_base(LAYER, found.spec), bias=found.spec.bias)
    return {"spec": spec, "layer": _layer(spec, found), "keeps": _keeps(found, "weight", "bias")}


def _base(usual: NormSpec, spec: NormSpec) -> NormSpec:
    """Return the usual spec of a kind with the axes, eps, gain and gate of another."""
    kept = ("axes", "eps", "groups", "weight", "weight_offset", "offset_in_weight_dtype", "gate", "gate_activation")
    return replace(usual, **{name: getattr(spec, name) for name in kept})


def _layer(spec: NormSpec, found: Recognised) -> str:
    """Return the layer over the same axes."""
    if found.layer.startswith("Channel"):
        return "ChannelLayerNorm" if spec.center else "ChannelRMSNorm" if not spec.bias else "Norm"
    return usual_layer(spec)


def _to_group(module: nn.Module, found: Recognised, groups: int, bias: bool) -> Mapping[str, Any]:
    _check_batch(found)
    channels = found.shape[0]
    if found.options.get("channel_dim", 1) != 1:
        raise NotKnown("its channels are not on axis 1, where a GroupNorm has them")
    if channels % groups:
        near = max(count for count in range(1, groups + 1) if not channels % count)
        raise NotKnown(f"{channels} channels cannot be split into {groups} groups; groups={near} can")
    spec = replace(found.spec, scope=Scope.GROUP, groups=groups, axes=(-2, -1), running=False, momentum=None)
    return {"spec": spec, "layer": "GroupNorm", "keeps": _keeps(found, "weight", "bias"), "learns": True}


def _to_sync(module: nn.Module, found: Recognised, groups: int, bias: bool) -> Mapping[str, Any]:
    _check_batch(found)
    if isinstance(module, SyncBatchNorm):
        raise NotOfThisKind
    if getattr(module, "process_group", None) is not None:
        raise NotKnown("it has a process group of its own, which a plan cannot hold; use SyncBatchNorm.convert")
    return _batch(found, "SyncBatchNorm")


def _to_batch(module: nn.Module, found: Recognised, groups: int, bias: bool) -> Mapping[str, Any]:
    if "process_group" not in vars(module) and found.layer != "FrozenBatchNorm":
        raise NotOfThisKind
    return _batch(found, "BatchNorm")


def _batch(found: Recognised, layer: str) -> Mapping[str, Any]:
    spec = found.spec
    frozen = found.layer == "FrozenBatchNorm"
    spec = replace(spec, momentum=0.1) if frozen else spec
    return {
        "spec": spec,
        "layer": layer,
        "options": {"channel_dim": found.options.get("channel_dim", 1)},
        "keeps": _keeps(found, "weight", "bias", *_STATISTICS, _COUNT),
        "creates": (_COUNT,) if spec.running and _COUNT not in found.names else (),
        "learns": True if frozen else None,
    }


def _to_frozen(module: nn.Module, found: Recognised, groups: int, bias: bool) -> Mapping[str, Any]:
    _check_batch(found)
    if not all(word in found.names for word in ("weight", "bias", *_STATISTICS)):
        raise NotKnown("a frozen batch norm holds gain, shift, mean and variance, and it lacks some of them")
    keeps = ("weight", "bias", *_STATISTICS)
    options = {"channel_dim": found.options.get("channel_dim", 1)}
    return {"spec": found.spec, "layer": "FrozenBatchNorm", "options": options, "keeps": keeps, "learns": False}


def _check_batch(found: Recognised) -> None:
    if found.spec.kind is not Kind.BATCH or found.layer == "FrozenBatchNorm":
        raise NotOfThisKind


_Exchange = Callable[[nn.Module, Recognised, int, bool], Mapping[str, Any]]
_EXCHANGES: Mapping[str, _Exchange] = {
    "rms-norm": _to_rms,
    "layer-norm": _to_layer,
    "group-norm": _to_group,
    "batch-norm": _to_batch,
    "sync-batch-norm": _to_sync,
    "frozen-batch-norm": _to_frozen,
}
