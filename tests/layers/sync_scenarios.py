"""What is run with SyncBatchNorm on several processes and with BatchNorm on one: data made alike on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CHANNELS = 3
Result = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Training steps on batches of which each process holds some samples."""

    splits: tuple[tuple[int, ...], ...]  # samples of each process, one tuple a step
    inner: tuple[int, ...] = (5,)  # axes after the channels
    options: dict[str, Any] = field(default_factory=dict)  # of the layer
    dtype: torch.dtype = torch.float64
    held: torch.dtype | None = None  # round the data to this dtype first
    padding: str = ""  # "mask", "lengths", "channels" (another mask for every channel) or "one rank" (all of rank 0)
    groups: tuple[tuple[int, ...], ...] = ()  # ranks that share statistics; one group of all if empty
    layout: str = ""  # "NLC" (channels on the last axis), "channels_last" or "transposed" (memory alone)
    transform: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    second: bool = False  # the loss is made of input gradients
    checkpointed: bool | None = None  # use_reentrant

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return len(self.splits[0])

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share statistics with ``rank``."""
        everybody = tuple(range(self.world))
        return next(group for group in self.groups or (everybody,) if rank in group)

    def steps(self, ranks: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Yield input, upstream gradient and mask (in full, or None) of some ranks, joined, for each step."""
        for step, split in enumerate(self.splits):
            whole = self._whole(step, sum(split))
            parts = [None if each is None else each.split(split) for each in whole]
            x, upstream, real = (None if part is None else torch.cat([part[r] for r in ranks]) for part in parts)
            assert x is not None
            assert upstream is not None
            yield self._laid_out(x), self._moved(upstream), real

    def _whole(self, step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        random = torch.Generator().manual_seed(100 + step)
        shape = (samples, CHANNELS, *self.inner)
        x = self._rounded(self.transform(torch.randn(shape, generator=random, dtype=torch.float64) * 2 + 1))
        upstream = self._rounded(torch.randn(shape, generator=random, dtype=torch.float64))
        real = self._real(step, shape, random)
        return (x if real is None else x.masked_fill(~real, 1e6)), upstream, real

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.held or self.dtype).to(self.dtype)

    def _real(self, step: int, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor | None:
        if self.padding == "lengths":
            lengths = torch.randint(0, shape[-1] + 1, shape[:1], generator=random)
            return (torch.arange(shape[-1]) < lengths[:, None])[:, None].expand(shape)
        if self.padding == "one rank":
            of_rank_0 = torch.arange(shape[0]) < self.splits[step][0]
            return ~of_rank_0[:, None, None].expand(shape)
        if self.padding:
            channels = shape[1] if self.padding == "channels" else 1
            return (torch.rand((shape[0], channels, *shape[2:]), generator=random) < 0.7).expand(shape)
        return None

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        return x.movedim(1, -1) if self.layout == "NLC" else x

    def _laid_out(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout == "channels_last":
            return x.contiguous(memory_format=torch.channels_last)
        if self.layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        return self._moved(x)

    def padding_of(self, real: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return what our layers are told about padding."""
        if real is None:
            return {}
        if self.padding == "lengths":
            return {"lengths": real[:, 0].sum(-1)}
        return {"mask": real if self.padding == "channels" else real[:, 0]}


def fill(layer: nn.Module) -> None:
    """Give parameters values that are not neutral."""
    random = torch.Generator().manual_seed(7)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.rand(parameter.shape, generator=random, dtype=torch.float64) + 0.5)


def train(
    scenario: Scenario, layer: nn.Module, ranks: tuple[int, ...], forward: Callable[..., torch.Tensor] | None = None
) -> Result:
    """Run the steps on what these ranks hold (through ``forward``, such as the layer compiled); return all results."""
    fill(layer)
    result: Result = {}
    for step, (x, upstream, real) in enumerate(scenario.steps(ranks)):
        x = x.clone().requires_grad_()
        y = _forward(scenario, layer if forward is None else forward, x, scenario.padding_of(real))
        _loss(scenario, x, y, upstream).backward()
        assert x.grad is not None
        result |= {f"output {step}": y.detach(), f"input gradient {step}": x.grad}
    result |= {f"{name} gradient": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    result |= {name: buffer.clone() for name, buffer in layer.named_buffers()}
    if result.get("running_mean") is not None:
        probe = scenario._moved(torch.linspace(-1, 1, 4 * CHANNELS).reshape(4, CHANNELS, *[1] * len(scenario.inner)))
        result["eval output"] = layer.eval()(probe.to(scenario.dtype)).detach()
    return result


def _forward(
    scenario: Scenario, forward: Callable[..., torch.Tensor], x: torch.Tensor, padding: dict[str, Any]
) -> torch.Tensor:
    if scenario.checkpointed is None:
        return forward(x, **padding)
    return checkpoint(forward, x, use_reentrant=scenario.checkpointed)  # type: ignore[no-any-return]


def _loss(scenario: Scenario, x: torch.Tensor, y: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    if not scenario.second:
        return (y * upstream).sum()
    (gradient,) = torch.autograd.grad((y.pow(3) * upstream).sum(), x, create_graph=True)
    return (gradient.pow(2) * upstream).sum()


SPLITS = ((4, 4), (5, 3), (8, 0), (1, 7))
SPLITS_OF_THREE = ((3, 3, 2), (1, 5, 2), (4, 0, 4), (0, 0, 8), (0, 7, 1))

SCENARIOS: dict[str, Scenario] = {
    **{
        f"{split} {padding or 'whole'}": Scenario(splits=(split,), padding=padding)
        for split in (*SPLITS, *SPLITS_OF_THREE)
        for padding in ("", "mask", "lengths")
    },
    "running variance, different sizes": Scenario(splits=((5, 3), (2, 6), (1, 7))),
    "input gradients, different sizes": Scenario(splits=((6, 2),), inner=()),
    "empty on either side": Scenario(splits=((8, 0), (0, 8), (3, 0))),
    "empty images": Scenario(splits=((0, 4),), inner=(2, 3)),
    "empty everywhere": Scenario(splits=((0, 0),)),
    "transposed memory": Scenario(splits=((3, 5),), layout="transposed"),
    "channels_last memory": Scenario(splits=((3, 5),), inner=(2, 4), layout="channels_last"),
    "channels on the last axis": Scenario(splits=((3, 5),), layout="NLC", options={"channel_dim": -1}),
    "volumes": Scenario(splits=((2, 1),), inner=(2, 2, 3)),
    "no affine": Scenario(splits=((5, 3),), options={"affine": False}),
    "no bias": Scenario(splits=((5, 3),), options={"bias": False}),
    "no running statistics": Scenario(splits=((5, 3),), options={"track_running_stats": False}),
    "momentum None": Scenario(splits=((5, 3), (2, 6), (4, 0)), options={"momentum": None}),
    "many sizes": Scenario(splits=tuple((3 + step, 9 - step) for step in range(6)), padding="lengths"),
    "momentum and eps": Scenario(splits=((5, 3), (2, 6)), options={"momentum": 0.7, "eps": 0.3}),
    "single input": Scenario(splits=((1, 1),), inner=()),
    "one element in all": Scenario(splits=((1, 0),), inner=()),
    "each alone": Scenario(splits=((5, 3),), groups=((0,), (1,))),
    "two of three": Scenario(splits=((5, 1, 2), (1, 4, 3)), groups=((0, 1), (2,))),
    "first and last of three": Scenario(splits=((5, 1, 2),), groups=((0, 2), (1,))),
    "another mask for every channel": Scenario(splits=((5, 3),), padding="channels"),
    "nothing real on rank 0": Scenario(splits=((2, 4),), padding="one rank"),
    "double backward": Scenario(splits=((5, 3),), second=True),
    "double backward, empty": Scenario(splits=((6, 0),), second=True),
    "double backward, three": Scenario(splits=((3, 1, 4),), second=True),
    "bfloat16": Scenario(splits=((5, 3),), inner=(50,), dtype=torch.bfloat16),
    "float16": Scenario(splits=((5, 3),), inner=(50,), dtype=torch.float16),
    "offset": Scenario(splits=((5, 3),), inner=(50,), dtype=torch.float32, transform=lambda x: x + 1e4),
    "offset, empty first": Scenario(splits=((0, 3),), inner=(50,), dtype=torch.float32, transform=lambda x: x + 1e4),
    "huge": Scenario(splits=((5, 3),), inner=(50,), dtype=torch.float32, transform=lambda x: x * 1e30),
    "checkpoint, reentrant": Scenario(splits=((5, 3), (2, 6)), checkpointed=True),
    "checkpoint": Scenario(splits=((5, 3), (2, 6)), checkpointed=False),
}
