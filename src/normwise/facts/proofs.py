"""Replay proves or refutes the spec of a hand-written norm, or finds the near convention that it follows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from normwise.errors import NotKnown
from normwise.facts import vocabulary
from normwise.facts.affine import Affine
from normwise.facts.calls import AGREES, agree, random_input
from normwise.facts.candidate import Candidate
from normwise.facts.flow import Flow
from normwise.facts.masks import masks_behind, nothing_masked
from normwise.facts.records import Evidence
from normwise.facts.replay import Replayer
from normwise.rendering import both, in_language
from normwise.spec import NormSpec, Scope, Statistic, Weight, reference

__all__ = ["folded", "prove", "resolve_l2"]

# share by which the output of a norm may change when its input grows fourfold from unit size
_INVARIANT = 0.05


def prove(
    flow: Flow, candidate: Candidate, spec: NormSpec, replayer: Replayer
) -> tuple[Evidence, NormSpec | None, str | None]:
    """Replay the piece on random data against its closed form; on a mismatch search the near conventions.

    Masks are replayed as if there were no padding, whichever of True and False stands for that.
    """
    masks = masks_behind(flow, candidate.members)
    if not masks:
        return _prove_unmasked(flow, candidate, spec, replayer)
    proofs = (_prove_unmasked(flow, candidate, spec, replayer.assuming(a)) for a in nothing_masked(flow, masks))
    found = list(proofs)
    return next((proof for proof in found if proof[0] is Evidence.VERIFIED), found[0])


def _prove_unmasked(
    flow: Flow, candidate: Candidate, spec: NormSpec, replayer: Replayer
) -> tuple[Evidence, NormSpec | None, str | None]:
    # a norm that ran on no rows (an expert without tokens) is replayed on a few
    shape = tuple(size or 3 for size in flow.graph.values[candidate.root].shape)
    runs = []
    try:
        for x in (
            random_input(shape, None),
            random_input(shape, spec.eps),
            random_input(shape, spec.eps, offset=0.0, scale=3.0),
        ):
            runs.append((x, replayer(candidate.core, {candidate.root: x}), _gain(candidate, replayer, x)))
    except NotKnown as unknown:
        said = both(f"not replayed: {unknown.why}", f"没有回放：{in_language(unknown.why, 'zh')}")
        return Evidence.DERIVED, spec, None if flow.graph.fake else said
    for variant in _variants(spec, candidate):
        fitted = _fit(variant, runs)
        if fitted is not None:
            return Evidence.VERIFIED, _unbiased(fitted, candidate.statistic.count), None
    if not _ignores_scale(candidate, runs[0], replayer):
        return Evidence.DERIVED, None, None  # x / (1 + |x|), a squash: bounded, but no norm
    where = str(candidate.op.source) if candidate.op.source else candidate.op.name
    said = both(
        f"scale-invariant, but its form at {where} matches no known norm",
        f"与输入的尺度无关，但 {where} 处的形式不是任何已知的归一化",
    )
    return Evidence.UNKNOWN, None, said


def _ignores_scale(
    candidate: Candidate, run: tuple[torch.Tensor, torch.Tensor, torch.Tensor | float], replayer: Replayer
) -> bool:
    """Whether the output keeps its size when the input grows fourfold, up to what a small eps explains."""
    x, y, _ = run
    try:
        larger = replayer(candidate.core, {candidate.root: 4.0 * x})
    except NotKnown:
        return True
    return not bool((larger - y).norm() > _INVARIANT * y.norm())


def folded(flow: Flow, candidate: Candidate, spec: NormSpec, replayer: Replayer) -> tuple[NormSpec, Affine] | None:
    """Recognise s * x + (b - m * s), a layer norm whose mean is subtracted with the shift."""
    consumers = list(flow.graph.consumers(candidate.core))
    if (
        flow.graph.fake
        or spec.statistic is not Statistic.VARIANCE
        or len(consumers) != 1
        or consumers[0].short not in vocabulary.ADD
    ):
        return None
    output = consumers[0].outputs[0]
    x = random_input(flow.graph.values[candidate.root].shape, None)
    centred = replace(spec, center=True, weight=Weight.NONE, factor=1.0, stats_dtype=None)
    try:
        gain = _gain(candidate, replayer, x)
        shift = replayer(output, {candidate.root: x}) - reference(centred, x) * gain * spec.factor
    except (NotKnown, ValueError, RuntimeError, IndexError):
        return None
    rows = shift.reshape(-1, shift.shape[-1])
    if not agree(rows, rows[:1].expand_as(rows)) and float(rows.abs().max()) > AGREES:
        return None
    learned = [v for v in consumers[0].inputs if flow.learned[v]]
    bias = learned[0] if learned and float(rows.abs().max()) > AGREES else None
    affine = Affine(output=output, bias=bias, members=frozenset({consumers[0].id}))
    return replace(spec, center=True, bias=bool(learned)), affine


def _gain(candidate: Candidate, replayer: Replayer, x: torch.Tensor) -> torch.Tensor | float:
    """Return the learned factors that were multiplied in before the division."""
    gain: torch.Tensor | float = 1.0
    for value in candidate.numerator.scaled_by:
        gain = gain * replayer(value, {candidate.root: x})
    for value in candidate.statistic.scaled_by:
        # the statistic's factor g came with the power that leaves degree -1: g / norm(x), or x / (g * norm(x))
        gain = gain * replayer(value, {candidate.root: x})
    return gain


def _variants(spec: NormSpec, candidate: Candidate) -> Iterator[NormSpec]:
    yield spec
    if spec.statistic is Statistic.VARIANCE:
        yield replace(spec, biased=not spec.biased)
    if candidate.statistic.stat == "variance":
        yield replace(spec, statistic=Statistic.MEAN_SQUARE, biased=True)
    if not spec.center and spec.partial == 1 and spec.statistic is not Statistic.COMPLETED:
        yield replace(spec, center=True, statistic=Statistic.VARIANCE)
        yield replace(spec, statistic=Statistic.VARIANCE)
    if spec.eps:
        yield replace(spec, eps_inside=not spec.eps_inside)
        n = candidate.statistic.count
        for eps in (spec.eps * n, spec.eps * math.sqrt(n), spec.eps / n, spec.eps / math.sqrt(n), 0.0):
            yield replace(spec, eps=eps)


def _fit(spec: NormSpec, runs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]]) -> NormSpec | None:
    """Return the spec with its constant factor if it explains every run."""
    # the axes say what is reduced, whatever the set of them is called
    bare = replace(spec, factor=1.0, weight=Weight.NONE, stats_dtype=None, scope=Scope.HIDDEN, groups=None)
    factor: float | None = None
    for x, y, gain in runs:
        try:
            core = reference(bare, x) * gain
        except (ValueError, RuntimeError, IndexError):
            return None
        if core.shape != y.shape or not torch.isfinite(y).all():
            return None
        if factor is None:
            energy = float((core * core).sum())
            factor = float((core * y).sum()) / energy if energy > 0 else 1.0
        if not agree(y, core * factor):
            return None
    near = next(
        (known for known in (1.0, spec.factor) if factor is not None and abs(factor - known) <= AGREES * abs(known)),
        factor,
    )
    return replace(spec, factor=near if near is not None else 1.0)


def _unbiased(spec: NormSpec, count: int) -> NormSpec:
    """Call a sum of squares divided by n - 1 the unbiased variance: fitted as the other, its factor says n - 1."""
    share = (count - 1) / max(count, 1)
    plain = spec.statistic is not Statistic.VARIANCE or not spec.biased or spec.factor == 1.0 or spec.eps_clamp
    if plain or share == 0 or abs(spec.factor**2 - share) > AGREES:
        return spec
    eps = spec.eps and spec.eps / (share if spec.eps_inside else math.sqrt(share))
    return replace(spec, biased=False, factor=1.0, eps=eps)


def resolve_l2(spec: NormSpec, count: int, *, own: float) -> NormSpec:
    """Call x * g / |x| an L2 norm: its constant is n^-1/2 in terms of the root mean square.

    Args:
        spec: the norm with what follows it, stated for the mean of squares.
        count: elements of a row.
        own: the factor before anything follows; 1 is a root mean square, whatever multiplies it later.
    """
    if spec.statistic is not Statistic.MEAN_SQUARE or count <= 1 or spec.center:
        return spec
    factor = spec.factor * math.sqrt(count)
    if min(abs(own - 1.0), abs(spec.factor - 1.0)) < 1e-3:
        return spec
    eps = spec.eps
    if eps:
        eps = eps * count if spec.eps_inside and not spec.eps_clamp else eps * math.sqrt(count)
    near = 1.0 if abs(factor - 1.0) < 1e-5 else factor
    return replace(spec, statistic=Statistic.L2, eps=eps, factor=near)
