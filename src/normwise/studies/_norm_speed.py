"""LayerNorm against RMSNorm on the clock: of torch.nn and ours, alone and in the training step of a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from normwise import layers
from normwise.studies._corpus import corpus
from normwise.studies._norm_swap import with_norms
from normwise.studies._training import next_byte_loss

__all__ = ["KINDS", "ROUNDS", "race"]

ROUNDS = 9
_FILL = 0.02  # seconds that the calls of a norm take together
_EPS = 1e-5
KINDS: dict[str, Callable[[int], nn.Module]] = {
    "torch_layer": lambda size: nn.LayerNorm(size, _EPS),
    "torch_rms": lambda size: nn.RMSNorm(size, _EPS),
    "ours_layer": lambda size: layers.LayerNorm(size, _EPS),
    "ours_rms": lambda size: layers.RMSNorm(size, _EPS),
}


def race(make: Callable[[], nn.Module], width: int, *, batch: int, length: int, rounds: int) -> dict[str, float]:
    """Return median seconds of each kind, and the median share of them that RMSNorm saves, round by round.

    Args:
        make: makes the model, the same each time; its norms are replaced.
        width: features.
        batch: windows.
        length: bytes of a window.
        rounds: of measuring.
    """
    norms = {kind: each(width) for kind, each in KINDS.items()}
    x, upstream = torch.randn(batch * length, width, requires_grad=True), torch.randn(batch * length, width)
    races = {
        "forward": {kind: _forward(norm, x) for kind, norm in norms.items()},
        "both": {kind: _both(norm, x, upstream) for kind, norm in norms.items()},
        "step": {kind: _step(make(), each, width, batch, length) for kind, each in KINDS.items()},
    }
    found = dict[str, float]()
    for name, rivals in races.items():
        times = _times(rivals, rounds, 0.0 if name == "step" else _FILL)
        found |= {f"time_{name}_{kind}": median(times[kind]) for kind in times}
        for side in ("torch", "ours"):
            pairs = zip(times[f"{side}_layer"], times[f"{side}_rms"], strict=True)
            found[f"time_saved_{name}_{side}"] = median(1 - rms / layer for layer, rms in pairs)
    return found


def _forward(norm: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def call() -> None:
        with torch.no_grad():
            norm(x)

    return call


def _both(norm: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> Callable[[], object]:
    def call() -> None:
        x.grad = None
        norm.zero_grad(set_to_none=True)
        norm(x).backward(upstream)

    return call


def _step(
    model: nn.Module, make: Callable[[int], nn.Module], width: int, batch: int, length: int
) -> Callable[[], object]:
    with_norms(model, lambda _: make(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    windows, text = torch.Generator().manual_seed(0), corpus()

    def call() -> None:
        ids = text.batch(batch, length, windows)
        optimizer.zero_grad(set_to_none=True)
        next_byte_loss(model, ids).backward()
        optimizer.step()

    return call


def _times(rivals: dict[str, Callable[[], object]], rounds: int, fill: float) -> dict[str, list[float]]:
    """Return seconds a call, by rival and round; every round starts with another rival."""
    names, times = list(rivals), {name: list[float]() for name in rivals}
    calls = {name: max(1, round(fill / _once(run))) for name, run in rivals.items()}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            for _ in range(calls[name]):
                rivals[name]()
            times[name].append((time.perf_counter() - start) / calls[name])
    return times


def _once(run: Callable[[], object]) -> float:
    """Return the seconds of a second call: the first one builds what is kept."""
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
