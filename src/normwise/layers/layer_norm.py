"""LayerNorm: centred and scaled by the standard deviation over the trailing axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from normwise.functional.hidden import LAYER
from normwise.layers._norm_module import FamilyModule
from normwise.spec import NormSpec

__all__ = ["LayerNorm"]


class LayerNorm(FamilyModule):
    """Compute weight * (x - mean) / sqrt(var + eps) + bias over the trailing axes.

    Takes the place of ``torch.nn.LayerNorm``: same arguments, same state dict, same values to the bit. In half
    precision the gradients of weight and bias are summed in float32; torch's CPU kernel sums them in half
    precision and ends at 256 (bfloat16) for each thread, however many rows there are.

    Args:
        normalized_shape: sizes of the trailing axes that share one statistic.
        eps: added to the (biased) variance.
        elementwise_affine: whether there are a gain and a shift.
        bias: whether there is a shift.
        device: of the parameters.
        dtype: of the parameters.
        spec: another convention, such as one of ``normwise.layers.FAMILIES``; its eps and its parameters are
            used unless given here.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        [..., *normalized_shape] -> the same

    Raises:
        ValueError: an empty shape, or an input with other trailing axes.
        TypeError: an input that is not floating point.

    Examples:
        >>> LayerNorm(3)(torch.tensor([1.0, 2.0, 3.0])).detach()
        tensor([-1.2247,  0.0000,  1.2247])
        >>> LayerNorm.like("cohere", 4096)
        LayerNorm((4096,), eps=1e-05, elementwise_affine=True, bias=False, form=reciprocal, cast=after_weight)

    References:
        Ba et al. 2016, arxiv.org/abs/1607.06450
    """

    usual = LAYER

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        spec: NormSpec = LAYER,
        kernel: str = "auto",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype, spec=spec, kernel=kernel)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input`` [..., *normalized_shape]."""
        return self._normalize(input)
