"""Running statistics as a model holds them, whether or not a run reached them, and those of a batch beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from normwise.rendering import both

__all__ = ["NO_NUMBERS", "BatchStatistics", "RunningStatistics", "left_of_the_start", "measured", "read", "unfinished"]


NO_NUMBERS = both(
    "the model holds no numbers: its running statistics are on the meta device",
    "模型没有数值：其运行统计量在 meta 设备上",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStatistics:
    """The buffers and the affine map of one norm that keeps running statistics."""

    path: str
    mean: torch.Tensor | None
    var: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    counted: int | None  # batches; None where the module keeps no count
    momentum: float | None = None  # share of the newest batch; None: a plain average, or not said
    training: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatistics:
    """Mean and variance of one input of one norm, by channel, in float64."""

    mean: torch.Tensor
    var: torch.Tensor  # biased
    samples: torch.Tensor  # [samples, channels]: the mean of each sample
    count: int  # values of one channel


def read(model: nn.Module) -> tuple[RunningStatistics, ...]:
    """Return every module that holds ``running_var``: the buffers' names are torch's format of checkpoints."""
    found = (_of(path, module) for path, module in model.named_modules())
    return tuple(f for f in found if f is not None)


def measured(module: nn.Module, given: torch.Tensor) -> BatchStatistics | None:
    """Return the statistics of an input of a norm with running statistics; None where it has no axis of channels."""
    var = _tensor(module, "running_var")
    if var is None or var.dim() != 1 or given.numel() == 0 or given.device.type == "meta":
        return None
    axis = _channel_axis(given, len(var))
    if axis is None:
        return None
    values = given.detach().double().movedim(axis, 1)
    values = values.reshape(values.shape[0], len(var), -1)
    return BatchStatistics(
        mean=values.mean((0, 2)),
        var=values.var((0, 2), correction=0),
        samples=values.mean(2),
        count=values.shape[0] * values.shape[2],
    )


# the share of a running statistic that may still be its initial value
_LEFT = 0.05


def left_of_the_start(running: RunningStatistics) -> float | None:
    """Return the share of the running statistics that is still their initial value; None where it is not known."""
    if running.momentum is None or running.counted is None or not 0 < running.momentum <= 1:
        return None
    return (1 - running.momentum) ** running.counted


def unfinished(running: RunningStatistics) -> bool:
    """Whether a norm has counted some batches, but too few for its running statistics to have left the start."""
    left = left_of_the_start(running)
    return bool(running.counted) and left is not None and left > _LEFT


def _channel_axis(given: torch.Tensor, channels: int) -> int | None:
    if given.dim() < 2:
        return None
    return next((a for a in (1, given.dim() - 1) if given.shape[a] == channels), None)


def _of(path: str, module: nn.Module) -> RunningStatistics | None:
    var = _tensor(module, "running_var")
    if var is None or not var.is_floating_point():
        return None
    count = _tensor(module, "num_batches_tracked")
    momentum = getattr(module, "momentum", None)
    return RunningStatistics(
        path=path,
        mean=_tensor(module, "running_mean"),
        var=var,
        weight=_tensor(module, "weight"),
        bias=_tensor(module, "bias"),
        counted=None if count is None or count.is_meta else int(count),
        momentum=float(momentum) if isinstance(momentum, (int, float)) else None,
        training=module.training,
    )


def _tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    found = getattr(module, name, None)
    return found.detach() if isinstance(found, torch.Tensor) and not nn.parameter.is_lazy(found) else None
