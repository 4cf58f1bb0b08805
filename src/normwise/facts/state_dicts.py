"""Reads checkpoints and load reports as they come: wrapped, prefixed, in another dtype, renamed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.rendering import both
from normwise.targets.checkpoint.keys import role
from normwise.targets.target import numberless

__all__ = [
    "LoadInfo",
    "Prefix",
    "best_prefix",
    "held_by",
    "load_info",
    "pattern",
    "renamed",
    "same",
    "tensors_of",
]

# Values are compared on this many leading elements: two layers never agree on them by chance.
SAMPLE = 4096
# Half an ulp of bfloat16: a float32 checkpoint in a bfloat16 model, or the reverse, is the same checkpoint.
ROUNDING = 2.0**-8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadInfo:
    """What a loader reported."""

    missing: frozenset[str]
    unexpected: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """How the names of a checkpoint become those of the model: take one beginning away, put another in its place."""

    checkpoint: str = ""
    model: str = ""

    def to_model(self, key: str) -> str | None:
        """Return the model's name of a checkpoint's key."""
        return self.model + key.removeprefix(self.checkpoint) if key.startswith(self.checkpoint) else None


def tensors_of(checkpoint: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, also of one inside a training checkpoint ({"state_dict": ...}).

    Raises:
        NotKnown: there are none.
    """
    if not isinstance(checkpoint, Mapping):
        name = type(checkpoint).__name__
        raise NotKnown(both(f"checkpoint is a {name}, not a state dict", f"checkpoint 是 {name}，不是 state dict"))
    try:
        found = _tensors(checkpoint)
        inner = [_tensors(v) for v in checkpoint.values() if isinstance(v, Mapping)] if not found else []
    except Exception as error:  # a mapping of the user's that reads from a file, keys that have no text
        said = f"{type(error).__name__}: {error}"[:120]
        raise NotKnown(both(f"the checkpoint cannot be read: {said}", f"检查点无法读取：{said}")) from error
    found = found or max(inner, key=len, default={})
    if not found:
        raise NotKnown(both("the checkpoint holds no tensors", "检查点中没有张量"))
    return found


def _tensors(mapping: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    return {str(k): v.detach() for k, v in mapping.items() if _plain(v)}


def held_by(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model beside the one that is checked; none where they cannot be had."""
    try:
        return _tensors(dict([*model.named_parameters(), *model.named_buffers()]))
    except Exception:  # a wrapper of the user's
        return {}


def _plain(item: Any) -> bool:
    return (
        isinstance(item, torch.Tensor)
        and item.layout is torch.strided
        and not item.is_nested
        and not item.is_quantized
        and not item.is_complex()  # no norm's
        and not numberless(item)
    )


def load_info(info: Any) -> LoadInfo | None:
    """Read what ``load_state_dict`` or ``output_loading_info`` returned; None where nothing was given.

    Raises:
        NotKnown: it is neither.
    """
    if info is None:
        return None
    if isinstance(info, Mapping):
        found = info.get("missing_keys"), info.get("unexpected_keys")
    elif isinstance(info, tuple) and len(info) == 2:
        found = info
    else:
        try:
            found = getattr(info, "missing_keys", None), getattr(info, "unexpected_keys", None)
        except Exception as error:  # properties of the user's object
            raise NotKnown(_NO_REPORT) from error
    if any(not isinstance(f, _KEYS) for f in found if f is not None) or found == (None, None):
        raise NotKnown(_NO_REPORT)
    missing, unexpected = (tuple(f or ()) for f in found)
    if not all(isinstance(key, str) for key in (*missing, *unexpected)):
        raise NotKnown(_NO_REPORT)
    return LoadInfo(missing=frozenset(missing), unexpected=frozenset(unexpected))


_KEYS = (list, tuple, set, frozenset)  # what loaders return
_NO_REPORT = both(
    "load_info has no lists of keys, missing_keys and unexpected_keys",
    "load_info 没有键的列表 missing_keys 和 unexpected_keys",
)


def same(a: torch.Tensor, b: torch.Tensor, *, shift: float = 0.0) -> bool:
    """Whether two tensors hold the same numbers in the same order, up to their dtypes, the second plus ``shift``."""
    if a.numel() != b.numel() or a.is_complex():
        return False
    x, y = (t.detach().reshape(-1)[:SAMPLE].to("cpu", torch.float32) for t in (a, b))
    return bool(((x - (y + shift)).abs() <= ROUNDING * (y.abs() + abs(shift))).all())


def best_prefix(checkpoint: Iterable[str], model: Iterable[str]) -> Prefix:
    """Return the change of a common beginning ("module.", "model.") under which most names agree."""
    ours, theirs = set(model), set(checkpoint)
    votes: Counter[Prefix] = Counter()
    votes[Prefix()] = len(ours & theirs)
    for key in theirs:
        votes.update(Prefix(checkpoint=head) for head, tail in _splits(key) if tail in ours)
    for key in ours:
        votes.update(Prefix(model=head) for head, tail in _splits(key) if tail in theirs)
    return max(votes, key=lambda p: (votes[p], -len(p.checkpoint + p.model)))


def _splits(key: str) -> Iterable[tuple[str, str]]:
    return ((key[: m.end()], key[m.end() :]) for m in re.finditer(r"\.", key))


def pattern(key: str) -> str:
    """Return a key with its numbers replaced: what the same tensor of every layer is called."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", key)


_ALIKE = 0.6  # of the words of two names: "LayerNorm.gamma" and "norm.weight" of the same layer reach it


def renamed(key: str, candidates: Iterable[str]) -> str | None:
    """Return which candidate is most likely another name of a tensor: same role, same numbers, similar words."""
    best = (_ALIKE, "")
    for other in candidates:
        if role(other) == role(key) and re.findall(r"\d+", other) == re.findall(r"\d+", key):
            best = max(best, (SequenceMatcher(None, _stem(key), _stem(other)).ratio(), other))
    return best[1] or None


def _stem(key: str) -> str:
    return key.rpartition(".")[0].lower().replace("_", "")
