"""The norms of a checkpoint by itself: what its keys and its config.json say of them, and what they leave open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from normwise.errors import NotKnown
from normwise.facts.records import Evidence, NormSite, Place
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.spec import Cast, Kind, NormSpec, Scope, Statistic, Weight
from normwise.targets.checkpoint.keys import Keys
from normwise.targets.checkpoint.stored import StoredNorm

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["NO_FAMILY", "NO_FORWARD", "need_conventions", "sites"]

NO_FORWARD = both(
    "needs the model: a checkpoint has no forward; give FILE.py:callable that loads it, or hf:DIR",
    "需要模型：检查点没有 forward；给出加载它的 FILE.py:callable，或 hf:DIR",
)
NO_FAMILY = both(
    "whether these norms add 1 to their gain is not in a checkpoint: needs config.json with a known model_type",
    "检查点不说明这些归一化是否给增益加 1：需要带有已知 model_type 的 config.json",
)
_ROW_SHIFT = both("by its keys; a GroupNorm has the same", "依据其键；GroupNorm 的键也相同")
_ROW_OPEN = both(
    "by its key: RMSNorm, or LayerNorm without a shift; whether it adds 1 to its gain is not known",
    "依据其键：RMSNorm，或没有偏移的 LayerNorm；不知道它是否给增益加 1",
)
_BATCH = NormSpec(
    scope=Scope.BATCH, axes=(-1,), center=True, statistic=Statistic.VARIANCE, eps=None, bias=True, stats_dtype=None,
    running=True,
)  # fmt: skip
_LAYER = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=None, bias=True, stats_dtype=None)
# Gains that start at 1 keep a mean near it, stored ones of 1 + weight start at 0. Between the two lies 0.5.
_PLAIN = 0.5


def sites(facts: Facts) -> tuple[Site, ...]:
    """Return a row for every norm of the checkpoint, without executions."""
    assert facts.target.stored is not None
    families = _families(facts)
    return tuple(Site(row=_row(facts, norm, families), calls=()) for norm in facts.target.stored.norms)


def need_conventions(facts: Facts, kinds: Sequence[Kind]) -> None:
    """Make sure that the gains of some kinds can be judged.

    Raises:
        NotKnown: a norm that may be of these kinds has a gain of which the convention is not known.
    """
    if {Kind.LAYER, Kind.RMS}.isdisjoint(kinds):
        return
    if any(site.row.spec is None and site.row.weight_path is not None for site in facts.stored_sites):
        raise NotKnown(NO_FAMILY)


def _families(facts: Facts) -> tuple[NormSpec, ...]:
    try:
        return tuple(spec for _, spec in facts.conventions.families)
    except NotKnown:
        return ()


def _row(facts: Facts, norm: StoredNorm, families: Sequence[NormSpec]) -> NormSite:
    spec, note = _spec(facts, norm, families)
    weight = norm.tensors.get("weight", norm.tensors.get("running_var"))
    assert weight is not None
    return NormSite(
        path=norm.path,
        spec=spec,
        placement=Place.UNKNOWN,
        calls=0,
        evidence=Evidence.KEYS if spec is not None else Evidence.UNKNOWN,
        note=note,
        weight_path=norm.names.get("weight"),
        bias_path=norm.names.get("bias"),
        shape=tuple(weight.shape),
        dtype=str(weight.dtype).removeprefix("torch."),
    )


def _spec(facts: Facts, norm: StoredNorm, families: Sequence[NormSpec]) -> tuple[NormSpec | None, str | None]:
    """Return what is known of a norm, None where the use of its gain is not, and a remark for the map."""
    if norm.keys is Keys.RUNNING:
        weight = Weight.VECTOR if "weight" in norm.tensors else Weight.NONE
        return _with_eps(facts, replace(_BATCH, bias="bias" in norm.tensors, weight=weight)), None
    if norm.keys is Keys.WEIGHT_AND_BIAS:
        known = [f for f in families if f.kind is Kind.LAYER and f.bias]
        if len({f.weight_offset for f in known}) == 1:
            return _with_eps(facts, _bare(known[0])), None
        return (_with_eps(facts, _LAYER), _ROW_SHIFT) if _around_one(facts) else (None, _ROW_SHIFT)
    known = [f for f in families if f.kind in (Kind.LAYER, Kind.RMS) and f.weight is not Weight.NONE and not f.bias]
    if not known or len({(f.kind, f.weight_offset) for f in known}) > 1:
        return None, _ROW_OPEN
    return _with_eps(facts, _bare(known[0])), None


def _around_one(facts: Facts) -> bool:
    """Whether the gains beside a shift lie around 1, so that nothing is added to them."""
    assert facts.target.stored is not None
    gains = [n.tensors["weight"].double() for n in facts.target.stored.norms if n.keys is Keys.WEIGHT_AND_BIAS]
    means = sorted(float(g.mean()) for g in gains if bool(g.isfinite().all()))
    return bool(means) and means[len(means) // 2] > _PLAIN


def _bare(family: NormSpec) -> NormSpec:
    """Return a family's convention without what is only seen in a graph."""
    return replace(family, eps=None, cast=Cast.NONE, stats_dtype=None, out_dtype=None)


def _with_eps(facts: Facts, spec: NormSpec) -> NormSpec:
    """Return the convention with the one eps that the configuration states for norms of this kind."""
    try:
        stated = {s.value for s in facts.conventions.eps_of(spec.kind)}
    except NotKnown:
        return spec
    return replace(spec, eps=stated.pop()) if len(stated) == 1 else spec
