"""InstanceNorm: each channel of a sample centred and scaled over its real positions."""

from __future__ import annotations

from dataclasses import replace

import torch

from normwise.functional._checks import check_channels, check_floating, check_mask
from normwise.functional.batch import instance_norm, instance_spec
from normwise.functional.masks import as_mask
from normwise.kernels import check_name
from normwise.layers._batch_module import StatisticsModule
from normwise.spec import Weight

__all__ = ["InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"]


class _InstanceModule(StatisticsModule):
    """An instance norm; abstract."""

    usual = instance_spec(1e-5, 3)
    positions: int  # axes that are normalized

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        self.kernel = check_name(kernel)
        weight = Weight.VECTOR if affine else Weight.NONE
        spec = instance_spec(eps, 2 + self.positions)
        self.spec = replace(spec, bias=affine and bias, weight=weight, running=track_running_stats)
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
        """Normalize ``input`` [N, C, *] or [C, *], over real positions alone where they are marked.

        Args:
            input: x.
            mask: bool, True = real, shaped like x without its channel axis or broadcastable to x.
            lengths: real positions of each sample of [N, C, T].
        """
        who = type(self).__name__
        check_floating(input, who)
        check_mask(mask, who)
        batched = input.ndim == 2 + self.positions
        if not batched and input.ndim != 1 + self.positions:
            raise ValueError(
                f"{who} takes inputs of {2 + self.positions} axes, or {1 + self.positions} without a batch, given "
                f"{input.ndim}, shape {list(input.shape)}; add or drop axes, or use GroupNorm(C, C)"
            )
        check_channels(input, 1 if batched else 0, self.num_features, who)
        if batched:
            return self._normalize(input, mask, lengths)
        return self._normalize(input[None], None if mask is None else mask[None], lengths)[0]

    def _normalize(self, x: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None) -> torch.Tensor:
        real = as_mask(x, mask, lengths, 1, type(self).__name__)
        arguments = self._arguments(real, x.numel() // max(x.shape[0] * self.num_features, 1))
        return instance_norm(x, *arguments, mask=real, kernel=self.kernel)


class InstanceNorm1d(_InstanceModule):
    """Compute weight * (x - mean) / sqrt(var + eps) + bias per sample and channel of [N, C, L].

    Takes the place of ``torch.nn.InstanceNorm1d``: same arguments, same state dict. ``mask`` or ``lengths``
    leave padding out of the statistics; outputs at padding are 0. With ``track_running_stats`` the average of
    the samples' statistics, weighted by their real elements, is kept and used in eval mode; ``momentum=None``
    averages all batches (torch ignores it and keeps 0 and 1).

    Args:
        num_features: C, channels.
        eps: added to the (biased) variance.
        momentum: weight of the new value.
        affine: whether there are a gain and a shift; none by default, as in torch.
        track_running_stats: whether running statistics are kept; none by default, as in torch.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: whether there is a shift.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        [N, C, L] or [C, L] -> the same

    Raises:
        ValueError: other axes or channels, one position per sample while training, masks that do not fit.
        TypeError: an input that is not floating point, a mask that is not bool.

    Examples:
        >>> InstanceNorm1d(1)(torch.tensor([[[1.0, 3.0, 99.0]]]), lengths=torch.tensor([2]))
        tensor([[[-1.0000,  1.0000,  0.0000]]])

    References:
        Ulyanov et al. 2016, arxiv.org/abs/1607.08022
    """

    positions = 1


class InstanceNorm2d(_InstanceModule):
    """InstanceNorm of [N, C, H, W] or [C, H, W]; see ``InstanceNorm1d`` for all else.

    Examples:
        >>> InstanceNorm2d(1)(torch.tensor([[[[1.0, 3.0]]]])).flatten()
        tensor([-1.0000,  1.0000])
    """

    positions = 2


class InstanceNorm3d(_InstanceModule):
    """InstanceNorm of [N, C, D, H, W] or [C, D, H, W]; see ``InstanceNorm1d`` for all else.

    Examples:
        >>> InstanceNorm3d(1)(torch.tensor([[[[[1.0, 3.0]]]]])).flatten()
        tensor([-1.0000,  1.0000])
    """

    positions = 3
