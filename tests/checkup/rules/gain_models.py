"""Small models whose gains the rules on parameters judge."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 16
X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))


class Offset(nn.Module):
    """An RMSNorm whose gain is 1 + weight."""

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), weight))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def chain(*norms: nn.Module) -> nn.Sequential:
    """Return linear layers with a norm behind each, their weights the same in every call."""
    random = torch.Generator().manual_seed(0)
    layers = [layer for norm in norms for layer in (nn.Linear(WIDTH, WIDTH), norm)]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0.0, 0.1, generator=random)
    return nn.Sequential(*layers)


def plain(count: int = 3) -> nn.Sequential:
    """Return a chain of RMSNorms of torch."""
    return chain(*[nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(count)])


def offset(count: int = 3, weight: float = 0.0) -> nn.Sequential:
    """Return a chain of norms that compute 1 + weight."""
    return chain(*[Offset(weight) for _ in range(count)])


def gains(model: nn.Sequential) -> list[str]:
    """Return the names of the gains of a chain."""
    return [f"{i}.weight" for i in range(1, len(model), 2)]


def stored(model: nn.Sequential, mean: float, spread: float = 0.2) -> dict[str, Tensor]:
    """Return a checkpoint of a chain with gains drawn around a mean."""
    random = torch.Generator().manual_seed(2)
    names = gains(model)
    return {
        key: mean + spread * torch.randn(tensor.shape, generator=random) if key in names else tensor.clone()
        for key, tensor in model.state_dict().items()
    }


def load(
    model: nn.Sequential, checkpoint: dict[str, Tensor], *, add: float = 0.0, spared: tuple[str, ...] = ()
) -> None:
    """Load a checkpoint, with a number added to the gains but for some."""
    names = {k for k, t in checkpoint.items() if t.ndim == 1 and k.endswith("weight")} - set(spared)
    model.load_state_dict({k: t + add if k in names else t for k, t in checkpoint.items()})


def train(model: nn.Module, steps: int = 60, rate: float = 1e-2) -> nn.Module:
    """Train a model to shift its input by one."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - x.roll(1, -1)).square().mean().backward()
        optimizer.step()
    return model.eval()
