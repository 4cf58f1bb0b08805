"""How large the statistics of norms are on the example data, beside their eps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normwise.errors import NotKnown
from normwise.facts.calls import NormCall
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.spec import NormSpec, Statistic
from normwise.spec.definition import eps_of

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Share", "need_true_weights", "shares", "statistic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What eps is to one norm on the example data."""

    site: Site
    eps: float
    share: float  # median over rows of eps / (statistic + eps), rows that hold one number left out
    statistic: float  # median of the same rows
    live: float  # share of rows whose elements are not all one number, to rounding


def need_true_weights(facts: Facts) -> None:
    """Refuse to judge sizes on a model that was built small with random weights.

    Raises:
        NotKnown: the weights are random or hold no numbers.
    """
    if not facts.target.weights.magnitudes_count:
        raise NotKnown(
            both(
                "needs true weights: sizes in a model built small with random ones say nothing",
                "需要真实权重：缩小的随机模型中的数值大小没有意义",
            )
        )


def shares(facts: Facts) -> Iterator[Share]:
    """Yield the eps share of every norm with statistics of its input and an eps.

    Raises:
        NotKnown: the weights are random, or the run was not kept.
    """
    need_true_weights(facts)
    for site in facts.sites:
        spec = site.row.spec
        if spec is None or spec.statistic in (Statistic.OTHER, Statistic.COMPLETED) or spec.partial < 1:
            continue
        calls = [c for c in site.calls if c.uses_batch]
        found = [share for c in calls if (share := _share(facts, site, spec, c)) is not None]
        if found:
            yield max(found, key=lambda s: s.share)


def _share(facts: Facts, site: Site, spec: NormSpec, call: NormCall) -> Share | None:
    x = facts.runs.base.of(call.input)
    if x.numel() == 0 or not bool(x.isfinite().all()):
        return None
    s = statistic(spec, x)
    if s.numel() == x.numel():
        return None  # a statistic of one element has nothing to say beside eps
    wide = torch.promote_types(x.dtype, torch.float32)
    eps = eps_of(spec, wide)
    if eps == 0:
        return None
    # what rounding leaves of the variance of n equal numbers
    noise = (_extent(spec, x) * torch.finfo(x.dtype).eps).square()
    live = (s > noise).flatten()
    part = _part(spec, s, eps).flatten()
    rows = live if bool(live.any()) else torch.ones_like(live)
    return Share(
        site=site,
        eps=eps,
        share=float(part[rows].median()),
        statistic=float(s.flatten()[rows].median()),
        live=float(live.double().mean()),
    )


def _part(spec: NormSpec, s: torch.Tensor, eps: float) -> torch.Tensor:
    if spec.eps_clamp:
        return (1 - s.sqrt() / eps).clamp_min(0)
    size = s if spec.eps_inside else s.sqrt()
    return eps / (size + eps)


def statistic(spec: NormSpec, x: torch.Tensor) -> torch.Tensor:
    """Return a norm's statistic of an input in float64, the axes it is taken over reduced."""
    y = _grouped(spec, x)
    if spec.statistic is Statistic.VARIANCE:
        return y.var(spec.axes, correction=0 if spec.biased else 1)
    return y.square().sum(spec.axes) if spec.statistic is Statistic.L2 else y.square().mean(spec.axes)


def _extent(spec: NormSpec, x: torch.Tensor) -> torch.Tensor:
    return _grouped(spec, x).abs().amax(spec.axes)


def _grouped(spec: NormSpec, x: torch.Tensor) -> torch.Tensor:
    y = x.detach().double()
    return y.unflatten(min(spec.axes), (spec.groups, -1)) if spec.groups else y
