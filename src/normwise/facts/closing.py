"""The norm that should close a stack: whether a checkpoint or a reference holds one that the model has lost."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from normwise.errors import NotKnown
from normwise.facts.outcomes import outputs_of
from normwise.facts.records import Place
from normwise.facts.repairs import effect
from normwise.facts.rewiring import closed, reference_output, relative
from normwise.facts.state_dicts import best_prefix, held_by, load_info, pattern, tensors_of
from normwise.rendering import both
from normwise.spec import Gate, Modulation, NormSpec, Scope, Weight

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Lost", "lost", "repaired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A norm that no block owns, in a checkpoint, a load report or a reference, and nowhere in the model."""

    path: str
    source: str  # "checkpoint" or "reference"
    weight: torch.Tensor | None = None  # None where only its name is known
    bias: torch.Tensor | None = None


def lost(facts: Facts, width: int | None) -> Lost | None:
    """Return the norm of a stream's width that stands outside the blocks and has no place in the model."""
    try:
        info = load_info(facts.target.load_info)
        given = {} if facts.target.checkpoint is None else tensors_of(facts.target.checkpoint)
    except NotKnown:
        return None
    live = facts.target.model.state_dict()
    found = next(_alone(given, live, width), None)
    if found is not None:
        return dataclasses.replace(found, source="checkpoint")
    if facts.target.reference is not None:
        found = next(_alone(held_by(facts.target.reference), live, width), None)
    if found is None and not given and info is not None:
        found = next(_named(info.unexpected, live), None)
        return dataclasses.replace(found, source="checkpoint") if found is not None else None
    return found


def _alone(tensors: Mapping[str, torch.Tensor], live: Mapping[str, Any], width: int | None) -> Iterator[Lost]:
    """Yield the modules of a state dict that hold one or two vectors of the width and are not in the model."""
    prefix = best_prefix(tensors, live)
    kinds = Counter(pattern(k) for k in tensors)
    leaves: dict[str, list[str]] = {}
    for key in tensors:
        leaves.setdefault(key.rpartition(".")[0], []).append(key)
    for path, keys in leaves.items():
        vectors = [tensors[k] for k in keys]
        gone = all(prefix.to_model(k) not in live for k in keys)
        repeated = any(kinds[pattern(k)] > 1 for k in keys) and "." in path
        if not gone or repeated or len(keys) > 2 or any(v.dim() != 1 or v.numel() != width for v in vectors):
            continue
        if len(keys) == 1 and keys[0].rpartition(".")[2] in ("bias", "beta", "b"):
            continue  # the bias of something else
        first, *rest = sorted(keys, key=lambda k: k.rpartition(".")[2] in ("bias", "beta", "b"))
        yield Lost(
            path=path, source="reference", weight=tensors[first].detach(), bias=tensors[rest[0]] if rest else None
        )


def _named(unexpected: frozenset[str], live: Mapping[str, Any]) -> Iterator[Lost]:
    """Yield a module that only a load report names: outside numbered blocks, called a norm."""
    for key in sorted(unexpected):
        path, _, last = key.rpartition(".")
        if last in ("weight", "gamma", "scale") and not any(p.isdigit() for p in path.split(".")[:-1]):
            word = path.rpartition(".")[2].lower()
            if ("norm" in word or word.startswith("ln")) and key not in live:
                yield Lost(path=path, source="checkpoint")


def repaired(facts: Facts, stack: int, found: Lost | None) -> dict[str, Any]:
    """Put a norm on the stack's end and return the effect: on the distance to the reference, or on the output.

    Raises:
        NotKnown: the values are not at hand.
    """
    end = facts.placed.streams[stack].adds[-1].out
    spec = _spec(facts, stack)
    weight, bias = (found.weight, found.bias) if found is not None else (None, None)
    stored = Weight.VECTOR if weight is not None else Weight.NONE
    if weight is None:
        spec = dataclasses.replace(spec, weight_offset=0.0, offset_in_weight_dtype=False, weight_on_input=False)
    spec = dataclasses.replace(spec, weight=stored, bias=bias is not None)
    run = closed(facts, end, spec, weight, bias)
    before, after = outputs_of(facts.runs.base)[0], outputs_of(run)[0]
    change = both("a norm like the blocks' put on the end of the stream", "在残差流末端加上与各块同类的归一化")
    if facts.target.reference is not None:
        try:
            expected = reference_output(facts)
        except NotKnown:
            pass
        else:
            distances = relative(before, expected), relative(after, expected)
            return effect(change, "relative_distance_to_reference", *map(_number, distances))
    return effect(change, "output_standard_deviation", *(_number(float(t.double().std())) for t in (before, after)))


def _number(value: float) -> float:
    return value if value < 1e300 else 1e300


def _spec(facts: Facts, stack: int) -> NormSpec:
    """Return what the norms before the stack's sublayers compute."""
    for site in facts.sites:
        spec = site.row.spec
        if spec is None or site.row.placement is not Place.PRE or site.row.stack != stack:
            continue
        if spec.scope is Scope.HIDDEN and not spec.groups and spec.axes == (-1,):
            return dataclasses.replace(spec, gate=Gate.NONE, modulation=Modulation.NONE)
    raise NotKnown(both("the blocks' norms are of another kind", "各块的归一化是另一种"))
