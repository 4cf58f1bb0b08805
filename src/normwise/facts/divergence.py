"""Why a model parts from its reference: the norm property that differs there, or what a fold of a norm left undone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from normwise.errors import NotKnown
from normwise.facts import vocabulary as ops
from normwise.facts.calls import NormCall
from normwise.facts.facts import Facts
from normwise.facts.outcomes import MATTERS
from normwise.facts.reference import Pair, Reference, parameters_of
from normwise.graph import Op
from normwise.rendering import both
from normwise.spec import Kind

__all__ = ["Difference", "Divergence", "at_parting", "differences", "explain"]

Plain = float | int | str | bool | None

_FIELDS = ("kind", "axes", "groups", "eps_inside", "biased", "weight_offset", "factor")
# A mean below this share of a mean square is rounding: the exact fold leaves 1e-14 in float32, a forgotten bias 1e-1.
_MEAN_SHARE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A property in which two norms of the same place differ."""

    name: str
    mine: Plain
    theirs: Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first value at which a model parts from its reference, and what explains it."""

    path: str  # the module of the model
    op: str
    differing: tuple[Difference, ...] = ()  # of the norm that made the value
    missing: tuple[str, ...] = ()  # norms of the reference that the model lacks
    placement: tuple[str, str] | None = None  # stack kinds of model and reference, where they differ
    tied: tuple[str, ...] = ()  # names of one tensor into which a gain was folded
    shifts: tuple[str, ...] = ()  # norms whose shift the next linear map did not take over
    writers: tuple[str, ...] = ()  # what adds a mean to a stream whose norm no longer takes it out
    biases: tuple[str, ...] = ()  # of the reference, before a norm that was folded without scaling them

    @property
    def of_norms(self) -> bool:
        """Whether a norm explains it."""
        return any((self.differing, self.missing, self.placement, self.tied, self.shifts, self.writers, self.biases))


def explain(reference: Reference) -> Divergence:
    """Find the first difference and its cause.

    Raises:
        NotKnown: no single value can be named.
    """
    strict = reference.first()
    if strict is None:
        if (hidden := at_parting(reference)) is not None:
            return hidden
        raise NotKnown(both("the outputs differ, but no value of the run does", "输出不同，但找不到不同的中间值"))
    loose = reference.first(loosely=True)
    pair = _pair_at(reference, strict)
    differing = tuple(differences(reference, pair)) if pair else ()
    if loose is None or (differing and not _converted(reference, loose)):
        loose = strict
    if loose != strict:
        pair = _pair_at(reference, loose)
        differing = tuple(differences(reference, pair)) if pair else ()
    op = reference.runs[0].graph.producer(loose)
    assert op is not None
    found = _unfolded(reference, op, loose, differing)
    return found if found.of_norms else at_parting(reference) or found


def at_parting(reference: Reference) -> Divergence | None:
    """Return the first norm that makes something else of the same input, where another property of it explains that."""
    parting = reference.parting
    if parting is None or not (differing := tuple(differences(reference, parting))):
        return None
    path = reference.mine.graph.calls[parting.mine.call].path
    return Divergence(path=path, op=parting.mine.op.short, differing=differing)


def _unfolded(reference: Reference, op: Op, loose: int, differing: tuple[Difference, ...]) -> Divergence:
    """Return the divergence at an op with all that may explain it."""
    return Divergence(
        path=reference.runs[0].graph.path(op),
        op=op.short,
        differing=differing,
        missing=reference.missing,
        placement=_placements(reference),
        tied=_tied(reference, op),
        # a norm that itself is another was not folded
        shifts=() if differing else tuple(_shifts(reference)),
        writers=() if differing else tuple(dict.fromkeys(_writers(reference))),
        biases=tuple(_unscaled_biases(reference, loose)),
    )


def _pair_at(reference: Reference, value: int) -> Pair | None:
    """Return the norms of the place in which a value was computed."""
    run = reference.runs[0]
    op = run.graph.producer(value)
    for pair in reference.pairs if op is not None else ():
        ends = [pair.mine.output if run.pairs is None else run.pairs.get(pair.mine.output)]
        inside = run.pairs is None and op is not None and op.id in pair.mine.members
        if value in ends or inside:
            return pair
    return None


def differences(reference: Reference, pair: Pair) -> Iterator[Difference]:
    """Yield the properties in which two norms differ."""
    mine, theirs = pair.mine.spec, pair.theirs.spec
    if mine is None or theirs is None:
        return
    for name in _FIELDS:
        a, b = getattr(mine, name), getattr(theirs, name)
        if a != b:
            yield Difference(name=name, mine=_plain(a), theirs=_plain(b))
    if mine.eps is not None and theirs.eps is not None and abs(mine.eps - theirs.eps) > MATTERS * theirs.eps:
        yield Difference(name="eps", mine=mine.eps, theirs=theirs.eps)
    for name, a, b in _numbers(reference, pair):
        if a.numel() == b.numel() and not torch.allclose(a, b, rtol=MATTERS, atol=MATTERS * float(b.abs().max())):
            yield Difference(name=name, mine=float(a.mean()), theirs=float(b.mean()))


def _plain(item: object) -> Plain:
    return item if isinstance(item, (float, int, bool)) or item is None else str(item)


def _numbers(reference: Reference, pair: Pair) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield effective gain, shift and running statistics of both."""
    sides = ((reference.mine, pair.mine), (reference.facts, pair.theirs))
    for name, parts in (
        ("gain", [_gain(f, n) for f, n in sides]),
        ("shift", [_held(f, n.bias) for f, n in sides]),
        ("running mean", [_held(f, n.running_mean) for f, n in sides]),
        ("running variance", [_held(f, n.running_var) for f, n in sides]),
    ):
        a, b = parts
        if a is None and b is None:
            continue
        neutral = 1.0 if name == "gain" else 0.0
        if name.startswith("running") and (a is None or b is None):
            continue
        a, b = (torch.full_like(o, neutral) if t is None and o is not None else t for t, o in ((a, b), (b, a)))
        if a is not None and b is not None:
            yield name, a, b


def _held(facts: Facts, value: int | None) -> torch.Tensor | None:
    tensor = Reference.tensor(facts, value)
    return None if tensor is None else tensor.detach().reshape(-1).to("cpu", torch.float64)


def _gain(facts: Facts, norm: NormCall) -> torch.Tensor | None:
    weight = _held(facts, norm.weight)
    return None if weight is None else weight + (norm.spec.weight_offset if norm.spec else 0.0)


def _converted(reference: Reference, value: int) -> bool:
    """Whether the op that made a value reads parameters that are not the reference's of the same name."""
    run = reference.runs[0]
    op = run.graph.producer(value)
    theirs = reference.facts.parameters
    mine = reference.mine.parameters
    names = [n for v in parameters_of(run.graph, op) for n in run.graph.values[v].names] if op is not None else []
    return any(not _equal(mine[n], theirs[n]) for n in names if n in mine and n in theirs)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(
        a.detach().to("cpu", torch.float64), b.detach().to("cpu", torch.float64), rtol=MATTERS, atol=0.0
    )


def _placements(reference: Reference) -> tuple[str, str] | None:
    kinds = [", ".join(str(s.kind) for s in facts.placement.stacks) for facts in (reference.mine, reference.facts)]
    return (kinds[0], kinds[1]) if kinds[0] != kinds[1] and all(kinds) else None


# -- folds ------------------------------------------------------------------------------------


def _moved_gains(reference: Reference) -> list[Pair]:
    """Return the places where the reference has a gain of its own and the model a neutral one."""
    found = []
    for pair in reference.pairs:
        mine, theirs = _gain(reference.mine, pair.mine), _gain(reference.facts, pair.theirs)
        if theirs is not None and not _neutral(theirs) and (mine is None or _neutral(mine)):
            found.append(pair)
    return found


def _neutral(gain: torch.Tensor) -> bool:
    return bool(((gain - 1).abs() <= MATTERS).all())


def _tied(reference: Reference, op: Op) -> tuple[str, ...]:
    """Return the names of a tensor that several modules share, read here, into which a gain was folded."""
    graph = reference.runs[0].graph
    shared = [graph.values[v].names for v in parameters_of(graph, op) if len(graph.values[v].names) > 1]
    return shared[0] if shared and _moved_gains(reference) and not _equal_named(reference, shared[0][0]) else ()


def _equal_named(reference: Reference, name: str) -> bool:
    mine = reference.mine.parameters
    theirs = reference.facts.parameters
    return name in theirs and _equal(mine[name], theirs[name])


def _shifts(reference: Reference) -> Iterator[str]:
    """Yield norms without the reference's shift whose reader has the reference's bias, or none."""
    mine = reference.mine.parameters
    theirs = reference.facts.parameters
    graph = reference.mine.graph
    for pair in reference.pairs:
        shift, kept = _held(reference.facts, pair.theirs.bias), _held(reference.mine, pair.mine.bias)
        if shift is None or not bool(shift.abs().max() > 0) or (kept is not None and bool(kept.abs().max() > 0)):
            continue
        for op in graph.consumers(pair.mine.output):
            if op.short not in ops.LINEAR:
                continue
            names = [n for v in parameters_of(graph, op) for n in graph.values[v].names[:1]]
            biases = [n for n in names if mine[n].dim() == 1]
            if all(n in theirs and _equal(mine[n], theirs[n]) for n in biases):
                yield graph.calls[pair.mine.call].path
                break


def _writers(reference: Reference) -> Iterator[str]:
    """Yield what adds a mean to the streams of a model whose norms no longer take it out."""
    centred = [p for p in reference.pairs if p.theirs.spec is not None and p.theirs.spec.kind is Kind.LAYER]
    if not any(p.mine.spec is not None and p.mine.spec.kind is Kind.RMS for p in centred):
        return
    facts = reference.mine
    run = facts.runs.base
    for stream in facts.placed.streams:
        for value in (stream.origin, *(b for add in stream.adds for b in add.branches)):
            if value in run.tensors and mean_share(run.tensors[value]) > _MEAN_SHARE:
                yield from _writes(facts, value)


def mean_share(x: torch.Tensor) -> float:
    """Return the share of the mean square over the last axis that is the square of the mean."""
    x = x.detach().to("cpu", torch.float64)
    total = float(x.square().mean())
    return float(x.mean(-1).square().mean()) / total if total else 0.0


def _writes(facts: Facts, value: int) -> Iterator[str]:
    """Yield the parameters through which a value got its mean: a bias whose own mean is not 0, a weight likewise."""
    graph = facts.graph
    op = graph.producer(value)
    while op is not None and op.short in ops.VIEW | ops.DROPOUT and op.inputs:
        op = graph.producer(op.inputs[0])
    for parameter in parameters_of(graph, op) if op is not None else ():
        tensor = Reference.tensor(facts, parameter)
        if tensor is None:
            continue
        # a lookup's rows and a bias are vectors of the stream, the rows of a linear map are its outputs
        along = -1 if tensor.dim() == 1 or (op is not None and op.short == "embedding") else 0
        if mean_share(tensor.movedim(along, -1)) > _MEAN_SHARE:
            yield graph.values[parameter].names[0]


def _unscaled_biases(reference: Reference, value: int) -> Iterator[str]:
    """Yield biases of the reference before a norm with running statistics that was folded without scaling them."""
    mine = reference.runs[0].tensors[value].detach().to("cpu", torch.float64)
    run, facts = reference.runs[1], reference.facts
    paired = {p.theirs.op.id for p in reference.pairs}
    for norm in facts.norm_calls.norms:
        if norm.op.id in paired or norm.running_var is None or norm.spec is None or norm.uses_batch:
            continue
        op = facts.graph.producer(norm.input)
        held = [(v, _held(facts, v)) for v in (parameters_of(facts.graph, op) if op is not None else ())]
        bias = next(((v, t) for v, t in held if t is not None and len(facts.graph.values[v].shape) == 1), None)
        variance, gain = _held(facts, norm.running_var), _gain(facts, norm)
        try:
            theirs = run.like(norm.output).to("cpu", torch.float64)
        except NotKnown:
            continue
        if bias is None or bias[1] is None or variance is None or theirs.shape != mine.shape or mine.dim() < 2:
            continue
        scale = (1.0 if gain is None else gain) / (variance + (norm.spec.eps or 0.0)).sqrt()
        gap = (mine - theirs).movedim(1, -1).reshape(-1, mine.shape[1])
        expected = bias[1] * (1 - scale)
        if float((gap - expected).norm()) <= 0.01 * float(gap.norm()):
            yield facts.graph.values[bias[0]].names[0]
