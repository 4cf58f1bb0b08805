"""Parameters that are stored in bfloat16: how updates are rounded, and how large those of Adam can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from math import sqrt

import torch
from torch import nn

__all__ = ["adam_bound", "nearest", "stochastic", "stored_training"]


@torch.no_grad()
def stored_training(
    stored: Sequence[nn.Parameter],
    gains: Sequence[nn.Parameter],
    *,
    storage: str,
    rate: float,
    betas: tuple[float, float],
    decay: float,
    seed: int,
) -> Iterator[float]:
    """Take a step of AdamW each time the next value is asked for; yield the largest update of a gain, before rounding.

    Args:
        stored: every parameter of a model, float32; after a step each is a number of bfloat16.
        gains: those of them that decay.
        storage: "nearest", "stochastic", or "master" for a float32 copy that is kept beside what is stored.
        rate: of learning.
        betas: of Adam.
        decay: of the gains, decoupled.
        seed: of stochastic rounding.
    """
    ours = {id(gain) for gain in gains}
    masters = [parameter.detach().clone() for parameter in stored]
    decayed = [master for parameter, master in zip(stored, masters, strict=True) if id(parameter) in ours]
    spared = [master for parameter, master in zip(stored, masters, strict=True) if id(parameter) not in ours]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas)
    noise = torch.Generator().manual_seed(seed + 1)
    for parameter, master in zip(stored, masters, strict=True):
        parameter.copy_(nearest(master))
        if storage != "master":
            master.copy_(parameter)
    while True:
        for parameter, master in zip(stored, masters, strict=True):
            master.grad = parameter.grad
        before = [master.clone() for master in decayed]
        optimizer.step()
        largest = max(float((m - b).abs().max()) for m, b in zip(decayed, before, strict=True))
        for parameter, master in zip(stored, masters, strict=True):
            parameter.copy_(stochastic(master, noise) if storage == "stochastic" else nearest(master))
            if storage != "master":
                master.copy_(parameter)
        yield largest


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Return x as bfloat16 keeps it, in float32."""
    return x.bfloat16().float()


def stochastic(x: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """Return x rounded to one of its two neighbours in bfloat16, the nearer the more often, in float32.

    bfloat16 is the upper half of float32: what is random carries over from the lower half, which is then cleared.
    """
    bits = x.view(torch.int32)
    drawn = torch.randint(1 << 16, x.shape, generator=noise, dtype=torch.int32)
    return ((bits + drawn) & ~0xFFFF).view(torch.float32)


def adam_bound(first: float, second: float) -> float:
    """Return B: by how many rates Adam's update can exceed the rate, whatever the gradients."""

    def at(t: int) -> float:
        ratio = first**2 / second
        powers = (1 - ratio**t) / (1 - ratio)
        return sqrt((1 - first) ** 2 / (1 - second) * powers * (1 - second**t)) / (1 - first**t)

    return max(at(t) for t in islice(count(1), 2000))  # at a stand by then: second^2000 is 0
