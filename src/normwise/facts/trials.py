"""Trials: the user's own training step, evaluation and forwards, watched, with everything put back afterwards."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree

from normwise.errors import NormwiseError, NotKnown
from normwise.facts import needs
from normwise.facts.keeping import kept
from normwise.facts.watching import Change, NormEvent, Watch
from normwise.graph.trace import eager
from normwise.rendering import both
from normwise.targets.target import InputsFrom, Weights

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Trial", "Trials", "completed", "said"]

Prepare = Callable[[nn.Module], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one run of the user's code did; nothing of it is left in the model.

    ``raised`` is the exception that the code raised, ``output`` what it returned otherwise.
    """

    norms: tuple[NormEvent, ...]
    forwards: int
    backwards: int
    steps: int
    collectives: tuple[str, ...]
    changed: Mapping[str, Change]  # buffers, by path
    modes_before: Mapping[str, bool]
    modes_after: Mapping[str, bool]
    output: Any = None
    raised: BaseException | None = None

    def of(self, path: str) -> tuple[NormEvent, ...]:
        """Return the calls of one module, in order."""
        return tuple(e for e in self.norms if e.path == path)

    def drift(self, paths: Iterable[str]) -> float:
        """Return how far the run moved the running means of some norms, at most, in their standard deviations."""
        largest = 0.0
        for path in paths:
            change, calls = self.changed.get(f"{path}.running_mean"), self.of(path)
            if change is not None and calls and "running_var" in calls[0].before:
                sd = calls[0].before["running_var"].double().clamp_min(0).sqrt() + 1e-12
                largest = max(largest, float(((change.after.double() - change.before.double()).abs() / sd).max()))
        return largest


class Trials:
    """Runs the user's code on the user's model."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    @cached_property
    def step(self) -> Trial:
        """One call of ``train_step`` with the model in the mode in which it was given."""
        return self.step_with()

    @cached_property
    def live_step(self) -> Trial:
        """One call of ``train_step`` as in a training loop: a model given in eval mode is put in train mode first."""
        if self.facts.target.model.training:
            return self.step
        return self.step_with(lambda model: model.train())

    def step_with(self, prepare: Prepare | None = None, *, repair: bool = False) -> Trial:
        """Call ``train_step`` once.

        Args:
            prepare: called with the model before; what it changes is undone with the rest.
            repair: the trial is the counterfactual of a finding.

        Raises:
            NotKnown: there is no ``train_step``, or the model cannot be run.
        """
        target = self.facts.target
        step = target.train_step
        if step is None:
            raise NotKnown(needs.TRAIN_STEP)
        self._runnable(inputs=True)
        self.facts.spend(forward=1, backward=1, repair=repair)
        args, kwargs = fresh((target.args, dict(target.kwargs)))
        trial = self._run(lambda: step(target.model, *args, **kwargs), prepare, (step, args, kwargs))
        self._account(trial, forward=1, backward=1)
        return trial

    @cached_property
    def evaluation(self) -> Trial:
        """One call of ``eval_fn`` on a few batches of the loader, or on the example's first input."""
        return self.evaluation_with()

    def evaluation_with(self, prepare: Prepare | None = None, *, repair: bool = False) -> Trial:
        """Call ``eval_fn`` once; the arguments are those of ``step_with``.

        Raises:
            NotKnown: there is no ``eval_fn``, or the model cannot be run.
        """
        target = self.facts.target
        evaluate = target.eval_fn
        if evaluate is None:
            raise NotKnown(both("needs the evaluation: pass eval_fn=...", "需要评估函数：传入 eval_fn=..."))
        self._runnable(inputs=target.loader is None)
        batches = fresh(self._first_inputs())
        self.facts.spend(forward=len(batches), repair=repair)
        trial = self._run(lambda: evaluate(target.model, batches), prepare, (evaluate, batches))
        self._account(trial, forward=len(batches), backward=0)
        return trial

    def forward(
        self,
        args: tuple[Any, ...] | None = None,
        *,
        model: nn.Module | None = None,
        prepare: Prepare | None = None,
        grad: bool = False,
        repair: bool = False,
    ) -> Trial:
        """Call the model once, without a tracer.

        Args:
            args: positional arguments; the example inputs by default.
            model: another module in its place (the online model, a reference).
            prepare: called with the module before; sets the mode, for example.
            grad: gradients are recorded.
            repair: the trial is the counterfactual of a finding.

        Raises:
            NotKnown: the model cannot be run, or raises.
        """
        target = self.facts.target
        self._runnable(inputs=args is None)
        self.facts.spend(repair=repair)
        given = fresh((target.args, dict(target.kwargs)) if args is None else (args, {}))
        called = target.model if model is None else model

        def call() -> Any:
            with torch.set_grad_enabled(grad):
                return called(*given[0], **given[1])

        trial = self._run(call, prepare, given, model=called)
        if trial.raised is not None:
            raise NotKnown(both(f"the model raised: {said(trial.raised)}", f"模型抛出异常：{said(trial.raised)}"))
        return trial

    def _run(
        self, call: Callable[[], Any], prepare: Prepare | None, reached: Any, model: nn.Module | None = None
    ) -> Trial:
        target = self.facts.target
        model = target.model if model is None else model
        watch, output, raised = Watch(), None, None
        outside = (target.optimizer, target.scheduler, target.online, target.reference, *reached)
        with kept(model, [o for o in outside if o is not model], (target.args, target.kwargs)):
            if prepare is not None:
                prepare(model)
            with (
                watch.on(model, self._norm_paths if model is target.model else ()),
                warnings.catch_warnings(),
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
                torch.inference_mode(False),
                torch.enable_grad(),
                eager(),
            ):
                warnings.simplefilter("ignore")
                try:
                    output = _settled(call())
                except (Exception, SystemExit) as error:
                    raised = error.with_traceback(None)  # the frames hold the activations
        return Trial(
            norms=tuple(watch.norms),
            forwards=watch.forwards,
            backwards=watch.backwards,
            steps=watch.steps,
            collectives=tuple(watch.collectives),
            changed=watch.changed,
            modes_before=watch.modes_before,
            modes_after=watch.modes_after,
            output=output,
            raised=raised,
        )

    @cached_property
    def _norm_paths(self) -> frozenset[str]:
        """The modules that execute norms, as far as the model was traced anyway."""
        if "norm_calls" not in vars(self.facts):
            return frozenset()
        graph = self.facts.graph
        return frozenset(graph.calls[n.call].path for n in self.facts.norm_calls.norms)

    def _runnable(self, *, inputs: bool) -> None:
        target = self.facts.target
        if target.weights is Weights.FAKE:
            raise NotKnown(both("the model holds no numbers to run with", "模型没有可用于运行的数值"))
        if inputs and target.inputs_from is InputsFrom.NONE:
            raise NotKnown(both("needs example inputs: give inputs=...", "需要示例输入：给出 inputs=..."))

    def _first_inputs(self) -> list[Any]:
        target = self.facts.target
        if target.loader is not None:
            return [batch[0] for batch in self.facts.batches.arguments]
        given = [*target.args, *target.kwargs.values()]
        if not given:
            raise NotKnown(both("the evaluation needs a batch: give inputs=...", "评估需要一个批次：给出 inputs=..."))
        return given[:1]

    def _account(self, trial: Trial, *, forward: int, backward: int) -> None:
        """Show in the cost what the user's code ran beyond what was asked of it; the limit is for our own passes."""
        more_forward, more_backward = max(0, trial.forwards - forward), max(0, trial.backwards - backward)
        self.facts.forward_passes += more_forward
        self.facts.backward_passes += more_backward
        self.facts.repair_passes += more_forward + more_backward


def fresh(inputs: Any) -> Any:
    """Copy the tensors of a call's arguments, which the user's code may write to."""

    def copied(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        return item.detach().clone().requires_grad_(item.requires_grad)

    return _pytree.tree_map(copied, inputs)


def completed(trial: Trial) -> Trial:
    """Return a trial of ``train_step`` that ran to its end.

    Raises:
        NotKnown: the user's code raised.
    """
    if trial.raised is not None:
        why = said(trial.raised)
        raise NotKnown(both(f"train_step raised {why}", f"train_step 抛出异常 {why}")) from trial.raised
    return trial


def said(error: BaseException) -> str:
    """Return an exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120] if lines else 'no message'}"


def _settled(output: Any) -> Any:
    """Detach and copy what the code returned: it may be a view of what is put back."""

    def copied(item: Any) -> Any:
        return item.detach().clone() if isinstance(item, torch.Tensor) else item

    try:
        return _pytree.tree_map(copied, output)
    except (TypeError, ValueError, RuntimeError, NormwiseError):
        return None
