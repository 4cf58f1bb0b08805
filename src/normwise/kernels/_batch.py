"""Norms over a batch for compiled code: what it takes, its gradients, and the second derivative in plain torch.

What is kept for the backward pass is the input and five numbers a channel; gain and mask are references.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from normwise.kernels import eager
from normwise.kernels._autograd import _apply, _recorded
from normwise.kernels._calls import refusal_of_call
from normwise.kernels._ops import LIBRARY, ops
from normwise.kernels._ops_batch import ELEMENTS, MEAN, ROWS, VARIANCE
from normwise.kernels._plans import HALF
from normwise.kernels.eager import Moments
from normwise.spec import Cast, Form, Gate, Modulation, NormSpec, Scope, Statistic, Weight

__all__ = ["BatchPlan", "batch_plan"]

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A norm of each channel over every other axis.

    Args:
        spec: what is computed.
        ndim: the number of axes of the inputs.
        channel: the axis of the channels, from the front.
        eps: what is added to the variance.
    """

    spec: NormSpec
    ndim: int
    channel: int
    eps: float

    def refusal(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        *,
        given: Moments | None = None,
        **operands: Any,
    ) -> str | None:
        """Return why this call is not taken, or None."""
        for name, operand in operands.items():
            if operand is not None:
                return f"it takes no {name} for a norm over a batch"
        dtype = x.dtype
        if dtype not in _DTYPES:
            return f"it computes float16, bfloat16, float32 and float64, not {dtype}"
        if x.ndim != self.ndim:
            return f"the spec is one of inputs of {self.ndim} axes"
        channels = x.shape[self.channel]
        if channels == 0:
            return "a batch without a channel has no statistics"
        for name, parameter in (("weight", weight), ("bias", bias)):
            if parameter is None:
                continue
            if parameter.dtype is not dtype and (parameter.dtype is not torch.float32 or dtype not in HALF):
                return f"it takes a {name} in the input's dtype or float32"
            if parameter.ndim != 1 or parameter.shape[0] != channels:
                return f"the {name} must hold one number a channel"
            if parameter.device != x.device:
                return f"the {name} is on another device"
        if bias is not None and bias.dtype is not (_sums(x) if weight is None else weight.dtype):
            return "weight and bias must have one dtype, and a bias alone that of the statistics"
        if mask is not None:
            why = self._refusal_of_mask(x, mask)
            if why is not None:
                return why
        if given is not None:
            why = self._refusal_of_given(x, given, channels)
            if why is not None:
                return why
        return _refusal_of_class(x) or refusal_of_call(x)

    def _refusal_of_mask(self, x: torch.Tensor, mask: torch.Tensor) -> str | None:
        if mask.dtype is not torch.bool or mask.device != x.device:
            return "it takes a bool mask on the device of the input"
        first = x.ndim - mask.ndim
        for axis, size in enumerate(mask.shape, first):
            if size != 1 and (axis == self.channel or axis < 0 or size != x.shape[axis]):
                return "it takes one mask for all channels that broadcasts to the input, of size 1 on their axis"
        return None

    def _refusal_of_given(self, x: torch.Tensor, given: Moments, channels: int) -> str | None:
        sums = _sums(x)
        if given.mean is None:
            return "it takes given statistics with a mean"
        for each in (given.mean, given.statistic):
            if each.requires_grad and torch.is_grad_enabled():
                return "gradients of given statistics are those of plain torch"
            if each.dtype is not sums or each.device != x.device:
                return "it takes given statistics in float32 (float64 for float64), on the device of the input"
            if each.numel() != channels or each.ndim != self.ndim or each.shape[self.channel] != channels:
                return "it takes given statistics of one number a channel, with the axes of the input"
        return None

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        *,
        given: Moments | None = None,
        **operands: Any,
    ) -> torch.Tensor:
        """Return the normalized tensor."""
        return self._computed(x, weight, bias, mask, given)[0]

    def forward_and_moments(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        *,
        given: Moments | None = None,
        **operands: Any,
    ) -> tuple[torch.Tensor, Moments]:
        """Return the normalized tensor and the moments it used, which have no gradient."""
        y, stats = self._computed(x, weight, bias, mask, given)
        return y, self._moments(x, stats, mask) if given is None else given

    def moments(self, x: torch.Tensor, mask: torch.Tensor | None) -> Moments:
        """Return mean, biased variance and number of elements of each channel."""
        if _recorded(x):
            return eager.moments(self.spec, x, mask)
        return self._moments(x, ops.batch_moments.default(x, _with_axes(mask, self.ndim), self.channel), mask)

    def _computed(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        given: Moments | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask = _with_axes(mask, self.ndim)
        mean, variance = (None, None) if given is None else (given.mean, given.statistic)
        args = (x, weight, bias, mask, mean, variance, self.channel, self.eps, self.spec.weight_offset)
        return ops.batch.default(*args) if torch.compiler.is_compiling() else _batch(*args)

    def _moments(self, x: torch.Tensor, stats: torch.Tensor, mask: torch.Tensor | None) -> Moments:
        shape = [ROWS, *[1] * self.ndim]
        shape[1 + self.channel] = channels = x.shape[self.channel]
        rows = stats.view(shape).unbind()
        elements = x.numel() // max(channels, 1) if mask is None else rows[ELEMENTS].narrow(self.channel, 0, 1)
        return Moments(rows[MEAN], rows[VARIANCE], elements)


def batch_plan(spec: NormSpec) -> BatchPlan | str | None:
    """Return the plan for norms over a batch; why there is none; or None for norms that are not over a batch."""
    if spec.scope is not Scope.BATCH:
        return None
    ndim = len(spec.axes) + 1
    channel = set(range(-ndim, 0)) - set(spec.axes)
    if len(channel) != 1:
        return "it takes statistics over every axis but the channels"
    reason = _reason(spec)
    return reason if reason is not None else BatchPlan(spec, ndim, channel.pop() + ndim, spec.eps or 0.0)


def _reason(spec: NormSpec) -> str | None:
    """Return why no tensor is taken, or None."""
    if (
        spec.statistic is not Statistic.VARIANCE
        or not spec.center
        or not spec.biased
        or spec.groups
        or spec.partial != 1
    ):
        return "it takes the biased variance of centred channels"
    if not spec.eps_inside or spec.eps_clamp or not spec.eps:
        return "it adds an eps above 0 to the variance"
    if spec.gate is not Gate.NONE or spec.modulation is not Modulation.NONE or spec.weight_on_input:
        return "gates, modulations and weights on the input are not part of this kernel"
    if spec.factor != 1 or spec.weight is Weight.SCALAR or (spec.weight_offset and spec.offset_in_weight_dtype):
        return "factors, scalar weights and offsets in the weight's dtype are not part of this kernel"
    if spec.form is not Form.RECIPROCAL or spec.cast not in (Cast.NONE, Cast.AFTER_WEIGHT):
        return f"the order of operations of form='{spec.form}', cast='{spec.cast}' is in the eager kernel only"
    if spec.stats_dtype != "float32" or spec.out_dtype is not None:
        return "it sums in float32 (float64 for float64) and returns the dtype of the input"
    return None


def _refusal_of_class(x: torch.Tensor) -> str | None:
    if type(x) is torch.Tensor or (module := sys.modules.get("torch.distributed.tensor")) is None:
        return None
    return "it has no rule for a batch that is spread over processes" if isinstance(x, module.DTensor) else None


def _sums(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _with_axes(mask: torch.Tensor | None, ndim: int) -> torch.Tensor | None:
    return mask if mask is None or mask.ndim == ndim else mask.reshape((1,) * (ndim - mask.ndim) + mask.shape)


# -- gradients ----------------------------------------------------------------------------------


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    channel: int,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if mean is None or variance is None:
        return ops.batch_norm.default(x, weight, bias, mask, channel, eps, offset)
    return ops.batch_norm_given.default(x, mean, variance, weight, bias, mask, channel, eps, offset)


def _batch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    channel: int,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    args = (x, weight, bias, mask, mean, variance, channel, eps, offset)
    return _apply(_BatchNorm, *args) if _recorded(x, weight, bias) else _forward(*args)


LIBRARY.impl("batch", _batch, "CompositeImplicitAutograd")


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        mean: torch.Tensor | None,
        variance: torch.Tensor | None,
        channel: int,
        eps: float,
        offset: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, stats = _forward(x, weight, bias, mask, mean, variance, channel, eps, offset)
        ctx.save_for_backward(x, stats, weight, mask)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.norm = (channel, eps, offset, mean is not None)
        return y, stats

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> _Tensors:
        dy, none = grads[0], (None,) * 6
        if dy is None:
            return (None, None, None, *none)
        x, stats, weight, mask = ctx.saved_tensors
        channel, _, offset, given = ctx.norm
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            return (*_differentiable(dy, x, stats, weight, mask, ctx.norm, wanted), *none)
        needs = wanted[0] + 2 * wanted[1] + 4 * wanted[2]
        found = ops.batch_norm_backward.default(dy, x, stats, weight, mask, channel, offset, given, needs)
        return (*(each if want else None for each, want in zip(found, wanted, strict=True)), *none)


def _differentiable(
    dy: torch.Tensor,
    x: torch.Tensor,
    stats: torch.Tensor,
    weight: torch.Tensor | None,
    mask: torch.Tensor | None,
    norm: tuple[int, float, float, bool],
    wanted: tuple[bool, ...],
) -> _Tensors:
    """Return the gradients as operations that can be differentiated again; formulas as in csrc/ops_batch.cpp."""
    channel, eps, offset, given = norm
    shape, axes = [1] * x.ndim, [axis for axis in range(x.ndim) if axis != channel]
    shape[channel] = -1

    def real(value: torch.Tensor) -> torch.Tensor:
        return value if mask is None else torch.where(mask, value, 0.0)

    def mean(value: torch.Tensor) -> torch.Tensor:
        return value.sum(axes, keepdim=True) / stats[ELEMENTS].view(shape).clamp_min(1)

    h, upstream = real(x.to(stats.dtype)), real(dy.to(stats.dtype))
    if given:
        c, s = real(h - stats[MEAN].view(shape)), stats[VARIANCE].view(shape)
    else:
        c = real(h - mean(h))
        s = mean(c.pow(2))
    rstd = torch.rsqrt(s + eps)
    hat = c * rstd
    dx = upstream if weight is None else upstream * (weight.to(stats.dtype) + offset).view(shape)
    if not given:
        dx = real(dx - mean(dx) - hat * mean(dx * hat))
    held = stats.dtype if weight is None else weight.dtype
    return (
        (dx * rstd).to(x.dtype) if wanted[0] else None,
        (upstream * hat).sum(axes).to(held) if wanted[1] else None,
        upstream.sum(axes).to(held) if wanted[2] else None,
    )
