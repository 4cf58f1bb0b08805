"""Norms over the channels of each position of an image or a sequence, in place of two permutations."""

from __future__ import annotations

from dataclasses import replace

import torch

from normwise import kernels
from normwise.functional._checks import check_channels, check_floating, size_of
from normwise.functional._hidden import variant
from normwise.functional.hidden import LAYER, RMS
from normwise.layers._norm_module import NormModule
from normwise.spec import NormSpec

__all__ = ["ChannelLayerNorm", "ChannelRMSNorm"]


class _ChannelModule(NormModule):
    """A norm over one axis that need not be the last; abstract."""

    def __init__(
        self,
        num_channels: int,
        eps: float | None,
        elementwise_affine: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        channel_dim: int,
        spec: NormSpec,
        kernel: str,
    ) -> None:
        super().__init__()
        self.kernel = kernels.check_name(kernel)
        self.num_channels = size_of(num_channels, "num_channels", type(self).__name__)
        self.channel_dim = channel_dim
        self._follow(
            spec,
            (num_channels,),
            eps,
            elementwise_affine=elementwise_affine,
            bias=bias,
            device=device,
            dtype=dtype,
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize the channels of each position of ``input``."""
        check_floating(input, type(self).__name__)
        check_channels(input, self.channel_dim, self.num_channels, type(self).__name__, "num_channels")
        axis = self.channel_dim % input.ndim - input.ndim
        return kernels.forward(variant(self.spec, "axes", (axis,)), input, self.weight, self.bias, kernel=self.kernel)

    def extra_repr(self) -> str:
        """Return torch's words, the axis, and what differs from the usual convention."""
        told = [f"{self.num_channels}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"]
        if self.usual.bias:
            told.append(f"bias={self.bias is not None}")
        return ", ".join([*told, f"channel_dim={self.channel_dim}", *self._convention()])


class ChannelLayerNorm(_ChannelModule):
    """Compute LayerNorm over the channels of each position of [N, C, *], without a permuted copy (ConvNeXt).

    Args:
        num_channels: C.
        eps: added to the variance; None is the one of ``spec``, 1e-6 by default.
        elementwise_affine: whether there are a gain and a shift for each channel.
        bias: whether there is a shift.
        device: of the parameters.
        dtype: of the parameters.
        channel_dim: axis of the channels.
        spec: another convention, such as one of ``normwise.layers.FAMILIES``; its eps and its
            parameters are used unless given here.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        [N, C, *] -> the same

    Raises:
        ValueError: another number of channels.
        TypeError: an input that is not floating point.

    Examples:
        >>> x = torch.tensor([[[1.0, 10.0], [3.0, 30.0]]])  # [N, C, L]
        >>> ChannelLayerNorm(2)(x).detach()
        tensor([[[-1.0000, -1.0000],
                 [ 1.0000,  1.0000]]])

    References:
        Liu et al. 2022, arxiv.org/abs/2201.03545
    """

    usual = replace(LAYER, eps=1e-6)

    def __init__(
        self,
        num_channels: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        channel_dim: int = 1,
        spec: NormSpec = usual,
        kernel: str = "auto",
    ) -> None:
        super().__init__(num_channels, eps, elementwise_affine, bias, device, dtype, channel_dim, spec, kernel)


class ChannelRMSNorm(_ChannelModule):
    """Compute RMSNorm over the channels of each position of [N, C, *]; arguments as in ``ChannelLayerNorm``.

    Examples:
        >>> ChannelRMSNorm(2)(torch.tensor([[[3.0], [4.0]]])).flatten().detach()
        tensor([0.8485, 1.1314])
    """

    usual = replace(RMS, eps=1e-6)

    def __init__(
        self,
        num_channels: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        channel_dim: int = 1,
        spec: NormSpec = usual,
        kernel: str = "auto",
    ) -> None:
        super().__init__(num_channels, eps, elementwise_affine, False, device, dtype, channel_dim, spec, kernel)
