"""Running statistics as a model holds them, whether or not a run reached them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["RunningStatistics", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStatistics:
    """The buffers and the affine map of one norm that keeps running statistics."""

    path: str
    mean: torch.Tensor | None
    var: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    counted: int | None  # batches; None where the module keeps no count


def read(model: nn.Module) -> tuple[RunningStatistics, ...]:
    """Return every module that holds ``running_var``: the buffers' names are torch's format of checkpoints."""
    found = (_of(path, module) for path, module in model.named_modules())
    return tuple(f for f in found if f is not None)


def _of(path: str, module: nn.Module) -> RunningStatistics | None:
    var = _tensor(module, "running_var")
    if var is None or not var.is_floating_point():
        return None
    count = _tensor(module, "num_batches_tracked")
    return RunningStatistics(
        path=path,
        mean=_tensor(module, "running_mean"),
        var=var,
        weight=_tensor(module, "weight"),
        bias=_tensor(module, "bias"),
        counted=None if count is None or count.is_meta else int(count),
    )


def _tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    found = getattr(module, name, None)
    return found.detach() if isinstance(found, torch.Tensor) else None
