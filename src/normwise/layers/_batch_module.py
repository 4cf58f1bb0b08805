"""What batch norms share: running statistics, when they move, and masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from normwise.functional._checks import check_channels, check_floating, size_of
from normwise.functional.batch import BATCH, batch_norm, batch_spec
from normwise.functional.masks import as_mask
from normwise.kernels import check_name
from normwise.layers._norm_module import NormModule
from normwise.spec import Weight

__all__ = ["BatchModule", "StatisticsModule", "is_recomputing"]


def is_recomputing() -> bool:
    """Return whether this forward pass runs inside a backward pass: activation checkpointing computes it again.

    Both modes recompute while the autograd engine works on a graph: the reentrant one in the backward of its
    Function, the other in the hook that unpacks a saved tensor. The forward pass that counts is the first one.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class StatisticsModule(NormModule):
    """A norm that may keep running statistics; abstract."""

    _version = 2  # of the state dict, as torch's: with num_batches_tracked
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None

    def _register(
        self,
        num_features: int,
        momentum: float | None,
        *,
        affine: bool,
        bias: bool,
        tracks: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.num_features = size_of(num_features, "num_features", type(self).__name__)
        if self.spec.eps is None:
            raise ValueError(f"{type(self).__name__} adds eps to the variance, given None; pass a number, 0 or more")
        self.momentum = momentum
        self.spec = replace(self.spec, momentum=momentum if tracks else None)
        self.affine, self.track_running_stats = affine, tracks
        for name, fill in (("running_mean", torch.zeros), ("running_var", torch.ones)):
            self.register_buffer(name, fill(num_features, device=device, dtype=dtype) if tracks else None)
        count = torch.tensor(0, dtype=torch.long, device=device) if tracks else None
        self.register_buffer("num_batches_tracked", count)
        self._register_affine((num_features,), weight=affine, bias=affine and bias, device=device, dtype=dtype)

    def reset_running_stats(self) -> None:
        """Forget all batches: mean 0, variance 1."""
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Forget all batches, and make gain and shift neutral."""
        self.reset_running_stats()
        super().reset_parameters()

    def _arguments(self, real: torch.Tensor | None, elements: int) -> tuple[Any, ...]:
        """Count this batch, and return what torch's functions take after the input: all from running_mean to eps."""
        momentum = self._count_batch(real, elements)
        of_batch = self.training or self.running_mean is None
        used = momentum is not None or not of_batch
        running = (self.running_mean, self.running_var) if used else (None, None)
        return (*running, self.weight, self.bias, of_batch, 0.0 if momentum is None else momentum, self.eps or 0.0)

    def _count_batch(self, real: torch.Tensor | None, elements: int = 2) -> float | torch.Tensor | None:
        """Count this batch, and return the weight its statistics get; None where running ones stay as they are.

        ``real`` marks real elements; a batch without any does not count. ``elements`` are those of a set, real or
        not: without any, or with a single one, which is refused, torch counts the batch, and so does this. With
        ``momentum=None`` it does not: there the count is what the average divides by.
        """
        if not self.training or self.num_batches_tracked is None or self.running_mean is None or is_recomputing():
            return None
        if elements < 2:
            self.num_batches_tracked.add_(0 if self.momentum is None or real is not None else 1)
        else:
            self.num_batches_tracked.add_(1 if real is None else real.any())
        if self.momentum is not None:
            return self.momentum
        wide = torch.promote_types(self.running_mean.dtype, torch.float32)  # a third in float32 is not one in float64
        return self.num_batches_tracked.to(wide).clamp_min(1).reciprocal()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Version 1 of torch's batch norms had no num_batches_tracked.
        if (local_metadata.get("version") or 1) < 2 and self._buffers.get("num_batches_tracked") is not None:
            state_dict.setdefault(prefix + "num_batches_tracked", torch.tensor(0, dtype=torch.long))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        """Return torch's words, and what differs from torch's convention."""
        told = [
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}",
            f"bias={self.bias is not None}, track_running_stats={self.track_running_stats}",
        ]
        return ", ".join(told + self._convention())


class BatchModule(StatisticsModule):
    """A batch norm; abstract."""

    axes_allowed: tuple[int, ...] | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        channel_dim: int = 1,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        self.kernel = check_name(kernel)
        spec = replace(
            BATCH,
            eps=eps,
            running=track_running_stats,
            weight=Weight.VECTOR if affine else Weight.NONE,
            bias=affine and bias,
        )
        ndim = max(*(self.axes_allowed or (3,)), channel_dim + 1, -channel_dim)  # the most usual layout it takes
        self.spec = batch_spec(spec, ndim, channel_dim)
        self.channel_dim = channel_dim
        self._register(
            num_features, momentum, affine=affine, bias=bias, tracks=track_running_stats, device=device, dtype=dtype
        )

    def forward(
        self,
        input: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalize ``input``, over real elements alone where ``mask`` or ``lengths`` say which they are.

        Args:
            input: x, channels on ``channel_dim``.
            mask: bool, True = real, shaped like x without its channel axis or broadcastable to x.
            lengths: real positions of each sample, for sequences padded on the right.
        """
        self._check(input)
        real = as_mask(input, mask, lengths, self.channel_dim, type(self).__name__)
        arguments = self._arguments(real, input.numel() // self.num_features)
        return batch_norm(input, *arguments, mask=real, channel_dim=self.channel_dim, kernel=self.kernel)

    def _check(self, input: torch.Tensor) -> None:
        who = type(self).__name__
        check_floating(input, who)
        if self.axes_allowed is not None and input.ndim not in self.axes_allowed:
            wanted = " or ".join(str(n) for n in self.axes_allowed)
            raise ValueError(
                f"{who} takes inputs of {wanted} axes, given {input.ndim}, shape {list(input.shape)}; "
                "BatchNorm takes any number of axes"
            )
        check_channels(input, self.channel_dim, self.num_features, who)

    def extra_repr(self) -> str:
        """Return torch's words, and what differs from torch's convention."""
        return super().extra_repr() + ("" if self.channel_dim == 1 else f", channel_dim={self.channel_dim}")
