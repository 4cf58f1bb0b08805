"""Whether an earlier step's result depends on later steps, and whether a norm is the only way that it can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from normwise.errors import NotKnown
from normwise.facts import mixing
from normwise.facts.changed_inputs import replaced
from normwise.facts.differences import AGREE, DIFFER, Introduced, introduced
from normwise.facts.labels import counts_tokens
from normwise.facts.liveness import Scope, in_training
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
        if not self.norms or self.forward_flow is None:
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

    Raises:
        NotKnown: the steps cannot be exchanged for others.
    """
    facts = facts.exact
    steps, batch = (inputs.size_of(facts.target, name) for name in ("time", "batch"))
    calls = facts.norm_calls.norms
    if not any(mixing.may_mix(c, facts.graph, (batch, steps)) for c in calls):
        return Causality(steps=steps)
    if steps < 2:
        lengths = any(inputs.axis_of(facts.target, "time", t) is not None for t in inputs.tensors_of(facts.target))
        if lengths or CLAIM in facts.target.claims:
            raise NotKnown(_NO_TIME)
        return Causality(steps=0)
    step = (steps - 1) // 2
    call = replaced(facts.target, "time", slice(step + 1, None))
    if call is None:
        raise NotKnown(_NO_OTHERS)
    base = facts.runs.base
    other = facts.runs.variant(*call, wanted=mixing.norm_values(calls, base.graph))
    pairs = aligned(base.graph, other.graph)
    past = torch.arange(steps) <= step
    found = tuple(introduced(calls, base, other, pairs, steps, past))
    change = mixing.output_change(facts.target, "time", steps, past, base, other, pairs)
    if found and change is None:
        raise NotKnown(_NO_OUTPUT)
    if not found or change is None or change < DIFFER:
        return Causality(steps=steps, step=step, change=change or 0.0)
    alike = mixing.like_calls([f.call for f in found], calls, base.graph)
    instead, wanted = mixing.holding(found, alike, base, pairs)
    wanted |= set(other.graph.outputs)

    def change_held() -> float:
        run = facts.runs.variant(*call, wanted=wanted, instead=instead)
        return mixing.output_change(facts.target, "time", steps, past, base, run, pairs) or 0.0

    def forward_flow() -> float:
        earlier = replaced(facts.target, "time", slice(0, step + 1))
        if earlier is None:
            raise NotKnown(_NO_OTHERS)
        run = facts.runs.variant(*earlier, wanted=wanted, instead=instead)
        return mixing.output_change(facts.target, "time", steps, ~past, base, run, pairs) or 0.0

    return Causality(
        steps=steps,
        step=step,
        change=change,
        norms=found,
        sites=mixing.sites_of_calls(facts.sites, alike),
        claimed=CLAIM in facts.target.claims,
        change_held=change_held,
        forward_flow=forward_flow,
    )


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
    steps = inputs.size_of(facts.target, "time")
    if steps < 2 or not (claimed or counts_tokens(facts.graph)):
        return None
    live = set(in_training(facts, Scope.BATCH))
    held = [s for s in facts.sites if s.row.path.partition("#")[0] in live and steps in _others(s, facts)]
    if not held:
        return None
    step = (steps - 1) // 2
    call = replaced(facts.target, "time", slice(step + 1, None))
    if call is None:
        raise NotKnown(_NO_OTHERS)
    past, changes = torch.arange(steps) <= step, list[float]()
    for training, first in ((False, facts.runs.base), (True, facts.runs.training)):
        other = facts.runs.variant(*call, wanted=set(first.graph.outputs), training=training)
        pairs = aligned(first.graph, other.graph)
        changes.append(mixing.output_change(facts.target, "time", steps, past, first, other, pairs) or 0.0)
        if not training and changes[0] > AGREE:
            return None  # no causal model, or another fault that is reported for eval mode
    if changes[1] < DIFFER:
        return None
    paths = tuple(s.row.path for s in held)
    return Trained(steps=steps, step=step, change=changes[1], still=changes[0], paths=paths, claimed=claimed)


def _others(site: Site, facts: Facts) -> tuple[int, ...]:
    """Return the sizes of all axes of a norm's input but the channels', which its statistics keep apart."""
    call = site.calls[0]
    shape = facts.graph.values[call.input].shape
    channels = 0 if call.running_mean is None else facts.graph.values[call.running_mean].numel
    axis = next((a for a in (1, len(shape) - 1) if a < len(shape) and shape[a] == channels), None)
    batch = inputs.size_of(facts.target, "batch")
    apart = [n // batch if a == 0 and n != batch else n for a, n in enumerate(shape) if a != axis]
    return tuple(apart[1:] if shape[0] == batch else apart)
