"""RMSNorm: scaled by the root of the mean of squares over the trailing axes, in the convention of any family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from normwise.functional.hidden import RMS
from normwise.layers._norm_module import FamilyModule
from normwise.spec import NormSpec

__all__ = ["RMSNorm"]


class RMSNorm(FamilyModule):
    """Compute weight' * x / sqrt(mean(x^2) + eps) [+ bias] over the trailing axes; weight' is weight, or 1 + weight.

    Takes the place of ``torch.nn.RMSNorm``: same arguments, same state dict. Model families disagree on whether
    1 is added to the weight, and on where the value returns to half precision: ``RMSNorm.like("gemma", H)``
    gives each family's norm, equal to the bit.

    Args:
        normalized_shape: sizes of the trailing axes that share one statistic.
        eps: added to the mean square; None is the machine epsilon of float32 (of float64 for float64), as torch.
        elementwise_affine: whether there is a gain.
        device: of the gain.
        dtype: of the gain.
        add_unit_offset: multiply by 1 + weight, with a weight that starts at 0 (Gemma). A bfloat16 gain stored
            this way can move: next to 1.0 the smallest step is 0.0078.
        bias: whether there is a shift: what a LayerNorm becomes whose input has a mean of zero.
        spec: another convention, such as one of ``normwise.layers.FAMILIES``; its eps and its gain are used
            unless given here.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        [..., *normalized_shape] -> the same

    Raises:
        ValueError: an empty shape, or an input with other trailing axes.
        TypeError: an input that is not floating point.

    Examples:
        >>> RMSNorm(2)(torch.tensor([3.0, 4.0])).detach()
        tensor([0.8485, 1.1314])
        >>> RMSNorm.like("llama", 4096)
        RMSNorm((4096,), eps=1e-06, elementwise_affine=True, cast=before_weight, out_dtype=promoted)

    References:
        Zhang and Sennrich 2019, arxiv.org/abs/1910.07467
    """

    usual = RMS

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        add_unit_offset: bool = False,
        bias: bool = False,
        spec: NormSpec = RMS,
        kernel: str = "auto",
    ) -> None:
        spec = replace(spec, weight_offset=1.0) if add_unit_offset else spec
        spec = replace(spec, bias=spec.bias or bias)
        super().__init__(normalized_shape, eps, elementwise_affine, True, device, dtype, spec=spec, kernel=kernel)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input`` [..., *normalized_shape]."""
        return self._normalize(input)
