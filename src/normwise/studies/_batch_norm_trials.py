"""What is measured of BatchNorm on sequences: padding, few values, and a language model that is trained with it."""

from __future__ import annotations

from copy import deepcopy
from math import nan
from typing import Any

import torch
from torch import nn

from normwise.layers import BatchNorm
from normwise.models import Decoder
from normwise.studies._corpus import VOCABULARY, corpus
from normwise.studies._norm_swap import with_norms
from normwise.studies._training import next_byte_loss, train

__all__ = [
    "BATCHES",
    "DEVIATION",
    "DRAWS",
    "HIDDEN",
    "LENGTH",
    "MEAN",
    "WINDOWS",
    "few_values",
    "padding",
    "training",
]

MEAN, DEVIATION = 1.0, 0.5  # of what is padded
DRAWS = 4096
WINDOWS, LENGTH, HIDDEN = 16, 64, 64
BATCHES = (1, 4, 16, 64)  # in evaluation


@torch.no_grad()
def padding(share: float) -> dict[str, Any]:
    """Pad all sequences alike: statistics without a mask relative to those of the real part, changes with one."""
    x = MEAN + DEVIATION * torch.randn(32, LENGTH, 16)
    real = torch.arange(LENGTH) < round(LENGTH * (1 - share))
    mask = real.expand(32, LENGTH)
    alone, padded, masked = (BatchNorm(16, channel_dim=-1, momentum=1.0) for _ in range(3))
    y = alone(x[:, real])
    padded(torch.where(real[:, None], x, 0.0))
    found = masked(torch.where(real[:, None], x, 1e4), mask=mask)
    return {
        "mean": (_running(padded)[0] / _running(alone)[0]).mean().item(),
        "variance": (_running(padded)[1] / _running(alone)[1]).mean().item(),
        "masked_change": (found[:, real] - y).abs().max().item(),
        "masked_running_change": max(
            (m - a).abs().max().item() for m, a in zip(*map(_running, (masked, alone)), strict=True)
        ),
    }


@torch.no_grad()
def few_values(n: int) -> dict[str, Any]:
    """Normalize n values a channel: how much the variances deviate, and how large an output is."""
    norm = BatchNorm(DRAWS, momentum=1.0)
    try:
        y = norm(torch.randn(n, DRAWS))
    except ValueError:
        return {"refused": 1, "deviation": nan, "magnitude": nan}
    variance = _running(norm)[1].double()
    return {
        "refused": 0,
        "deviation": (variance.std() / variance.mean()).item(),
        "magnitude": y.abs().mean().item(),
    }


def _running(norm: BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean, norm.running_var


def training(norm: str, steps: int, seed: int) -> dict[str, Any]:
    """Train a language model, then ask it in both modes and in batches of several kinds."""
    model = Decoder(
        VOCABULARY, HIDDEN, 4, 4, norm="layer", init="gpt-2", positions="learned", context=LENGTH, bias=True
    )
    if norm == "batch":
        with_norms(model, lambda _: BatchNorm(HIDDEN, channel_dim=-1))  # over batch and time
    done = train(
        model, corpus(), rate=2e-3, warm_up_steps=min(30, steps), steps=steps, seed=seed, batch=WINDOWS, length=LENGTH
    )
    windows = corpus().batch(128, LENGTH, torch.Generator().manual_seed(seed), held_out=True)
    by_content = windows[windows.double().mean(1).argsort(stable=True)]
    with_batch = [_loss(model, windows, n, training=True) for n in BATCHES]
    return {
        "training_loss": done.losses[-1],
        "evaluation": _loss(model, windows, WINDOWS, training=False),
        "with_batch": with_batch,
        "with_batch_of_16": with_batch[BATCHES.index(WINDOWS)],
        "with_batch_of_1": with_batch[0],
        "sorted": _loss(model, by_content, WINDOWS, training=True),
        "leak": [_leak(model, windows[:n], training=True) for n in BATCHES],
        "leak_in_evaluation": _leak(model, windows[:WINDOWS], training=False),
    }


@torch.no_grad()
def _loss(model: nn.Module, windows: torch.Tensor, batch: int, *, training: bool) -> float:
    model = deepcopy(model).train(training)  # running statistics of the copy move
    return sum(next_byte_loss(model, some).item() * len(some) for some in windows.split(batch)) / len(windows)


@torch.no_grad()
def _leak(model: nn.Module, windows: torch.Tensor, *, training: bool) -> float:
    """Return how far the logits of the first window move, before its last byte, when that byte is another."""
    model = deepcopy(model).train(training)
    other = windows[:, :-1].clone()
    other[0, -1] = (other[0, -1] + VOCABULARY // 2) % VOCABULARY
    before, after = (model(ids)[0, :-1] for ids in (windows[:, :-1], other))
    return ((after - before).abs().max() / before.std()).item()
