"""How far running statistics are from those of a batch of data, and what it does to the output."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normwise.facts.liveness import Scope
from normwise.facts.runs import statistics_live
from normwise.facts.trials import Trial
from normwise.graph.capture import tensors_in

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Gap", "Measurement", "gaps", "measure", "output_shift", "recalibrated", "still"]

# A channel counts where its difference is six standard errors of the batch, so that chance alone gives less than one
# in 1e8, and half of its own standard deviation. Statistics of a healthy network follow its weights with a delay: small
# networks trained at a constant rate and stopped after 60 steps are off by up to 0.44 (measured), after 300 by 0.1.
Z, EFFECT = 6.0, 0.5
# a norm counts where so many of its channels do: a few channels go astray in any model
CHANNELS = 0.1
# fewer samples say nothing of the spread between them
SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One norm whose running statistics are not those of the data."""

    path: str
    channels: int  # over the limits
    of: int
    largest: float  # shift of a mean, in running standard deviations
    spread: float  # largest ratio of standard deviations, either way


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A model on one batch: with the statistics of the batch and with its running ones."""

    live: Trial
    still: Trial
    samples: int
    from_loader: bool  # on samples from all over the loader
    args: tuple[Any, ...] | None  # of the calls; None: the example inputs


def measure(facts: Facts, *, model: nn.Module | None = None, given: bool = False) -> Measurement:
    """Run a model on a batch of the loader, else on the example inputs, in both modes.

    Args:
        facts: of the target.
        model: another module in place of the target's.
        given: take the example inputs even where there is a loader.

    Raises:
        NotKnown: the model does not run, or the loader is of no use.
    """
    from_loader = facts.target.loader is not None and not given
    args = (facts.batches.mixed or facts.batches.arguments[0]) if from_loader else None
    inputs = args if from_loader else (*facts.target.args, *facts.target.kwargs.values())
    first = next((t for t in tensors_in(inputs) if t.dim()), None)
    return Measurement(
        live=facts.trials.forward(args, model=model, prepare=_live),
        still=facts.trials.forward(args, model=model, prepare=still),
        samples=0 if first is None else first.shape[0],
        from_loader=from_loader and facts.batches.mixed is not None,
        args=args,
    )


def still(model: nn.Module) -> None:
    """Put a model in eval mode."""
    model.eval()


def _live(model: nn.Module) -> None:
    model.eval()
    statistics_live(model)


def gaps(facts: Facts, trial: Trial, *, everywhere: bool = False) -> list[Gap]:
    """Return the norms whose running statistics are not those of the batch, in order.

    Args:
        facts: of the target; norms of single samples are left out.
        trial: with the statistics of the batch.
        everywhere: whatever the norms are: the trial is one of another model.
    """
    found = (_gap(e) for e in trial.norms if (everywhere or _of_batch(facts, e.path)) and e.batch is not None)
    return [g for g in found if g is not None]


def _of_batch(facts: Facts, path: str) -> bool:
    return path in facts.live_norms and facts.live_norms[path].scope is Scope.BATCH


def _gap(event: Any) -> Gap | None:
    mean, var = event.before.get("running_mean"), event.before.get("running_var")
    batch = event.batch
    if mean is None or var is None or mean.shape != batch.mean.shape or len(batch.samples) < SAMPLES:
        return None
    mean, var = mean.double(), var.double()
    sd = var.clamp_min(0).sqrt() + 1e-12
    samples = len(batch.samples)
    error = torch.maximum(batch.samples.std(0) / math.sqrt(samples), sd / math.sqrt(batch.count))
    shift = (batch.mean - mean).abs()
    ratio = ((batch.var + 1e-12) / (var.clamp_min(0) + 1e-12)).log()
    # the variance of n samples is known to sqrt(2/n) of itself, of a Gaussian; twice EFFECT since it is a square
    over = (shift > Z * error) & (shift > EFFECT * sd)
    over |= (ratio.abs() > Z * math.sqrt(2 / samples)) & (ratio.abs() > 2 * EFFECT)
    if over.sum() < max(1, CHANNELS * len(mean)):
        return None
    return Gap(
        path=event.path,
        channels=int(over.sum()),
        of=len(mean),
        largest=float((shift / sd).max()),
        spread=math.exp(float(ratio.abs().max()) / 2),
    )


def output_shift(a: Trial, b: Trial) -> float | None:
    """Return the relative distance of two outputs, None where they hold no comparable numbers."""
    pairs = list(zip(tensors_in(a.output), tensors_in(b.output), strict=False))
    pairs = [(x, y) for x, y in pairs if x.is_floating_point() and x.shape == y.shape and x.numel()]
    total = math.sqrt(sum(float(y.double().square().sum()) for _, y in pairs))
    apart = math.sqrt(sum(float((x.double() - y.double()).square().sum()) for x, y in pairs))
    if not pairs or not math.isfinite(total + apart):
        return None
    return apart / total if total else (0.0 if apart == 0 else None)


def recalibrated(trial: Trial) -> Callable[[nn.Module], object]:
    """Return what puts the statistics of a trial's batch in place of the running ones, in eval mode."""
    batches = {e.path: e.batch for e in trial.norms if e.batch is not None}

    def prepare(model: nn.Module) -> None:
        model.eval()
        for path, batch in batches.items():
            held = model.get_submodule(path)._buffers
            mean, var = held.get("running_mean"), held.get("running_var")
            if mean is not None and var is not None and mean.shape == batch.mean.shape:
                mean.copy_(batch.mean)
                var.copy_(batch.var * (batch.count / max(batch.count - 1, 1)))

    return prepare
