"""The language model that studies train: small, and the same but for what a study changes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from normwise.models import Decoder
from normwise.rendering import Text, both
from normwise.studies._corpus import VOCABULARY

__all__ = ["HIDDEN", "LENGTH", "conditions", "language_model"]

HIDDEN, HEADS, LENGTH = 64, 4, 64
# torch.nn.MultiheadAttention draws q, k and v as one matrix, fairseq and torchscale with this gain: the same thing.
_QKV_GAIN = 1 / math.sqrt(2)
_LINEAR = ("v", "out", "up", "down")  # what a branch is linear in; DeepNorm's beta multiplies the same


def conditions(norm: str = "LayerNorm") -> Text:
    """Say what all models have in common."""
    return both(
        f"hidden size {HIDDEN}, {HEADS} heads, GELU, {norm}, Xavier with 1/sqrt(2) on q, k, v",
        f"隐藏维度 {HIDDEN}，{HEADS} 个头，GELU，{norm}，Xavier（q、k、v 乘 1/sqrt(2)）",
    )


def language_model(placement: str, layers: int, *, gain: float = 1.0, **options: Any) -> Decoder:
    """Return a model of bytes with windows of 64.

    Xavier's initialisation times the placement's gains, as the classes that Post-Norm was published with have it. Token
    embeddings are drawn from N(0, 1) as torch.nn.Embedding does it, so that the stream starts at mean square 1. The
    other way there, small embeddings times sqrt(H) (Vaswani et al. 2017), multiplies their learning rate by sqrt(H)
    under Adam: Post-Norm that is stuck then sometimes gets away by its embeddings alone.

    Args:
        placement: where the norms sit.
        layers: their number.
        gain: multiplies v, out, up and down at the start: the size of the branches.
        options: of ``normwise.models.Decoder``.
    """
    chosen: dict[str, Any] = {"norm": "layer", "init": "xavier", "positions": "learned", "bias": True, "tied": False}
    chosen |= {"context": LENGTH, "placement": placement}
    model = Decoder(VOCABULARY, HIDDEN, layers, HEADS, **(chosen | options))
    with torch.no_grad():
        nn.init.normal_(model.embedding.tokens.weight)
        for name, linear in model.stack.named_modules():
            role = name.rpartition(".")[2]
            if isinstance(linear, nn.Linear):
                linear.weight.mul_(_QKV_GAIN if role in ("q", "k", "v") else 1.0)
                linear.weight.mul_(gain if role in _LINEAR else 1.0)
    return model
