"""Small models of every kind, whose norms and learned factors have left the values they start at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from normwise.models import Decoder, Encoder, EncoderDecoder

__all__ = ["KINDS", "PLACEMENTS", "gradients", "ids", "loss", "small"]

WORDS, WIDTH, DEPTH, HEADS = 23, 16, 2, 2
PLACEMENTS = ("pre", "post", "deep-norm", "residual", "parallel", "rezero")
KINDS: dict[str, Callable[..., nn.Module]] = {
    "decoder": lambda **options: Decoder(WORDS, WIDTH, DEPTH, HEADS, **options),
    "encoder": lambda **options: Encoder(WORDS, WIDTH, DEPTH, HEADS, **options),
    "encoder-decoder": lambda **options: EncoderDecoder(WORDS, WIDTH, DEPTH, DEPTH, HEADS, **options),
}


def small(kind: str, placement: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """Return the same model at every call; ReZero's factors are not 0, or its branches would not count."""
    torch.manual_seed(7)
    model = KINDS[kind](placement=placement, **options).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.2 * torch.randn_like(parameter) + 0.1)
    return model


def ids(kind: str, batch: int = 4, steps: int = 7) -> tuple[torch.Tensor, ...]:
    """Return a batch: one sequence a sample, or a source and a shorter target."""
    random = torch.Generator().manual_seed(8)
    sizes = (steps, steps - 2) if kind == "encoder-decoder" else (steps,)
    return tuple(torch.randint(WORDS, (batch, size), generator=random) for size in sizes)


def loss(output: torch.Tensor) -> torch.Tensor:
    """Return a mean over samples of something that no norm makes constant."""
    slope = torch.linspace(-1, 2, output[0].numel(), dtype=torch.float64).reshape(output.shape[1:]).to(output.dtype)
    return (output * slope).sum() / len(output)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every gradient by name; there is one for every parameter."""
    found = {name: each.grad for name, each in model.named_parameters()}
    assert [name for name, grad in found.items() if grad is None] == []
    return {name: grad.clone() for name, grad in found.items() if grad is not None}
