"""Whether an earlier step's result depends on later steps, and whether a norm is the only way that it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from normwise.errors import NotKnown
from normwise.facts import mixing
from normwise.facts.changed_inputs import Sequence, replaced, sequences
from normwise.facts.differences import AGREE, DIFFER, Introduced, introduced, largest_change
from normwise.facts.labels import counts_tokens
from normwise.facts.liveness import Scope, in_training
from normwise.facts.norms import NormCall
from normwise.facts.runs import Run
from normwise.facts.sites import Site
from normwise.graph import aligned
from normwise.rendering import both
from normwise.targets import inputs

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Causality", "Trained", "in_train_mode", "read"]

CLAIM = "causal"


@dataclass(kw_only=True)
class Causality:
    """What happened up to step ``step`` when all later inputs were replaced, in eval mode."""

    steps: int  # 0: the inputs have no time axis
    step: int = 0
    change: float = 0.0  # of the outputs up to that step, relative to their root mean square
    norms: tuple[Introduced, ...] = ()  # that moved a step although its own input had not moved
    sites: tuple[Site, ...] = ()  # all norms that reduce the same axes
    claimed: bool = False
    change_held: Callable[[], float] | None = None  # with the norms held where their input is still; costs a pass
    forward_flow: Callable[[], float] | None = None  # how far later outputs follow earlier inputs then; costs a pass

    @cached_property
    def held(self) -> float:
        """The change of the earlier outputs with the norms held where their own input is still."""
        assert self.change_held is not None
        return self.change_held()

    @cached_property
    def leaks(self) -> bool:
        """Whether the model is causal but for these norms: it says so, or it is with them held."""
        if self.forward_flow is None or not mixing.moved(self.change, lambda: self.held):
            return False
        # a weak encoder moves earlier steps by 3e-4 (PatchTST at its first weights): only rounding counts as causal
        return self.claimed or (self.held <= AGREE and self.forward_flow() >= DIFFER)


_NO_TIME = both(
    "the inputs have no one time axis by which steps could be told apart", "输入没有统一的时间轴，无法区分各步"
)
_NO_OUTPUT = both("no output of the model has the steps of its inputs", "模型的输出没有与输入相同的时间步")
_NO_OTHERS = both("the inputs hold no other values to put in the place of a step", "输入中没有可替换时间步的其他值")


def read(facts: Facts) -> Causality:
    """Replace every step behind the middle in one run; none where no norm could let a step see another.

    Where inputs hold several sequences each is tried, up to one through which the future leaks: all of an encoder
    may reach every step of a decoder, whose own later steps may not.

    Raises:
        NotKnown: the steps cannot be exchanged for others.
    """
    facts = facts.exact
    target, calls = facts.target, facts.norm_calls.norms
    batch, lengths = inputs.size_of(target, "batch"), inputs.lengths_of(target)
    found = sequences(target)
    if not any(mixing.may_mix(c, facts.graph, batch, lengths) for c in calls):
        return Causality(steps=found[0].steps if found else 0)
    if not found:
        if lengths or CLAIM in target.claims:
            raise NotKnown(_NO_OTHERS if max(lengths, default=0) > 1 else _NO_TIME)
        return Causality(steps=0)
    if len(found) == 1:
        return _Probe(facts, found[0]).compared(claimed=CLAIM in target.claims)
    seen: list[Causality] = []
    unknown: list[NotKnown] = []
    for sequence in found:
        try:
            seen.append(_Probe(facts, sequence).compared(claimed=False))  # the claim does not say which it is about
        except NotKnown as error:
            unknown.append(error)
        else:
            if seen[-1].leaks:
                return seen[-1]
    if not seen:
        raise unknown[0]
    return next((s for s in seen if s.norms), seen[0])


class _Probe:
    """The runs with the later, or the earlier, steps of one sequence replaced."""

    def __init__(self, facts: Facts, sequence: Sequence) -> None:
        self.facts, self.sequence = facts, sequence
        self.step = (sequence.steps - 1) // 2
        self.past = torch.arange(sequence.steps) <= self.step

    def compared(self, *, claimed: bool) -> Causality:
        """Return what the later steps do.

        Args:
            claimed: the model is said to be causal in this sequence.

        Raises:
            NotKnown: they cannot be exchanged for others, or no output has their steps.
        """
        facts, steps = self.facts, self.sequence.steps
        calls, base = facts.norm_calls.norms, facts.runs.base
        later = self._call(slice(self.step + 1, None))
        other = facts.runs.variant(*later, wanted=mixing.norm_values(calls, base.graph))
        pairs = aligned(base.graph, other.graph)
        found = tuple(introduced(calls, base, other, pairs, steps, self.past))
        change = self._change(self.past, base, other)
        if found and change is None:
            raise NotKnown(_NO_OUTPUT)
        if not found or change is None or change <= AGREE:
            return Causality(steps=steps, step=self.step, change=change or 0.0)
        reached = [c for c in calls if _moves(c, base, other, pairs)]  # not those of an encoder beside it
        alike = mixing.like_calls([f.call for f in found], reached, base.graph)
        instead, wanted = mixing.holding(found, alike, base, pairs)
        wanted |= set(other.graph.outputs)

        def moved(call: inputs.Call, which: torch.Tensor) -> float:
            return self._change(which, base, facts.runs.variant(*call, wanted=wanted, instead=instead)) or 0.0

        return Causality(
            steps=steps,
            step=self.step,
            change=change,
            norms=found,
            sites=mixing.sites_of_calls(facts.sites, alike),
            claimed=claimed,
            change_held=lambda: moved(later, self.past),
            forward_flow=lambda: moved(self._call(slice(0, self.step + 1)), ~self.past),
        )

    def in_both_modes(self) -> tuple[float, float] | None:
        """Return how far earlier outputs move in eval and in train mode; None where training adds nothing.

        Raises:
            NotKnown: the later steps cannot be exchanged for others.
        """
        runs, changes, later = self.facts.runs, list[float](), self._call(slice(self.step + 1, None))
        for training, first in ((False, runs.base), (True, runs.training)):
            other = runs.variant(*later, wanted=set(first.graph.outputs), training=training)
            changes.append(self._change(self.past, first, other) or 0.0)
            if not training and changes[0] > AGREE:
                return None  # no causal model, or another fault that is reported for eval mode
        return (changes[0], changes[1]) if changes[1] >= DIFFER else None

    def _change(self, which: torch.Tensor, first: Run, second: Run) -> float | None:
        """Return how far some steps of the outputs differ in two runs; None where no output has the steps."""
        pairs = aligned(first.graph, second.graph)
        return mixing.output_change(self.facts.target, "time", self.sequence.steps, which, first, second, pairs)

    def _call(self, where: slice) -> inputs.Call:
        call = replaced(self.facts.target, "time", where, self.sequence.tensors)
        if call is None:
            raise NotKnown(_NO_OTHERS)
        return call


def _moves(call: NormCall, first: Run, second: Run, pairs: Mapping[int, int]) -> bool:
    x, other = first.tensors.get(call.input), second.tensors.get(pairs.get(call.input, -1))
    return x is None or other is None or x.shape != other.shape or largest_change(x, other) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How far later inputs move earlier outputs through the batch's statistics, while the model is trained."""

    steps: int
    step: int
    change: float  # of the outputs up to the step, with the norms in train mode
    still: float  # the same in eval mode
    paths: tuple[str, ...]  # of the norms
    claimed: bool


def in_train_mode(facts: Facts) -> Trained | None:
    """Compare the two modes of a causal model that is being trained; None where its norms take in no later step.

    Raises:
        NotKnown: the steps cannot be exchanged for others.
    """
    model, claimed = facts.target.model, CLAIM in facts.target.claims
    if not (model.training or facts.target.optimizer is not None or facts.target.train_step is not None):
        return None
    if not (claimed or counts_tokens(facts.graph)):
        return None
    live = set(in_training(facts, Scope.BATCH))
    for sequence in sequences(facts.target):
        probe, steps = _Probe(facts, sequence), sequence.steps
        held = [s for s in facts.sites if s.row.path.partition("#")[0] in live and steps in _others(s, facts)]
        if held and (moved := probe.in_both_modes()) is not None:
            still, change = moved
            paths = tuple(s.row.path for s in held)
            return Trained(steps=steps, step=probe.step, change=change, still=still, paths=paths, claimed=claimed)
    return None


def _others(site: Site, facts: Facts) -> tuple[int, ...]:
    """Return the sizes of all axes of a norm's input but the channels', which its statistics keep apart."""
    call = site.calls[0]
    shape = facts.graph.values[call.input].shape
    channels = 0 if call.running_mean is None else facts.graph.values[call.running_mean].numel
    axis = next((a for a in (1, len(shape) - 1) if a < len(shape) and shape[a] == channels), None)
    batch = inputs.size_of(facts.target, "batch")
    apart = [n // batch if a == 0 and n != batch else n for a, n in enumerate(shape) if a != axis]
    return tuple(apart[1:] if shape[0] == batch else apart)
