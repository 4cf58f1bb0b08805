"""Which tensors of a checkpoint belong to norms, by the sets of their keys, their ranks and their words.

    weight                                  RMSNorm, or LayerNorm without a shift; its name has to say that it is a norm
    weight, bias                            LayerNorm (a GroupNorm has the same keys)
    running_mean, running_var, ...          BatchNorm

Names are evidence here and nowhere else: a checkpoint holds nothing that could be run.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from normwise.targets.checkpoint.limits import NORM_ELEMENTS
from normwise.targets.checkpoint.safetensors_header import Entry

__all__ = ["Keys", "NormKeys", "names_a_norm", "norms_of", "role"]

_WORDS = ("norm", "ln", "bn")  # in the name of a norm
_WHOLE_WORD = "rms"  # which is in "transforms" too

# other names of a gain and a shift: TensorFlow's, Flax's, hand-written ones
_ROLES = {
    "gamma": "weight", "scale": "weight", "g": "weight", "gain": "weight", "w": "weight",
    "beta": "bias", "b": "bias", "offset": "bias", "shift": "bias",
    "moving_mean": "running_mean", "moving_variance": "running_var", "mean": "running_mean", "var": "running_var",
}  # fmt: skip
_AFFINE = frozenset({"weight", "bias"})
_RUNNING = ("running_mean", "running_var")
_COUNT = "num_batches_tracked"
# names that are a norm's only together with a word
_AMBIGUOUS = frozenset(_ROLES) - {"moving_mean", "moving_variance"}
# a norm without a module of its own: "linear_qkv.layer_norm_weight" of Megatron
_INLINE = re.compile(r"(?P<norm>.*(?:norm|ln|bn)[a-z0-9]*)_(?P<role>[a-z]+)")
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_COUNTS = frozenset({"I64", "I32"})


class Keys(StrEnum):
    """What the set of keys of a norm is."""

    WEIGHT = "weight"
    WEIGHT_AND_BIAS = "weight and bias"
    RUNNING = "running statistics"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormKeys:
    """The tensors of one norm."""

    path: str
    keys: Keys
    names: Mapping[str, str]  # by role, in torch's words: "weight", "bias", "running_mean", ...


def role(key: str) -> str:
    """Return what a key says a tensor is, in torch's word for it: "weight", "bias", "running_mean", ..."""
    last = key.rpartition(".")[2].lower()
    return _ROLES.get(last, last)


def names_a_norm(name: str) -> bool:
    """Whether a name, the last part of a path, is that of a norm."""
    name = name.lower()
    return any(word in name for word in _WORDS) or _WHOLE_WORD in name.split("_")


def norms_of(entries: Mapping[str, Entry]) -> Iterator[NormKeys]:
    """Yield the norms of a checkpoint, in the order of its keys."""
    modules = defaultdict[str, dict[str, str]](dict)
    crowded = set[str]()
    for name in entries:
        path, said = _split(name)
        if said in modules[path]:
            crowded.add(path)  # "weight" and "gamma" in one module
        modules[path][said] = name
    for path, names in modules.items():
        if path not in crowded and (found := _norm(path, names, entries)) is not None:
            yield found


def _split(name: str) -> tuple[str, str]:
    path, _, last = name.rpartition(".")
    inline = _INLINE.fullmatch(last.lower())
    if inline is not None and (said := role(inline["role"])) in _AFFINE:
        return f"{path}.{last[: inline.end('norm')]}".removeprefix("."), said
    return path, role(name)


def _norm(path: str, names: Mapping[str, str], entries: Mapping[str, Entry]) -> NormKeys | None:
    if _RUNNING[1] in names:
        return _batch_norm(path, names, entries)
    if "weight" not in names or not names.keys() <= _AFFINE:
        return None
    weight = entries[names["weight"]]
    if "bias" not in names and len(weight.shape) == 2:
        return None  # most tensors of most checkpoints
    if weight.dtype not in _FLOATS or not 1 < math.prod(weight.shape) <= NORM_ELEMENTS:
        return None
    named = _named(path)
    if any(n.rpartition(".")[2].lower() in _AMBIGUOUS for n in names.values()) and not named:
        return None  # a layer scale is called gamma too
    if "bias" not in names:
        plain = len(weight.shape) == 1 or (len(weight.shape) > 2 and sum(s > 1 for s in weight.shape) == 1)
        return NormKeys(path=path, keys=Keys.WEIGHT, names=names) if named and plain else None
    bias = entries[names["bias"]]
    if bias.shape != weight.shape or bias.dtype not in _FLOATS or (len(weight.shape) > 1 and not named):
        return None
    return NormKeys(path=path, keys=Keys.WEIGHT_AND_BIAS, names=names)


def _batch_norm(path: str, names: Mapping[str, str], entries: Mapping[str, Entry]) -> NormKeys | None:
    kept = {said: n for said, n in names.items() if said in (*_AFFINE, *_RUNNING, _COUNT)}
    if any(n.rpartition(".")[2].lower() in ("mean", "var") for n in kept.values()) and not _named(path):
        return None  # of data, not of a norm
    var = entries[kept["running_var"]]
    if len(var.shape) != 1 or not 0 < var.shape[0] <= NORM_ELEMENTS or var.dtype not in _FLOATS:
        return None
    count = kept.pop(_COUNT, None)
    if any(entries[n].shape != var.shape or entries[n].dtype not in _FLOATS for n in kept.values()):
        return None
    if count is not None and entries[count].dtype in _COUNTS and math.prod(entries[count].shape) == 1:
        kept[_COUNT] = count
    return NormKeys(path=path, keys=Keys.RUNNING, names=kept)


def _named(path: str) -> bool:
    """Whether the last word of a path, or the one before its number, is that of a norm."""
    parts = path.lower().split(".")
    while len(parts) > 1 and parts[-1].isdecimal():
        parts.pop()
    return names_a_norm(parts[-1])
