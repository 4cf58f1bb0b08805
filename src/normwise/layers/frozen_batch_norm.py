"""FrozenBatchNorm: a batch norm whose statistics, gain and shift are constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from normwise import kernels
from normwise.functional._checks import check_channels, check_floating, size_of
from normwise.functional.batch import BATCH, batch_spec, running_moments
from normwise.layers._norm_module import NormModule
from normwise.spec import Form

__all__ = ["FrozenBatchNorm"]

_FROZEN = replace(BATCH, form=Form.FOLDED)


class FrozenBatchNorm(NormModule):
    """Compute x * s + (bias - running_mean * s) with s = weight / sqrt(running_var + eps): all four are buffers.

    The state dict is that of torchvision's and DETR's FrozenBatchNorm2d; a ``num_batches_tracked`` of a
    BatchNorm checkpoint is ignored. Nothing here learns or moves, in train mode either.

    Args:
        num_features: C, channels.
        eps: added to the variance.
        device: of the buffers.
        dtype: of the buffers.
        channel_dim: axis of the channels.

    Shape:
        any with C channels on ``channel_dim`` -> the same

    Raises:
        ValueError: another number of channels.
        TypeError: an input that is not floating point.

    Examples:
        >>> FrozenBatchNorm(1, eps=0.0)(torch.tensor([[1.0], [3.0]])).T
        tensor([[1., 3.]])
    """

    usual = _FROZEN

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        channel_dim: int = 1,
    ) -> None:
        super().__init__()
        self.num_features = size_of(num_features, "num_features", "FrozenBatchNorm")
        self.channel_dim = channel_dim
        self.spec = replace(_FROZEN, eps=eps)
        zeros, ones = (make(num_features, device=device, dtype=dtype) for make in (torch.zeros, torch.ones))
        self.register_buffer("weight", ones)
        self.register_buffer("bias", zeros)
        self.register_buffer("running_mean", zeros.clone())
        self.register_buffer("running_var", ones.clone())

    @classmethod
    def from_batch_norm(cls, norm: nn.Module, *, channel_dim: int = 1) -> Self:
        """Return a frozen copy of a batch norm, torch's or ours.

        Raises:
            ValueError: it keeps no running statistics to freeze.
        """
        mean, var = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
        if mean is None or var is None:
            raise ValueError(
                f"{type(norm).__name__} keeps no running statistics to freeze; "
                "give from_batch_norm() a batch norm with track_running_stats=True"
            )
        frozen = cls(
            mean.numel(),
            norm.eps,  # type: ignore[arg-type]
            mean.device,
            mean.dtype,
            channel_dim=getattr(norm, "channel_dim", channel_dim),
        )
        kept = {name: each for name, each in norm.state_dict().items() if name != "num_batches_tracked"}
        frozen.load_state_dict({**frozen.state_dict(), **kept})
        return frozen.train(norm.training)

    def reset_parameters(self) -> None:
        """Make all four neutral, as after ``to_empty()``; nothing else changes them."""
        for name, fill in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            self.get_buffer(name).fill_(fill)

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
        state_dict.pop(prefix + "num_batches_tracked", None)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Scale and shift each channel of ``input``."""
        check_floating(input, "FrozenBatchNorm")
        check_channels(input, self.channel_dim, self.num_features, "FrozenBatchNorm")
        if input.ndim < 2:
            raise ValueError(
                f"FrozenBatchNorm needs a batch axis and channels, given shape {list(input.shape)}; "
                "add an axis with x.unsqueeze(0)"
            )
        spec = batch_spec(self.spec, input.ndim, self.channel_dim)
        given = running_moments(spec, input, self.running_mean, self.running_var)  # type: ignore[arg-type]
        return kernels.forward(spec, input, self.weight, self.bias, given=given)

    def extra_repr(self) -> str:
        """Return channels and eps."""
        return f"{self.num_features}, eps={self.eps}" + (
            "" if self.channel_dim == 1 else f", channel_dim={self.channel_dim}"
        )
