"""Small networks that tell digits, and their training."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F

from normwise.layers import BatchNorm, BatchNorm2d, GroupNorm, LayerNorm
from normwise.studies._digits import CLASSES

__all__ = ["classifier", "left_training", "share_right", "train"]


def classifier(name: str, norm: str) -> nn.Module:
    """Return "convolution" or "dense", with a "batch", "group" or "layer" norm before every activation, or "none"."""
    layers: list[nn.Module] = []
    if name == "convolution":
        for channels, out, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 2)):
            layers += [nn.Conv2d(channels, out, 3, stride, 1, bias=norm == "none"), *_norm(norm, out, 4), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4, CLASSES))
    for _ in range(2):
        layers += [nn.Linear(64, 64, bias=norm == "none"), *_norm(norm, 64, 2), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, CLASSES))


def _norm(norm: str, channels: int, axes: int) -> list[nn.Module]:
    match norm:
        case "batch":
            return [BatchNorm2d(channels) if axes == 4 else BatchNorm(channels)]
        case "group":
            return [GroupNorm(8, channels)]
        case "layer":
            return [GroupNorm(1, channels) if axes == 4 else LayerNorm(channels)]
        case _:
            return []


def train(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, *, batch: int, epochs: int, rate: float, seed: int
) -> list[float]:
    """Train with SGD and momentum, the rate falling to zero as a cosine, and return the loss of every step."""
    whole = len(labels) // batch * batch
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (whole // batch))
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(epochs):
        for some in torch.randperm(len(labels), generator=generator)[:whole].view(-1, batch):
            loss = F.cross_entropy(model(images[some]), labels[some])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            rates.step()
            losses.append(loss.item())
    return losses


@torch.no_grad()
def left_training(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, order: torch.Tensor, batch: int
) -> float:
    """Return the accuracy with statistics of evaluation batches; a last batch of one joins the one before it."""
    model = deepcopy(model).train()
    parts = list(order.split(batch))
    if len(parts[-1]) == 1 and len(parts) > 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    order = torch.cat(parts)
    return share_right(torch.cat([model(images[part]) for part in parts]), labels[order])


def share_right(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of right answers."""
    return (logits.argmax(1) == labels).double().mean().item()
