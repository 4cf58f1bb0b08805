"""What the layers of a trained stack do: how far each turns the stream, and what the loss is without it."""

from __future__ import annotations

from math import acos, pi

import torch
from torch import nn
from torch.nn import functional

from normwise.models import Decoder
from normwise.studies._corpus import Corpus
from normwise.studies._training import validation_loss

__all__ = ["costs_of_dropping", "influence", "path_angle", "token_cosine"]


@torch.no_grad()
def influence(model: Decoder, ids: torch.Tensor) -> list[float]:
    """Return 1 - cos of the stream before and after each layer, mean over tokens."""
    x, found = model.embedding(ids), []
    for layer in model.stack.layers:
        entered, x = x, layer(x)
        found.append(float(1 - functional.cosine_similarity(entered.double(), x.double(), dim=-1).mean()))
    return found


def token_cosine(x: torch.Tensor) -> float:
    """Return the mean cosine between two tokens of a window, of x [B, T, H]; 1: they cannot be told apart."""
    unit = functional.normalize(x.double(), dim=-1)
    steps = x.shape[1]
    return float(((unit.sum(1).pow(2).sum(-1) - steps) / (steps * (steps - 1))).mean())


def path_angle(influence: list[float]) -> float:
    """Return the sum over layers of arccos(1 - influence), in units of pi."""
    return sum(acos(max(-1.0, min(1.0, 1 - each))) for each in influence) / pi


def costs_of_dropping(model: Decoder, text: Corpus, *, length: int) -> list[float]:
    """Return by how much the loss grows without each layer."""
    whole, layers, costs = validation_loss(model, text, length=length), model.stack.layers, []
    for index in range(len(layers)):
        model.stack.layers = nn.ModuleList([*layers[:index], *layers[index + 1 :]])
        costs.append(validation_loss(model, text, length=length) - whole)
    model.stack.layers = layers
    return costs
