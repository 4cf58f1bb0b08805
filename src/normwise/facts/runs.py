"""Further runs of a model with their values kept: in training, on other inputs, in another dtype, with a value changed.

Value ids are those of each run's own graph; ``Run.like`` finds a value of the traced run again in another run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.graph import Graph, Instead, Observer, Recording, aligned, trace
from normwise.rendering import both
from normwise.targets.casting import cast
from normwise.targets.target import Target

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Run", "Runs", "statistics_live"]

_TOO_LARGE = both(
    "the activations of one run do not fit the memory set aside for comparisons: give fewer or shorter inputs",
    "一次运行的激活超出了为比较预留的内存：请给更少或更短的输入",
)


@dataclasses.dataclass(slots=True)
class Run:
    """One traced run with its values.

    ``graph`` is what ran; ``of(v)`` is the tensor of a value of that graph; ``like(v)`` that of a value of the
    traced run (``facts.graph``), found again here.
    """

    recording: Recording
    pairs: Mapping[int, int] | None = None  # value of the traced run -> value of this run; None: the same ids

    @property
    def graph(self) -> Graph:
        """The ops of this run."""
        return self.recording.graph

    @property
    def tensors(self) -> Mapping[int, torch.Tensor]:
        """The values that were kept, by id."""
        assert self.recording.observer is not None
        return self.recording.observer.tensors

    def of(self, value: int) -> torch.Tensor:
        """Return a value of this run.

        Raises:
            NotKnown: it was not kept.
        """
        if value not in self.tensors:
            raise NotKnown(_TOO_LARGE if self.recording.observer and self.recording.observer.full else _NOT_KEPT)
        return self.tensors[value]

    def like(self, value: int) -> torch.Tensor:
        """Return what a value of the traced run is in this run.

        Raises:
            NotKnown: this run took another way, or did not keep it.
        """
        here = value if self.pairs is None else self.pairs.get(value)
        if here is None:
            raise NotKnown(both("this run took another way through the model", "这次运行走了模型中的另一条路"))
        return self.of(here)


_NOT_KEPT = both("the value was not kept", "这个值没有保留")


class Runs:
    """Runs of one target. Each counts as a pass; the model is left as it was found."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    @cached_property
    def base(self) -> Run:
        """The traced run itself: eval mode, example inputs. Costs nothing more unless its values were too large.

        Raises:
            NotKnown: the model holds no numbers, or effort is "read".
        """
        recording = self.facts.traced
        if recording.graph.fake:
            raise NotKnown(both("the model holds no numbers", "模型没有数值"))
        if recording.observer is None:
            self.facts.spend()  # effort "read" answers that it is too little
        if recording.observer is None or recording.observer.full:
            calls = self.facts.norm_calls.norms
            wanted = {v for n in calls for v in (n.input, n.core, n.output)} | set(recording.graph.outputs)
            self.facts.spend()
            return self._run(self.facts.target, wanted=wanted, mode=recording.graph.mode)
        return Run(recording)

    @cached_property
    def training(self) -> Run:
        """The example inputs with every norm that keeps running statistics in train mode, all else in eval mode."""
        return self.variant(training=True)

    @cached_property
    def float32(self) -> Run:
        """The example inputs through a copy of the model in float32: what half precision rounds away or overflows."""
        return self.in_dtype(torch.float32)

    def in_dtype(self, dtype: torch.dtype) -> Run:
        """Run a copy of the model in another dtype.

        Raises:
            NotKnown: the model cannot be copied or does not run in it.
        """
        self.base  # noqa: B018 - nothing is compared without it
        self.facts.spend()
        target = cast(dataclasses.replace(self.facts.target, dtype=dtype, optimizer=None))
        return self._run(target, mode=self.facts.traced.graph.mode)

    def variant(
        self,
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        training: bool = False,
        wanted: Collection[int] | None = None,
        instead: Mapping[int, Instead] | None = None,
        prepare: Callable[[nn.Module], object] | None = None,
    ) -> Run:
        """Run the model on other inputs.

        Args:
            args: positional arguments; with ``kwargs`` None too, the example inputs.
            kwargs: keyword arguments.
            training: norms with running statistics are in train mode.
            wanted: ids of the values to keep, all by default.
            instead: by id of this run's values, what is computed in place of them: a counterfactual.
            prepare: called with the model before the run; what it changes is undone.
        """
        self.facts.spend(repair=bool(instead))
        target = self.facts.target
        if args is not None or kwargs is not None:
            target = dataclasses.replace(target, args=args or (), kwargs=kwargs or {})

        def prepared(model: nn.Module) -> None:
            if training:
                statistics_live(model)
            if prepare is not None:
                prepare(model)

        return self._run(target, wanted=wanted, instead=instead, mode=self.facts.traced.graph.mode, prepare=prepared)

    def altered(self, instead: Mapping[int, Instead], wanted: Collection[int] = ()) -> Run:
        """Run the example inputs with some values of the traced run computed otherwise: a counterfactual.

        Args:
            instead: by value id, a function of the values kept so far.
            wanted: ids of the values to keep, such as those the functions read; the model's outputs always are.
        """
        self.facts.spend(repair=True)
        graph = self.facts.traced.graph
        kept = {*wanted, *graph.outputs}
        return self._run(self.facts.target, wanted=kept, instead=instead, mode=graph.mode, same=True)

    def _run(
        self,
        target: Target,
        *,
        mode: str,
        wanted: Collection[int] | None = None,
        instead: Mapping[int, Instead] | None = None,
        prepare: Callable[[nn.Module], object] | None = None,
        same: bool = False,
    ) -> Run:
        recording = trace(
            target, mode=mode, observer=lambda: Observer(wanted=wanted, instead=instead or {}), prepare=prepare
        )
        return Run(recording, None if same else aligned(self.facts.traced.graph, recording.graph))


def statistics_live(model: nn.Module) -> None:
    """Put the modules that hold running statistics in train mode, and nothing else: dropout stays off."""
    for module in model.modules():
        if any("running_" in name for name, buffer in module._buffers.items() if buffer is not None):
            module.training = True
