"""The gain that each norm really applies, and whether the model around it has been trained.

A stored weight says nothing without its convention: 0 is dead in a plain norm and neutral in one that computes
1 + weight. What is judged is the *effective gain*: what the norm makes of a row of ones at its core, by a replay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normwise.errors import NotKnown
from normwise.facts import conventions, stored
from normwise.facts.calls import NormCall
from normwise.facts.checkpoints import State
from normwise.facts.optimizers import states
from normwise.facts.repairs import effect, respecified
from normwise.facts.sites import Site
from normwise.facts.state_dicts import pattern
from normwise.rendering import both
from normwise.spec import Gate, Kind, Modulation, NormSpec, Scope
from normwise.targets.target import Weights

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Gain", "Gains", "looks_drawn", "regained", "rms"]

# matrices looked at to tell drawn weights from trained ones, and rows and columns of each
_MATRICES = 24
_SIDE = 256
_SMALLEST = 256  # elements: below this a matrix tells nothing

# The fourth moment over the squared second one, and n times the variance of its estimate (an upper bound where the
# draws are bounded): uniform, normal cut at two deviations, normal.
_DRAWS = ((1.8, 5.8), (2.36, 10.0), (3.0, 24.0))
# Deviations of a sampling error. Weights that were drawn pass with 1 - 1e-8, trained ones miss by tens.
_SIGMAS = 6.0
# The largest singular value of a drawn matrix is sqrt(rows) + sqrt(columns) times its deviation, up to a
# fluctuation of order n^(-2/3) (Tracy-Widom): 15 % cover it from 64 on, 30 % below.
_EDGE = 1.15
_EDGE_SMALL = 1.3
# gains near 1 in bfloat16, of which one side was rounded
_ROUNDING = 2**-7
# shares of the matrices that must look drawn for a fresh model, and at most for a trained one
_FRESH = 0.9
_TRAINED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gain:
    """The gain of one norm."""

    site: Site
    effective: Tensor  # float64, flat: what a unit element at the core becomes
    stored: Tensor  # the parameter, in its own dtype, flat
    parameter: Tensor  # the model's own
    role: Hashable  # the same for its siblings in other blocks

    @property
    def path(self) -> str:
        """The name of the parameter."""
        assert self.site.row.weight_path is not None
        return self.site.row.weight_path

    @property
    def kind(self) -> Kind:
        """What kind of norm it scales."""
        assert self.site.row.spec is not None
        return self.site.row.spec.kind

    @property
    def offset(self) -> float:
        """1 where the norm computes 1 + weight."""
        assert self.site.row.spec is not None
        return self.site.row.spec.weight_offset

    @property
    def calls(self) -> tuple[NormCall, ...]:
        """The executions."""
        return self.site.calls

    @property
    def mean(self) -> float:
        """The mean of the effective gain."""
        return float(self.effective.mean())

    @property
    def rms(self) -> float:
        """The root mean square of the effective gain: what the norm makes of unit rows."""
        return rms(self.effective)

    @property
    def sd(self) -> float:
        """The spread over channels."""
        return float(self.effective.std(unbiased=False))

    @property
    def direct(self) -> bool:
        """Whether the parameter is the gain, up to the offset; a gate behind a sigmoid is not."""
        declared = self.stored.cpu().double() + self.offset
        return bool(((self.effective - declared).abs() <= _ROUNDING * declared.abs().clamp_min(1e-3)).all())

    @property
    def constant(self) -> float | None:
        """The number that every channel has, or None where they differ."""
        first = float(self.effective[0])
        return first if bool((self.effective == first).all()) else None

    @property
    def unmoved(self) -> bool:
        """Whether it is where a fresh norm starts in every channel: 1, whatever fixed factor is applied with it."""
        started = bool((self.stored.double() == 1.0 - self.offset).all())
        return len(self.effective) > 1 and (started or self.constant == 1)

    @property
    def negative(self) -> float:
        """The share of channels with a negative gain."""
        return float((self.effective < 0).double().mean())

    @property
    def zeros(self) -> float:
        """The share of channels with a gain of exactly 0."""
        return float((self.effective == 0).double().mean())


class Gains:
    """The gains of all norms that have one, each parameter once, in the order of execution."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    @cached_property
    def all(self) -> tuple[Gain, ...]:
        """Every gain.

        Raises:
            NotKnown: the model holds no numbers.
        """
        if self.facts.target.stored is not None:
            return self._of_checkpoint()
        if self.facts.traced.graph.fake or self.facts.target.weights is Weights.FAKE:
            raise NotKnown(both("the model holds no numbers", "模型没有数值"))
        tensors = self.facts.tensors
        roles = _roles(self.facts.sites)
        found: dict[int, Gain] = {}
        for site in self.facts.sites:
            parameter = tensors.get(site.row.weight_path or "")
            if parameter is None or site.row.spec is None or id(parameter) in found or not _readable(parameter):
                continue
            stored = parameter.detach().flatten()
            effective = self._effective(site, stored)
            found[id(parameter)] = Gain(
                site=site, effective=effective, stored=stored, parameter=parameter, role=roles[site.row.path]
            )
        return tuple(found.values())

    def of(self, *kinds: Kind) -> tuple[Gain, ...]:
        """Return the gains of norms of some kinds.

        Raises:
            NotKnown: the model holds no numbers, or a checkpoint does not say how norms use theirs.
        """
        if self.facts.target.stored is not None:
            stored.need_conventions(self.facts, kinds)
        return tuple(g for g in self.all if g.kind in kinds)

    def _of_checkpoint(self) -> tuple[Gain, ...]:
        """Return the gains of a checkpoint as its family applies them; norms of the same pattern are siblings."""
        found: list[Gain] = []
        tensors = self.facts.tensors
        for site in self.facts.stored_sites:
            parameter = tensors.get(f"{site.row.path}.weight".removeprefix("."))
            if parameter is None or site.row.spec is None:
                continue
            flat = parameter.detach().flatten()
            role = (pattern(site.row.path), len(flat))
            effective = flat.double() + site.row.spec.weight_offset
            found.append(Gain(site=site, effective=effective, stored=flat, parameter=parameter, role=role))
        return tuple(found)

    def _effective(self, site: Site, stored: Tensor) -> Tensor:
        """Return the gain by channel, measured where arithmetic stands between the parameter and the product."""
        spec, call = site.row.spec, site.calls[0]
        assert spec is not None
        declared = stored.cpu().double() + spec.weight_offset
        plain = spec.gate is Gate.NONE and spec.modulation is Modulation.NONE and not spec.weight_on_input
        if call.native or call.core == call.output or not plain or spec.scope is not Scope.HIDDEN or spec.groups:
            return declared
        if self._scaled_before(call):
            return declared
        shape = self.facts.graph.values[call.core].shape
        if math.prod(shape[a] for a in spec.axes) != stored.numel() or not math.prod(shape):
            return declared
        replay = self.facts.rows.double
        try:
            ones = replay(call.output, {call.core: torch.ones(shape, dtype=torch.float64, device="cpu")})
            zeros = replay(call.output, {call.core: torch.zeros(shape, dtype=torch.float64, device="cpu")})
        except NotKnown:
            return declared
        if ones.numel() % stored.numel() or ones.numel() == 0:
            return declared
        return (ones - zeros).reshape(-1, stored.numel())[0].clone()

    def _scaled_before(self, call: NormCall) -> bool:
        """Whether the gain is already in the core, as in weight * (x - mean) / root: ones put there would hide it."""
        reached = {call.weight}
        for op in (self.facts.graph.ops[m] for m in sorted(call.members)):
            if not reached.isdisjoint(op.inputs):
                reached.update(op.outputs)
        return call.core in reached

    @cached_property
    def family_offset(self) -> float | None:
        """What the family that the config names adds to the stored gain (0 or 1), or None: no config, not known."""
        try:
            families = conventions.read(self.facts.target.config).families
        except NotKnown:
            return None
        offsets = {spec.weight_offset for _, spec in families}
        return offsets.pop() if len(offsets) == 1 else None

    @cached_property
    def _stored(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """The live gain and the checkpoint's, by parameter name, where the checkpoint has it with its numbers."""
        try:
            compared = self.facts.checkpoints
        except NotKnown:
            return {}
        known = (State.EQUAL, State.SHIFTED)
        return {n.key: (n.live, compared.tensors[n.source]) for n in compared.norms if n.source and n.state in known}

    def shift(self, gain: Gain) -> float | None:
        """Return what a loader added to a gain of the checkpoint (0, 1 or -1), or None: not loaded from there."""
        live, stored = self._stored.get(gain.path, (None, None))
        if live is None or stored is None:
            return None
        return float(round(float(live.double().mean()) - float(stored.double().mean())))

    @cached_property
    def _gaps(self) -> Mapping[int, Tensor]:
        """The reference's effective gain less the model's, by the op of the model's norm."""
        try:
            reference = self.facts.reference
            theirs = {c.op.id: g.effective for g in reference.facts.gains.all for c in g.calls}
            mine = {c.op.id: g.effective for g in self.all for c in g.calls}
            pairs = [(p.mine.op.id, p.theirs.op.id) for p in reference.pairs]
        except NotKnown:
            return {}
        held = [(a, mine[a], theirs[b]) for a, b in pairs if a in mine and b in theirs]
        return {a: there - here for a, here, there in held if here.shape == there.shape}

    def short_of_reference(self, gain: Gain) -> float | None:
        """Return how much the reference adds to a gain in every channel (0, 1 or -1), or None: nothing of the kind."""
        gap = self._gaps.get(gain.calls[0].op.id) if gain.calls else None
        near = [] if gap is None else [n for n in (0.0, 1.0, -1.0) if bool(((gap - n).abs() <= _ROUNDING).all())]
        return near[0] if near else None

    def stored_as_given(self, gains: Sequence[Gain]) -> int | None:
        """Return how many gains the checkpoint has with the same numbers; None without one."""
        if self.facts.target.checkpoint is None:
            return None
        return sum(self.shift(g) == 0 for g in gains)

    @cached_property
    def trained(self) -> bool | None:
        """Whether the weights were trained: False for weights as drawn, None where that cannot be told."""
        target = self.facts.target
        if target.weights is Weights.RANDOM:
            return False
        if target.weights is Weights.REAL:
            return True
        if any(r.counted for r in self.facts.running) or _stepped(target.optimizer):
            return True
        drawn = [looks_drawn(m) for m in _sampled(target.model)]
        if not drawn:
            return None
        share = sum(drawn) / len(drawn)
        return False if share >= _FRESH else True if share <= _TRAINED else None

    @cached_property
    def loaded(self) -> bool:
        """Whether the user says that the weights came from somewhere."""
        target = self.facts.target
        return target.checkpoint is not None or target.load_info is not None or target.weights is Weights.REAL


def regained(
    facts: Facts,
    gains: Sequence[Gain],
    said: str,
    *,
    spec: Callable[[NormSpec], NormSpec] = lambda spec: spec,
    weight: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Any] | None:
    """Run the example inputs with other gains and return the effect on what the last of the norms gives out.

    Args:
        facts: of the target.
        gains: those to change.
        said: what is changed.
        spec: makes the formula to use from a norm's own.
        weight: makes the stored gain to use from a norm's own.

    Returns:
        The counterfactual of a finding, or None where it cannot be run.
    """
    if facts.target.stored is not None:
        return None
    calls = sorted((c for g in gains for c in g.calls), key=lambda c: c.op.id)
    last = calls[-1].output
    try:
        run = respecified(facts, calls, spec, [last], weight=weight)
        before, after = rms(facts.runs.base.of(last)), rms(run.of(last))
    except (NotKnown, ValueError):
        return None
    return effect(said, "output_rms_of_last_norm", before, after) if math.isfinite(before + after) else None


def rms(tensor: Tensor) -> float:
    """Return the root of the mean square, taken in float64."""
    return float(tensor.detach().double().square().mean().sqrt()) if tensor.numel() else 0.0


def _readable(parameter: Tensor) -> bool:
    plain = parameter.device.type != "meta" and parameter.layout is torch.strided and not parameter.is_quantized
    return plain and parameter.is_floating_point() and parameter.numel() > 0


def _roles(sites: Iterable[Site]) -> dict[str, Hashable]:
    """Return what a norm shares with its siblings: stack, place, and its order in the block."""
    seen: Counter[Hashable] = Counter()
    roles: dict[str, Hashable] = {}
    for site in sites:
        row = site.row
        here = (row.stack, row.layer, row.placement)
        size = math.prod(row.shape[a] for a in row.spec.axes) if row.spec and row.shape else 0
        order = seen[here] if row.layer is not None else 0
        roles[row.path] = (row.stack, row.placement, order, row.spec.kind if row.spec else None, size)
        seen[here] += 1
    return roles


def _stepped(optimizer: object) -> bool:
    """Whether an optimizer has taken a step."""
    return bool(states(optimizer))


def _sampled(model: torch.nn.Module) -> list[Tensor]:
    """Return some matrices of a model, evenly spread over it, each cut to a size that is quick to look at."""
    wide = [p.detach() for p in model.parameters() if p.dim() >= 2 and p.numel() >= _SMALLEST and _readable(p)]
    step = max(1, math.ceil(len(wide) / _MATRICES))
    cut = (p.reshape(p.shape[0], -1)[:_SIDE, :_SIDE].cpu().double() for p in wide[::step])
    kept = (m[m.abs().amax(1) > 0] if m.numel() else m for m in cut)  # a row of zeros belongs to a padding token
    return [m for m in kept if m.numel() >= _SMALLEST and float(m.std()) > 0]


def looks_drawn(matrix: Tensor) -> bool:
    """Whether a matrix could be independent draws from one uniform or normal distribution around 0.

    Trained weights have heavier tails, rows and columns of different size, and singular values beyond the edge
    of the bulk.
    """
    rows, columns = matrix.shape
    scaled, n = matrix / rms(matrix), matrix.numel()
    if abs(float(scaled.mean())) > _SIGMAS / math.sqrt(n) or not bool(scaled.isfinite().all()):
        return False
    kurtosis = float(scaled.pow(4).mean())
    if all(abs(kurtosis - expected) > _SIGMAS * math.sqrt(spread / n) for expected, spread in _DRAWS):
        return False
    squares = scaled.square()
    for sizes, count in ((squares.mean(1), columns), (squares.mean(0), rows)):
        if len(sizes) < 2:
            continue
        excess = float(sizes.var()) / ((kurtosis - 1) / count) - 1
        if excess * math.sqrt((len(sizes) - 1) / 2) > _SIGMAS * max(1.0, kurtosis - 1):
            return False
    if min(rows, columns) < 8:
        return True
    edge = _EDGE if min(rows, columns) >= 64 else _EDGE_SMALL
    return float(torch.linalg.svdvals(scaled)[0]) <= edge * (math.sqrt(rows) + math.sqrt(columns))
