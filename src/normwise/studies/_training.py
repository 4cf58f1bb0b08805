"""Trains a small language model the same way in every study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import fsum, isfinite

import torch
from torch import nn
from torch.nn import functional as F

from normwise.studies._corpus import VOCABULARY, Corpus
from normwise.theory import warm_up

__all__ = ["Training", "next_byte_loss", "train", "unigram_loss", "validation_loss"]

_HELD_OUT_SEED = 1_000_003  # the windows of the validation are the same in every trial
_HELD_OUT_WINDOWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a training left: losses in nats a byte, ``steps`` where they were taken.

    ``losses`` are means over the steps since the one before; after a loss that is not finite the training stops, and
    ``validation`` is what the model had come to.
    """

    steps: list[int]
    losses: list[float]
    validation: float
    largest: float  # single loss after the first tenth: spikes
    stopped: int | None  # the step of a loss that was not finite


def train(
    model: nn.Module,
    corpus: Corpus,
    *,
    rate: float,
    warm_up_steps: int,
    steps: int,
    seed: int,
    batch: int = 16,
    length: int = 64,
    schedule: str = "constant",
    weight_decay: float = 0.0,
    every: int = 20,
    after_step: Callable[[int, nn.Module], object] | None = None,
) -> Training:
    """Train with AdamW(0.9, 0.98) and without clipping: a linear warm-up, then ``schedule``.

    Args:
        model: ids [B, T] -> logits [B, T, 256]; in place.
        corpus: what is read.
        rate: the learning rate after the warm-up.
        warm_up_steps: 0 for none.
        steps: in all.
        seed: of the order of the windows.
        batch: windows a step.
        length: bytes a window.
        schedule: after the warm-up, one of ``normwise.theory.SCHEDULES``.
        weight_decay: decoupled.
        every: steps over which a loss is averaged.
        after_step: called with the number of steps done and the model.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=weight_decay)
    rates = warm_up(optimizer, warm_up_steps, steps, schedule=schedule)
    generator = torch.Generator().manual_seed(seed)
    single: list[float] = []
    for step in range(1, steps + 1):
        loss = next_byte_loss(model, corpus.batch(batch, length, generator))
        single.append(loss.item())
        if not isfinite(single[-1]):
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        rates.step()
        if after_step is not None:
            after_step(step, model)
    ends = [*range(every, len(single), every), len(single)]
    means = [fsum(single[start:end]) / (end - start) for start, end in pairwise([0, *ends])]
    return Training(
        steps=ends,
        losses=means,
        validation=validation_loss(model, corpus, length=length),
        largest=max(single[len(single) // 10 :]),
        stopped=None if isfinite(single[-1]) else len(single),
    )


@torch.no_grad()
def validation_loss(model: nn.Module, corpus: Corpus, *, length: int = 64) -> float:
    """Return the loss on the same windows of the validation part in every trial, in nats a byte."""
    training = model.training
    model.eval()
    windows = _held_out(corpus, length)
    loss = sum(next_byte_loss(model, some).item() * len(some) for some in windows.split(32)) / len(windows)
    model.train(training)
    return loss


def unigram_loss(corpus: Corpus, *, length: int = 64) -> float:
    """Return the loss on the same windows of a model that knows how frequent bytes are and nothing else.

    - sum_b p(b) ln q(b), p the frequencies in the windows and q those in the training part: a model at this loss has
      learned nothing from context.
    """
    asked = torch.bincount(_held_out(corpus, length)[:, 1:].flatten(), minlength=VOCABULARY).double()
    return float(-(asked / asked.sum() * corpus.frequencies.log()).sum())


def _held_out(corpus: Corpus, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_HELD_OUT_SEED)
    return corpus.batch(_HELD_OUT_WINDOWS, length, generator, held_out=True)


def next_byte_loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next byte in nats, for windows [B, T + 1]."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
