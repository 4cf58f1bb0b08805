"""Six models that go wrong, each with its symptom: what the check says is the cause.

``docs/find-the-cause.md`` walks through them. Each function is a target of its own:
``normwise check examples/find_the_cause.py:nan_gradient``. Run all: ``python examples/find_the_cause.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import normwise as nw

WIDTH, WORDS, LENGTH = 32, 16, 8


class HalfRMSNorm(nn.Module):
    """An RMSNorm written without a cast: in float16 a square of 256 or more is infinite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x over its root mean square."""
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class TutorialNorm(nn.Module):
    """The norm of many a tutorial: eps outside the root."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (x - mean) / (sigma + eps)."""
        centred = x - x.mean(-1, keepdim=True)
        sigma = centred.square().mean(-1, keepdim=True).sqrt()
        return self.weight * centred / (sigma + 1e-3) + self.bias


class Block(nn.Module):
    """x + MLP(norm(x))."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = norm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream with this block's branch added."""
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head."""

    def __init__(self, norm: Callable[[int], nn.Module], depth: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.blocks = nn.Sequential(*(Block(WIDTH, norm) for _ in range(depth)))
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.norm(self.blocks(self.tokens(ids))))


class Tagger(nn.Module):
    """A stack of torch's own layers with an embedding and a head."""

    def __init__(self, depth: int, *, norm_first: bool, final_norm: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
        last = nn.LayerNorm(WIDTH) if final_norm else None
        self.tokens, self.position = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.encoder = nn.TransformerEncoder(layer, depth, norm=last, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.encoder(self.tokens(ids) + self.position))


def batch(seed: int = 0, rows: int = 16) -> torch.Tensor:
    """Return ids without the padding id 0."""
    return torch.randint(1, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return how badly the model says the sequence backwards."""
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flip(1).flatten())


def evaluate(model: nn.Module, batches: Iterable[torch.Tensor]) -> float:
    """Return the mean loss."""
    with torch.no_grad():
        losses = [float(loss(model, ids)) for ids in batches]
    return sum(losses) / len(losses)


def train(model: nn.Module, steps: int) -> nn.Module:
    """Train a little."""
    optimizer = torch.optim.Adam(model.parameters(), 6e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, batch(step)).backward()
        optimizer.step()
    return model


def silent_zeros() -> dict[str, Any]:
    """In float16 the loss stays at chance and nothing is NaN: one embedding has a large element."""
    torch.manual_seed(0)
    model = Decoder(HalfRMSNorm)
    with torch.no_grad():
        model.tokens.weight[3, 5] = 400.0
    return {"model": model.half().eval(), "inputs": batch()}


def nan_gradient() -> dict[str, Any]:
    """The loss is finite, every gradient is NaN: the batch has a row of padding, which is constant."""
    torch.manual_seed(0)
    ids = batch()
    ids[1] = 0
    return {"model": Decoder(TutorialNorm), "inputs": ids}


def overflowing_stream() -> dict[str, Any]:
    """In float16 the forward is NaN: trained in bfloat16, one block writes more than float16 holds."""
    torch.manual_seed(0)
    model = Decoder(nn.LayerNorm)
    with torch.no_grad():
        model.get_parameter("blocks.2.mlp.0.weight").mul_(300)
        model.get_parameter("blocks.2.mlp.2.weight")[7] *= 3000
    return {"model": model.half().eval(), "inputs": batch()}


def deep_post_norm() -> dict[str, Any]:
    """Twelve layers that train in other code do not here: post-norm, Adam at a constant rate."""
    torch.manual_seed(0)
    model = Tagger(12, norm_first=False, final_norm=False)
    return {
        "model": model,
        "inputs": batch(),
        "optimizer": torch.optim.Adam(model.parameters(), 3e-3),
        "train_step": lambda model, ids: loss(model, ids).backward(),
    }


def post_norm_checkpoint() -> dict[str, Any]:
    """Trained weights load strictly and say nonsense: they were trained post-norm, the new code is pre-norm."""
    torch.manual_seed(0)
    trained = train(Tagger(2, norm_first=False, final_norm=True), 60)
    model = Tagger(2, norm_first=True, final_norm=True)
    model.load_state_dict(trained.state_dict())  # strict, and without a word
    return {
        "model": model.eval(),
        "inputs": batch(),
        "checkpoint": trained.state_dict(),
        "loader": [(batch(1000 + i, rows=128),) for i in range(2)],
        "eval_fn": evaluate,
    }


def growing_stream() -> dict[str, Any]:
    """Logits far too large from the first step: nothing bounds the stream before the head."""
    torch.manual_seed(0)
    model = Tagger(12, norm_first=True, final_norm=False)
    return {"model": model, "inputs": batch()}


TARGETS = (silent_zeros, nan_gradient, overflowing_stream, deep_post_norm, post_norm_checkpoint, growing_stream)


def main() -> None:
    """Check each and say what comes first."""
    for build in TARGETS:
        given = build()
        report = nw.check(given.pop("model"), given.pop("inputs"), **given)
        first = report.findings[0] if report.findings else None
        print(f"{build.__name__}: " + (f"{first.code} {first.severity}: {first.message}" if first else "nothing found"))


if __name__ == "__main__":
    main()
