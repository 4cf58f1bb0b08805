"""GroupNorm: each group of channels of a sample centred and scaled over its real positions."""

from __future__ import annotations

from dataclasses import replace

import torch

from normwise.functional._checks import check_channels, check_floating, check_groups, size_of
from normwise.functional.group import group_norm, group_spec
from normwise.kernels import check_name
from normwise.layers._norm_module import NormModule, told_kernel
from normwise.spec import Weight

__all__ = ["GroupNorm"]


class GroupNorm(NormModule):
    """Compute weight * (x - mean) / sqrt(var + eps) + bias, one mean and variance a sample and group of channels.

    Takes the place of ``torch.nn.GroupNorm``: same arguments, same state dict. ``mask`` or ``lengths`` leave
    padding out of the statistics; outputs at padding are 0.

    Args:
        num_groups: groups that the channels are split into, in order; 1 is a LayerNorm over all of a sample.
        num_channels: C, a multiple of ``num_groups``.
        eps: added to the (biased) variance.
        affine: whether there are a gain and a shift for each channel.
        device: of the parameters.
        dtype: of the parameters.
        bias: whether there is a shift.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        [N, C, *] -> the same

    Raises:
        ValueError: channels that are no multiple of the groups, an input with other channels, a mask that does not fit.
        TypeError: an input that is not floating point, a mask that is not bool.

    Examples:
        >>> GroupNorm(2, 4)(torch.tensor([[1.0, 3.0, 10.0, 30.0]])).detach()
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])

    References:
        Wu and He 2018, arxiv.org/abs/1803.08494
    """

    usual = group_spec(1, 1e-5, 3)

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        self.kernel = check_name(kernel)
        num_groups = size_of(num_groups, "num_groups", "GroupNorm")
        num_channels = size_of(num_channels, "num_channels", "GroupNorm")
        check_groups(num_groups, num_channels, "num_groups", "GroupNorm")
        self.num_groups, self.num_channels, self.affine = num_groups, num_channels, affine
        spec = group_spec(num_groups, eps, 3)
        self.spec = replace(spec, bias=affine and bias, weight=Weight.VECTOR if affine else Weight.NONE)
        self._register_affine((num_channels,), weight=affine, bias=affine and bias, device=device, dtype=dtype)

    def forward(
        self,
        input: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalize ``input`` [N, C, *], over real positions alone where ``mask`` or ``lengths`` say which they are.

        Args:
            input: x [N, C, *].
            mask: bool, True = real, shaped [N, *] or broadcastable to x.
            lengths: real positions of each sample of [N, C, T].
        """
        check_floating(input, "GroupNorm")
        check_channels(input, 1, self.num_channels, "GroupNorm", "num_channels")
        padding = {"mask": mask, "lengths": lengths}
        return group_norm(
            input, self.num_groups, self.weight, self.bias, self.eps or 0.0, **padding, kernel=self.kernel
        )

    def extra_repr(self) -> str:
        """Return torch's words."""
        told = f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"
        return ", ".join([told, f"bias={self.bias is not None}", *told_kernel(self.kernel)])
