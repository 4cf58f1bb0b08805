"""Everything that is known about a target, as lazy attributes: nothing is computed unasked.

An attribute that cannot be had raises ``NotKnown(why)``; a rule that touches it becomes
"not checked: why".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import nn

from normwise.errors import NotKnown, TargetError
from normwise.facts import (
    backward,
    batches,
    breaks,
    causality,
    checkpoints,
    conventions,
    decoding,
    gaps,
    keepers,
    labels,
    liveness,
    logits,
    norms,
    oversized,
    padding,
    partners,
    placing,
    probe,
    profile,
    reference,
    running,
    stored,
    streams,
    unexecuted,
)
from normwise.facts.backward import Backward
from normwise.facts.flow import Flow
from normwise.facts.gains import Gains
from normwise.facts.initial_gains import named_by_gains
from normwise.facts.masks import mask_like
from normwise.facts.oversized import Driven, Oversized
from normwise.facts.plain import plain
from normwise.facts.ranges import Ranges
from normwise.facts.ranks import Ranks
from normwise.facts.records import Break, NormSite, Placement, ProfileRow
from normwise.facts.rows import Rows
from normwise.facts.runs import Runs
from normwise.facts.sites import Site, sites_of
from normwise.facts.stored import NO_FORWARD
from normwise.facts.trials import Trial, Trials
from normwise.graph import Graph, Observer, Recording, trace
from normwise.graph.capture import tensors_in
from normwise.rendering import both
from normwise.targets.target import InputsFrom, Target

__all__ = ["PASSES", "Facts"]

PASSES = {"read": 1, "normal": 15, "full": None}
"""Forward and backward passes that each effort allows, counterfactuals apart (DESIGN 6)."""

_MORE_EFFORT = both('needs more than one pass: use effort "normal"', '需要不止一次运行：请用 effort "normal"')
_ENOUGH = both(
    f'the {PASSES["normal"]} passes of effort "normal" are spent: use effort "full"',
    f'effort "normal" 的 {PASSES["normal"]} 次运行已用完：请用 effort "full"',
)


class Facts:
    """The facts of one target, and the forward and backward passes that they cost."""

    def __init__(self, target: Target, effort: str = "normal") -> None:
        self.target, self.effort = target, effort
        self.forward_passes = 0
        self.backward_passes = 0
        self.repair_passes = 0  # of the two above: spent on counterfactuals of findings

    def spend(self, *, forward: int = 1, backward: int = 0, repair: bool = False) -> None:
        """Account for passes that are about to run.

        Args:
            forward: forward passes of the model (or of its reference, or of a copy).
            backward: backward passes.
            repair: they serve the counterfactual of a finding, at most two a finding.

        Raises:
            NotKnown: the effort of this check does not allow them.
        """
        spent = self.forward_passes + self.backward_passes - self.repair_passes
        limit = PASSES[self.effort]
        if limit is not None and self.effort == "read" and repair:
            raise NotKnown(_MORE_EFFORT)
        if limit is not None and not repair and spent + forward + backward > limit:
            raise NotKnown(_MORE_EFFORT if self.effort == "read" else _ENOUGH)
        self.forward_passes += forward
        self.backward_passes += backward
        self.repair_passes += (forward + backward) if repair else 0

    @cached_property
    def modules(self) -> Mapping[str, nn.Module]:
        """Every module by every path that it has."""
        return dict(self.target.model.named_modules(remove_duplicate=False))

    @cached_property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Every parameter by every name that it has."""
        return dict(self.target.model.named_parameters(remove_duplicate=False))

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every parameter and buffer by every name that it has."""
        return {**self.parameters, **dict(self.target.model.named_buffers(remove_duplicate=False))}

    @cached_property
    def traced(self) -> Recording:
        """One traced run in eval mode, as it was."""
        if self.target.stored is not None:
            raise NotKnown(NO_FORWARD)
        if self.target.inputs_from is InputsFrom.NONE:
            raise NotKnown(
                both(
                    "needs example inputs: give inputs=..., or --inputs SHAPE on the command line",
                    "需要示例输入：给出 inputs=...，或在命令行用 --inputs SHAPE",
                )
            )
        self.spend()
        return trace(self.target, observer=None if self.effort == "read" else Observer)

    @cached_property
    def runs(self) -> Runs:
        """Further runs of the model, their values kept: in training, on other inputs, with a value changed."""
        return Runs(self)

    @cached_property
    def recording(self) -> Recording:
        """The traced run without what is neutral on ordinary data: what norms and streams are read from."""
        return plain(self.traced, self.target.model)

    @property
    def graph(self) -> Graph:
        """The dataflow of the traced run."""
        return self.recording.graph

    @cached_property
    def flow(self) -> Flow:
        """The graph with its taints."""
        return Flow(self.graph, self.recording.data, masks=self._masks())

    def _masks(self) -> frozenset[int]:
        """Floating-point inputs that hold nothing but zeros, ones and large negative numbers are masks."""
        given = {}
        for name, item in [*((str(i), a) for i, a in enumerate(self.target.args)), *self.target.kwargs.items()]:
            for tensor in tensors_in(item):
                given.setdefault(name, tensor)
        masks = set()
        for value in self.graph.values:
            tensor = given.get(value.names[0]) if value.kind == "input" and value.names else None
            if tensor is not None and _is_mask(tensor):
                masks.add(value.id)
        return frozenset(masks)

    @cached_property
    def norm_calls(self) -> norms.NormCalls:
        """Every execution of a norm."""
        try:
            found = norms.find(self.recording, self.flow, self.target.model)
        except TargetError as error:
            raise TargetError(f"{self.target.name}: {error}") from error
        known = frozenset(m for n in found.norms for m in n.members)
        opaque = tuple(probe.opaque_norms(self.recording, self.flow, self.target.model, known))
        ordered = tuple(sorted((*found.norms, *opaque), key=lambda n: n.op.id))
        return norms.NormCalls(norms=ordered, probabilities=found.probabilities, weights=found.weights)

    @cached_property
    def streams(self) -> streams.Streams:
        """The residual streams, nested ones included."""
        return streams.find(self.flow, self.norm_calls.norms)

    @cached_property
    def placed(self) -> placing.Placed:
        """The place of every norm execution."""
        return placing.place(self.flow, self.norm_calls.norms, self.streams)

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """The rows of the norm map with the executions behind them."""
        return sites_of(self.graph, self.norm_calls.norms, self.placed)

    @cached_property
    def running(self) -> tuple[running.RunningStatistics, ...]:
        """The running statistics that the model holds; needs no run."""
        return running.read(self.target.model)

    @cached_property
    def trials(self) -> Trials:
        """Runs of the user's own code, watched and undone."""
        return Trials(self)

    @property
    def training_step(self) -> Trial:
        """One call of the user's ``train_step``."""
        return self.trials.step

    @property
    def evaluation(self) -> Trial:
        """One call of the user's ``eval_fn``."""
        return self.trials.evaluation

    @cached_property
    def batches(self) -> batches.Batches:
        """What the user's loader yields."""
        return batches.read(self)

    @cached_property
    def ranges(self) -> Ranges:
        """What leaves the range of its dtype in the example run, and where it came from."""
        return Ranges(self)

    @cached_property
    def backward(self) -> Backward:
        """The gradients of hand-written norms beside those of their formula."""
        return backward.probe(self)

    @cached_property
    def exact(self) -> Facts:
        """These facts, or those of a float32 copy where half precision would hide a difference."""
        from normwise.facts.exact import exact

        return exact(self)

    @cached_property
    def partners(self) -> partners.Partners:
        """Whether one sample's result depends on the others of its batch."""
        return partners.read(self)

    @cached_property
    def causality(self) -> causality.Causality:
        """Whether an earlier step's result depends on later steps."""
        return causality.read(self)

    @cached_property
    def padding(self) -> padding.Padding:
        """Whether the result of a sample depends on the padding behind it."""
        return padding.read(self)

    @cached_property
    def decoding(self) -> decoding.Decoding:
        """Whether one step with a cache computes what the whole sequence does."""
        return decoding.read(self)

    @cached_property
    def live_norms(self) -> Mapping[str, liveness.Liveness]:
        """What each norm with running statistics does in either mode; needs no run of the model."""
        return liveness.read(self.target.model)

    @cached_property
    def keepers(self) -> Mapping[str, keepers.Keeper]:
        """The modules that keep running statistics under names of their own; needs no run of the model."""
        return keepers.read(self.target.model)

    @cached_property
    def modes_in_training(self) -> Mapping[str, bool]:
        """The mode of every module after ``model.train()``."""
        return liveness.modes_in_training(self.target.model)

    @cached_property
    def on_data(self) -> gaps.Measurement:
        """The model on a batch of data with that batch's statistics, and with its running ones."""
        return gaps.measure(self)

    @cached_property
    def rows(self) -> Rows:
        """Replays of single norms on chosen rows."""
        return Rows(self.traced, self.target.model)

    @cached_property
    def ranks(self) -> Ranks:
        """What the processes of a distributed run hold."""
        return Ranks(self)

    @cached_property
    def gains(self) -> Gains:
        """The gain that each norm really applies, and whether the model was trained."""
        return Gains(self)

    @property
    def norms(self) -> tuple[NormSite, ...]:
        """The rows of the norm map."""
        return tuple(s.row for s in (self.sites if self.target.stored is None else self.stored_sites))

    @cached_property
    def stored_sites(self) -> tuple[Site, ...]:
        """The norms of a checkpoint by itself, by its keys: rows without executions; needs no run."""
        return stored.sites(self)

    @cached_property
    def listed_apart(self) -> tuple[NormSite, ...]:
        """Re-normalised probabilities and weights: like norms, but of no activation."""
        apart = (*self.norm_calls.probabilities, *self.norm_calls.weights)
        return tuple(s.row for s in sites_of(self.graph, apart, None))

    @cached_property
    def placement(self) -> Placement:
        """The stacks and the model's summary."""
        return named_by_gains(self)

    @cached_property
    def breaks(self) -> tuple[Break, ...]:
        """Where the dataflow was lost."""
        return breaks.find(self.flow)

    @cached_property
    def not_executed(self) -> tuple[str, ...]:
        """Paths of registered norms that this run never called."""
        return unexecuted.find(self.graph, self.target.model)

    @cached_property
    def labels(self) -> labels.Labels:
        """The names of the axes ("batch", "time", "hidden", "space") of every value that could be labelled."""
        self.spend(forward=2)
        return labels.read(self.target, self.traced)

    @cached_property
    def checkpoints(self) -> checkpoints.Checkpoints:
        """The norms of the model against the checkpoint it was loaded from; needs no pass."""
        return checkpoints.Checkpoints.read(self)

    @cached_property
    def conventions(self) -> conventions.Conventions:
        """What the configuration says of the norms; needs no run."""
        return conventions.read(self.target.config)

    @cached_property
    def reference(self) -> reference.Reference:
        """The model known to be right, run on the same inputs."""
        return reference.Reference(self)

    @cached_property
    def profile(self) -> tuple[ProfileRow, ...]:
        """Stream, branch and gradient by depth, from one forward and one backward pass."""
        self.spend(backward=1)
        return profile.measure(self)

    @cached_property
    def attentions(self) -> tuple[logits.Attention, ...]:
        """How sharp each attention is on the example inputs."""
        return logits.attentions(self)

    @cached_property
    def oversized(self) -> tuple[Oversized, ...]:
        """The gains that stand far above their siblings."""
        return oversized.oversized(self)

    @cached_property
    def driven_attentions(self) -> Mapping[int, Driven]:
        """The saturated attentions, by op, that one of those gains alone saturates."""
        return oversized.driven(self)


def _is_mask(tensor: torch.Tensor) -> bool:
    if (
        not tensor.is_floating_point()
        or tensor.numel() == 0
        or tensor.device.type == "meta"
        or type(tensor) is not torch.Tensor
        or tensor.layout != torch.strided
    ):
        return False
    flat = tensor.detach().flatten()
    if not mask_like(flat[:256]):  # an image says so in its first pixels
        return False
    return mask_like(flat) and len(flat.unique()) <= 3
