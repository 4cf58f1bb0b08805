"""Norms whose gain and shift come from data: the norm of AdaLN and FiLM, with the projection or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from normwise import kernels
from normwise.functional._checks import check_broadcast, size_of
from normwise.functional._hidden import variant
from normwise.functional.hidden import LAYER, RMS
from normwise.layers._norm_module import HiddenModule
from normwise.spec import Cast, Modulation, NormSpec

__all__ = ["AdaLayerNorm", "AdaRMSNorm", "ModulatedLayerNorm", "ModulatedRMSNorm"]

_LAYER = replace(LAYER, cast=Cast.AFTER_WEIGHT)


def _modulated(module: HiddenModule, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    for name, each in (("scale", scale), ("shift", shift)):
        check_broadcast(each, x, name, type(module).__name__)
    spec = variant(module.spec, "modulation", Modulation.SCALE if shift is None else Modulation.SCALE_SHIFT)
    return kernels.forward(spec, x, module.weight, module.bias, scale=scale, shift=shift, kernel=module.kernel)


class ModulatedLayerNorm(HiddenModule):
    """Compute LayerNorm(x) * (1 + scale) + shift, rounded once.

    Args:
        normalized_shape: sizes of the trailing axes that share one statistic.
        eps: added to the variance.
        elementwise_affine: whether the norm has a gain and a shift of its own; AdaLN has none.
        bias: whether it has a shift of its own.
        device: of the parameters.
        dtype: of the parameters.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        x [..., *normalized_shape], scale and shift broadcastable to it -> shape of x

    Raises:
        ValueError: an input with other trailing axes, a scale or shift that does not broadcast.
        TypeError: an input that is not floating point.

    Examples:
        >>> ModulatedLayerNorm(2, eps=0.0)(torch.tensor([1.0, 3.0]), scale=torch.ones(2), shift=torch.ones(2))
        tensor([-1.,  3.])

    References:
        Perez et al. 2017, arxiv.org/abs/1709.07871; Peebles and Xie 2022, arxiv.org/abs/2212.09748
    """

    usual = replace(_LAYER, modulation=Modulation.SCALE_SHIFT)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str = "auto",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype, spec=self.usual, kernel=kernel)

    def forward(self, input: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize ``input``, multiply by 1 + ``scale``, add ``shift``."""
        self._check(input)
        return _modulated(self, input, scale, shift)


class ModulatedRMSNorm(HiddenModule):
    """Compute RMSNorm(x) * (1 + scale) + shift, rounded once; arguments as in ``ModulatedLayerNorm``.

    Examples:
        >>> ModulatedRMSNorm(2, eps=0.0)(torch.tensor([3.0, 4.0]), scale=torch.ones(2))
        tensor([1.6971, 2.2627])
    """

    usual = replace(RMS, modulation=Modulation.SCALE_SHIFT)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        elementwise_affine: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str = "auto",
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, False, device, dtype, spec=self.usual, kernel=kernel
        )

    def forward(self, input: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize ``input``, multiply by 1 + ``scale``, add ``shift``."""
        self._check(input)
        return _modulated(self, input, scale, shift)


def _projected(linear: nn.Linear, x: torch.Tensor, condition: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and shift of a condition [B, D], or [B, ..., D] with as many axes as x."""
    if not 1 <= condition.ndim <= x.ndim or condition.shape[-1] != linear.in_features:
        raise ValueError(
            f"a condition has {linear.in_features} features on its last axis and no more axes than the input of "
            f"shape {list(x.shape)}, given shape {list(condition.shape)}; build the norm with cond_features= the "
            "features it has"
        )
    scale, shift = linear(F.silu(condition)).chunk(2, dim=-1)
    between = (1,) * (x.ndim - condition.ndim)
    shape = (*condition.shape[:-1], *between, scale.shape[-1])
    return scale.reshape(shape), shift.reshape(shape)


class _AdaModule(HiddenModule):
    """A modulated norm with the projection that makes its scale and shift; abstract."""

    def __init__(
        self,
        normalized_shape: int,
        cond_features: int,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str = "auto",
    ) -> None:
        normalized_shape = size_of(normalized_shape, "normalized_shape", type(self).__name__)
        super().__init__(normalized_shape, eps, False, False, device, dtype, spec=self.usual, kernel=kernel)
        self.linear = nn.Linear(cond_features, 2 * normalized_shape, device=device, dtype=dtype)
        self._start_neutral()

    def _start_neutral(self) -> None:
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def reset_parameters(self) -> None:
        """Make the projection give scale 0 and shift 0."""
        if hasattr(self, "linear"):
            self._start_neutral()

    def forward(self, input: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Normalize ``input`` [B, ..., H] and modulate it by ``condition`` [B, D]."""
        self._check(input)
        return _modulated(self, input, *_projected(self.linear, input, condition))


class AdaLayerNorm(_AdaModule):
    """Compute LayerNorm(x) * (1 + scale) + shift, with (scale, shift) = Linear(silu(condition)) (adaLN-Zero).

    The projection starts at 0, so that the layer starts as a plain LayerNorm.

    Args:
        normalized_shape: H, size of the last axis.
        cond_features: D, features of the condition.
        eps: added to the variance.
        device: of the projection.
        dtype: of the projection.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        x [B, ..., H] and condition [B, D], or [B, ..., D] with a condition for each position -> shape of x

    Raises:
        ValueError: an input or a condition with another last axis.
        TypeError: an input that is not floating point.

    Examples:
        >>> AdaLayerNorm(2, 4, eps=0.0)(torch.tensor([[[1.0, 3.0]]]), torch.ones(1, 4)).detach()
        tensor([[[-1.,  1.]]])

    References:
        Peebles and Xie 2022, arxiv.org/abs/2212.09748
    """

    usual: NormSpec = replace(_LAYER, modulation=Modulation.SCALE_SHIFT)


class AdaRMSNorm(_AdaModule):
    """Compute RMSNorm(x) * (1 + scale) + shift, with (scale, shift) = Linear(silu(condition)); see ``AdaLayerNorm``.

    Examples:
        >>> AdaRMSNorm(2, 4, eps=0.0)(torch.tensor([[[3.0, 4.0]]]), torch.ones(1, 4)).detach()
        tensor([[[0.8485, 1.1314]]])
    """

    usual: NormSpec = replace(RMS, modulation=Modulation.SCALE_SHIFT)
