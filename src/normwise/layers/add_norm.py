"""Residual add and norm in one: what stands between two sublayers of a pre-norm network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from normwise import kernels
from normwise.functional._hidden import added, check_residual
from normwise.functional.hidden import LAYER, RMS
from normwise.layers._norm_module import FamilyModule
from normwise.spec import NormSpec

__all__ = ["AddLayerNorm", "AddRMSNorm"]


class _AddModule(FamilyModule):
    """A residual add and the norm of the sum; abstract."""

    residual_dtype: torch.dtype | None

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``input`` to ``residual`` (None at the start of the stream), return the norm of the sum, and the sum."""
        held = self._parameters_at_hand() if self.residual_dtype is None else None
        if held is not None:
            both = kernels.attempt(self.spec, self.normalized_shape[-1], input, *held, residual)
            if both is not None:
                return both
        self._check(input)
        check_residual(input, residual, type(self).__name__)
        return added(self.spec, input, residual, self.weight, self.bias, self.residual_dtype, self.kernel)

    def extra_repr(self) -> str:
        """Return torch's words, the stream's dtype, and what differs from torch's convention."""
        dtype = self.residual_dtype
        return super().extra_repr() + ("" if dtype is None else f", residual_dtype={str(dtype).removeprefix('torch.')}")


class AddRMSNorm(_AddModule):
    """Compute r = x + residual and RMSNorm(r), and return both.

    With ``residual_dtype=torch.float32`` the stream stays in float32 beside bfloat16 sublayers, whose small
    updates would be lost next to a large stream.

    Args:
        normalized_shape: sizes of the trailing axes that share one statistic.
        eps: added to the mean square.
        elementwise_affine: whether there is a gain.
        device: of the gain.
        dtype: of the gain.
        residual_dtype: dtype of the stream; None keeps the wider of x and residual.
        add_unit_offset: multiply by 1 + weight, with a weight that starts at 0.
        spec: another convention, such as one of ``normwise.layers.FAMILIES``.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        x and residual [..., *normalized_shape] -> the norm, in the dtype of x, and the new residual

    Raises:
        ValueError: shapes that differ, or other trailing axes.
        TypeError: an input that is not floating point.

    Examples:
        >>> y, residual = AddRMSNorm(2)(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0]))
        >>> y.detach(), residual
        (tensor([0.8485, 1.1314]), tensor([3., 4.]))
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
        residual_dtype: torch.dtype | None = None,
        add_unit_offset: bool = False,
        spec: NormSpec = RMS,
        kernel: str = "auto",
    ) -> None:
        spec = replace(spec, weight_offset=1.0) if add_unit_offset else spec
        super().__init__(normalized_shape, eps, elementwise_affine, False, device, dtype, spec=spec, kernel=kernel)
        self.residual_dtype = residual_dtype


class AddLayerNorm(_AddModule):
    """Compute r = x + residual and LayerNorm(r), and return both; see ``AddRMSNorm``.

    Args:
        normalized_shape: sizes of the trailing axes that share one statistic.
        eps: added to the variance.
        elementwise_affine: whether there are a gain and a shift.
        bias: whether there is a shift.
        device: of the parameters.
        dtype: of the parameters.
        residual_dtype: dtype of the stream; None keeps the wider of x and residual.
        spec: another convention, such as one of ``normwise.layers.FAMILIES``.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Examples:
        >>> y, residual = AddLayerNorm(2)(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]))
        >>> y.detach(), residual
        (tensor([-1.0000,  1.0000]), tensor([1., 3.]))
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
        residual_dtype: torch.dtype | None = None,
        spec: NormSpec = LAYER,
        kernel: str = "auto",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype, spec=spec, kernel=kernel)
        self.residual_dtype = residual_dtype
