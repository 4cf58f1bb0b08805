"""Small models to look at: two that are sound, two with planted faults. Read top to bottom.

[B, T] bytes go in, [B, T, V] logits come out. B batch, T time, H hidden, V vocabulary (256 bytes).
Everything is plain ``torch.nn``: nothing here tells normwise what the models are.

``faulty-decoder`` is a float16 decoder as one may meet it after a few hurried edits:

    PLC001  no norm between the last block and the head
    PLC002  block 3 still has the post-norm wiring of an older version
    NUM001  RMSNorm takes its mean square in float16: one element of 256 makes a whole row zero
    NUM003  and adds an eps of 1e-12, which float16 rounds to 0: a zero row becomes NaN
    NUM004  the embedding's norm divides by sqrt(var) + eps: a constant row has no finite gradient
    AXS007  the byte's value goes through a LayerNorm of one feature, which only ever returns its bias
    PAR001  the optimizer has one group: weight decay pulls every norm's gain to zero

``faulty-tagger`` is a convolutional tagger whose batch norms went wrong:

    AXS006  BatchNorm1d sees [B, T, H], so its channels are time steps
    BNS011  a running variance is negative: that channel is NaN in eval mode
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["DEMOS"]

VOCABULARY, HIDDEN, HEADS, BLOCKS, CONTEXT = 256, 96, 4, 8, 64
ODD_BLOCK = 3
BATCH, TIME = 2, 24


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, with the statistics in float32 or in the dtype of x."""

    def __init__(self, hidden_size: int, eps: float, *, float32: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps, self.float32 = eps, float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() if self.float32 else x
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Standardize(nn.Module):
    """(x - mean) / (sqrt(var) + eps): the root has no eps inside, so its gradient is infinite at 0."""

    def __init__(self, hidden_size: int, eps: float = 1e-3) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(hidden_size)), nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) + self.bias


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)  # each [B, T, heads, H / heads]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP on the residual stream, each behind its norm (or, post_norm, before it)."""

    def __init__(self, norm: Callable[[], nn.Module], *, post_norm: bool = False) -> None:
        super().__init__()
        self.norm1, self.attention = norm(), Attention()
        self.norm2, self.mlp = norm(), MLP()
        self.post_norm = post_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.post_norm:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A pre-norm decoder over bytes; ``faulty`` plants the faults listed at the top of the file."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return RMSNorm(HIDDEN, 1e-12, float32=False) if faulty else RMSNorm(HIDDEN, 1e-5, float32=True)

        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.value_norm = nn.LayerNorm(1) if faulty else nn.Identity()
        self.value = nn.Linear(1, HIDDEN)
        self.embedding_norm = Standardize(HIDDEN) if faulty else nn.Identity()
        self.blocks = nn.ModuleList(Block(norm, post_norm=faulty and i == ODD_BLOCK) for i in range(BLOCKS))
        self.final_norm = nn.Identity() if faulty else norm()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.apply(_initialize)
        for block in self.blocks:  # the stream grows with depth unless what is added shrinks (GPT-2)
            for out in (block.get_submodule("attention.out"), block.get_submodule("mlp.out")):
                nn.init.normal_(out.get_parameter("weight"), std=(HIDDEN * 2 * BLOCKS) ** -0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        value = ids.unsqueeze(-1).to(self.head.weight.dtype) / VOCABULARY  # [B, T, 1]
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.embedding_norm(x + self.value(self.value_norm(value)))  # [B, T, H]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


class Tagger(nn.Module):
    """A convolutional tagger over bytes whose first batch norm takes time for channels."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.norm = nn.BatchNorm1d(TIME)
        self.convolution, self.convolution_norm = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1), nn.BatchNorm1d(HIDDEN)
        self.head = nn.Linear(HIDDEN, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tokens(ids))  # [B, T, H], but BatchNorm1d reads [B, C, T]
        x = self.convolution_norm(self.convolution(x.transpose(1, 2)))  # [B, H, T]
        return self.head(F.relu(x).transpose(1, 2))


class ResidualConvolution(nn.Module):
    """Two convolutions with batch norms around a shortcut (He et al. 2016)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(x + y)


class ResNet(nn.Module):
    """A small residual network for images [B, 3, 32, 32]."""

    def __init__(self, channels: int = 24, blocks: int = 4) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(*(ResidualConvolution(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.stem_norm(self.stem(images))))
        return self.head(x.mean((-2, -1)))


def healthy_decoder() -> dict[str, Any]:
    """Return the sound decoder, with an optimizer that spares the gains."""
    with _seeded():
        model = Decoder(faulty=False).eval()
        return {"model": model, "inputs": (_bytes(),), "optimizer": _adamw(model)}


def faulty_decoder() -> dict[str, Any]:
    """Return the decoder with the faults listed at the top of the file."""
    with _seeded():
        model = Decoder(faulty=True).half().eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        return {"model": model, "inputs": (_bytes(),), "optimizer": optimizer}


def faulty_tagger() -> dict[str, Any]:
    """Return the tagger with the faults listed at the top of the file."""
    with _seeded():
        model = Tagger()
        _calibrate(model, _bytes)
        model.convolution_norm.get_buffer("running_var")[7] = -0.25
        return {"model": model, "inputs": (_bytes(),), "optimizer": _adamw(model)}


def healthy_resnet() -> dict[str, Any]:
    """Return the sound residual network, its running statistics taken from data."""
    with _seeded():
        model = ResNet()
        _calibrate(model, lambda: torch.randn(16, 3, 32, 32))
        return {"model": model, "inputs": (torch.randn(BATCH, 3, 32, 32),), "optimizer": _adamw(model)}


DEMOS: dict[str, Callable[[], dict[str, Any]]] = {
    "faulty-decoder": faulty_decoder,
    "faulty-tagger": faulty_tagger,
    "healthy-decoder": healthy_decoder,
    "healthy-resnet": healthy_resnet,
}


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _bytes() -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, TIME))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):  # keeps the size of a normed input: branches are a good part of the stream
        nn.init.normal_(module.weight, std=HIDDEN**-0.5)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices only: gains and shifts are vectors."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    spared = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


@torch.no_grad()
def _calibrate(model: nn.Module, batch: Callable[[], torch.Tensor], batches: int = 32) -> None:
    """Fill the running statistics of every batch norm with plain averages over some batches."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
    model.train()
    for _ in range(batches):
        model(batch())
    for norm in norms:
        norm.momentum = 0.1
    model.eval()
