"""LayerNorm and RMSNorm over an axis that is not the last, in compiled code: gradients and plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from normwise.kernels import _ops_channel as _ops_channel
from normwise.kernels import eager
from normwise.kernels._autograd import _apply, _differentiable, _recorded
from normwise.kernels._ops import LIBRARY, ops
from normwise.kernels._plans import RowPlan, row_plan
from normwise.kernels.eager import Moments
from normwise.spec import Form, NormSpec, Scope, Weight

__all__ = ["ChannelPlan", "channel_plan"]


def _channels(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    axis: int,
    code: int,
    eps: float,
    offset: float,
) -> torch.Tensor:
    if _recorded(x, weight, bias):
        return _apply(_NormChannels, x, weight, bias, axis, code, eps, offset)
    return ops.norm_channels.default(x, weight, bias, axis, code, eps, offset)


LIBRARY.impl("channel", _channels, "CompositeImplicitAutograd")


class _NormChannels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        axis: int,
        code: int,
        eps: float,
        offset: float,
    ) -> torch.Tensor:
        y, stats = ops.norm_channels_saving.default(x, weight, bias, axis, code, eps, offset)
        ctx.save_for_backward(x, stats, weight)
        ctx.norm = (axis, code, eps, offset)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, stats, weight = ctx.saved_tensors
        axis, code, eps, offset = ctx.norm
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            rows, upstream = x.movedim(axis, -1), grads[0].movedim(axis, -1)
            dx, *others = _differentiable(upstream, None, rows, weight, x.shape[axis], code, eps, offset, wanted)
            return None if dx is None else dx.movedim(-1, axis).contiguous(), *others, None, None, None, None
        needs = wanted[0] + 2 * wanted[1] + 4 * wanted[2]
        found = ops.norm_channels_backward.default(grads[0], x, stats, weight, axis, code, eps, offset, needs)
        return *(each if needed else None for each, needed in zip(found, wanted, strict=True)), None, None, None, None


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """A norm over one axis that is not the last: what ``row`` says of the last one, on this.

    Args:
        row: the plan of the same norm over the last axis.
        axis: the axis, negative.
    """

    row: RowPlan
    axis: int

    def refusal(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        **operands: Any,
    ) -> str | None:
        """Return why this call is not taken, or None."""
        if x.ndim < -self.axis:
            return "the input has too few axes"
        if operands.get("residual") is not None:
            return "it adds a residual to rows only"
        if x.layout is not torch.strided or x.is_nested:
            return "it reads dense tensors"
        return self.row.refusal(x.movedim(self.axis, -1), weight, bias, mask, **operands)

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        **operands: Any,
    ) -> torch.Tensor:
        """Return the normalized tensor, in the memory format of the input."""
        axis = self.axis
        rows = x.movedim(axis, -1)
        if rows.is_contiguous():
            return self.row.forward(rows, weight, bias, mask).movedim(-1, axis)
        norm = (axis, self.row.code_of(x, weight), self.row.eps_of(x), self.row.spec.weight_offset)
        if torch.compiler.is_compiling():  # one operator in the graph: dynamo need not trace the autograd function
            return ops.channel.default(x, weight, bias, *norm)
        return _channels(x, weight, bias, *norm)

    def forward_and_moments(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        **operands: Any,
    ) -> tuple[torch.Tensor, Moments]:
        """Return the normalized tensor and the moments it used."""
        return self.forward(x, weight, bias, mask), eager.moments(replace(self.row.spec, axes=(self.axis,)), x)


def channel_plan(spec: NormSpec) -> ChannelPlan | str | None:
    """Return the plan for norms over one axis that is not the last; why there is none; or None for other norms."""
    if spec.scope is not Scope.HIDDEN or len(spec.axes) != 1 or spec.axes[0] == -1:
        return None
    if spec.weight is Weight.SCALAR:
        return "a single gain for all channels is not part of this kernel"
    if spec.form is Form.DIVISION:  # who writes it out divides, and is compared to the last bit
        return "a quotient of two rounded numbers over channels is in the eager kernel only"
    # torch has no kernel over such an axis, so the eager kernel too computes what form="torch" asks for in this order
    form = Form.RECIPROCAL if spec.form is Form.TORCH else spec.form
    plan = row_plan(replace(spec, axes=(-1,), form=form))
    return ChannelPlan(plan, spec.axes[0]) if isinstance(plan, RowPlan) else plan
