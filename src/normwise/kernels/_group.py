"""GroupNorm and InstanceNorm in compiled code: gradients, and which specs and calls are taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from normwise.kernels import _ops_group as _ops_group
from normwise.kernels._autograd import _apply, _recorded
from normwise.kernels._calls import refusal_of_call
from normwise.kernels._ops import LIBRARY, Code, ops
from normwise.kernels._plans import HALF
from normwise.kernels.eager import Moments
from normwise.spec import Cast, Form, Gate, Modulation, NormSpec, Scope, Statistic, Weight
from normwise.spec.definition import eps_of

__all__ = ["GroupPlan", "group_plan"]

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def _groups(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    code: int,
    eps: float,
    offset: float,
    variance: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if _recorded(x, weight, bias):
        return _apply(_NormGroups, x, weight, bias, groups, code, eps, offset, variance)
    return ops.norm_groups_saving.default(x, weight, bias, groups, code, eps, offset, variance)


LIBRARY.impl("group", _groups, "CompositeImplicitAutograd")


class _NormGroups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        groups: int,
        code: int,
        eps: float,
        offset: float,
        variance: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, stats = ops.norm_groups_saving.default(x, weight, bias, groups, code, eps, offset, variance)
        ctx.save_for_backward(x, stats[:3], weight)  # a recomputed pass may not ask for the variance
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.norm = (groups, code, eps, offset)
        ctx.bias = None if bias is None else bias.dtype
        return y, stats

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        dy, wanted = grads[0], ctx.needs_input_grad[:3]
        if dy is None:
            return (None,) * 8
        x, stats, weight = ctx.saved_tensors
        groups, code, eps, offset = ctx.norm
        if torch.is_grad_enabled():
            dx, dweight, dbias = _differentiable(dy, x, weight, groups, eps, offset)
        else:
            needs = wanted[0] + 2 * wanted[1] + 4 * wanted[2]
            dx, dweight, dbias = ops.norm_groups_backward.default(dy, x, stats, weight, groups, code, offset, needs)
        return (
            dx if wanted[0] else None,
            dweight if wanted[1] else None,
            dbias.to(ctx.bias) if wanted[2] else None,
            *(None,) * 5,
        )


def _differentiable(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, groups: int, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the gradients as operations that can be differentiated again; formulas as in csrc/group.h."""
    sums = torch.float64 if x.dtype is torch.float64 else torch.float32
    samples, channels = x.shape[:2]
    shape = (samples, groups, channels // groups, math.prod(x.shape[2:]))
    h, upstream = x.to(sums).reshape(shape), dy.to(sums).reshape(shape)
    c = h - h.mean((2, 3), keepdim=True)
    root = (c.pow(2).mean((2, 3), keepdim=True) + eps).sqrt()
    hat = c / root
    gain = None if weight is None else (weight.to(sums) + offset).reshape(1, groups, -1, 1)
    g = upstream if gain is None else upstream * gain
    dx = (g - hat * (g * hat).mean((2, 3), keepdim=True) - g.mean((2, 3), keepdim=True)) / root
    dweight = None if weight is None else (upstream * hat).sum((0, 3)).reshape(channels).to(weight.dtype)
    return dx.reshape(x.shape).to(x.dtype), dweight, upstream.sum((0, 3)).reshape(channels)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A norm over groups of channels and all positions of a sample of [N, C, *].

    Args:
        spec: what is computed.
        code: the same for the operators, see ``Code``.
        axes: how many axes the input must have.
    """

    spec: NormSpec
    code: int
    axes: int

    def refusal(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        **operands: Any,
    ) -> str | None:
        """Return why this call is not taken, or None."""
        if mask is not None:
            return "padding is left out of a group or an instance by the eager kernel only"
        for name, operand in operands.items():
            if operand is not None:
                return f"it takes no {name} for a norm of groups"
        return self._refusal_of_tensors(x, weight, bias) or refusal_of_call(x)

    def _refusal_of_tensors(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> str | None:
        dtype = x.dtype
        if dtype not in _DTYPES:
            return f"it computes float16, bfloat16, float32 and float64, not {str(dtype).removeprefix('torch.')}"
        if x.ndim != self.axes:
            return f"it normalizes all positions of [N, C, *] with {self.axes} axes"
        channels = x.shape[1]
        if channels == 0 or channels % (self.spec.groups or 1):
            return "the channels do not make the groups"
        for name, parameter in (("weight", weight), ("bias", bias)):
            if parameter is None:
                continue
            held = parameter.dtype
            if held is not dtype and (held is not torch.float32 or dtype not in HALF):
                return f"it takes a {name} in the input's dtype or float32"
            if parameter.shape != (channels,):
                return f"the {name} must hold one number a channel"
            if parameter.device != x.device:
                return f"the {name} is on another device"
        if weight is not None and bias is not None and weight.dtype is not bias.dtype:
            return "it takes gain and shift in one dtype"
        return None

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        **operands: Any,
    ) -> torch.Tensor:
        """Return the normalized tensor."""
        norm = self._norm(x)
        if torch.compiler.is_compiling():  # one operator in the graph: dynamo need not trace the autograd function
            return ops.group.default(x, weight, bias, *norm, False)[0]
        if _recorded(x, weight, bias):
            return _apply(_NormGroups, x, weight, bias, *norm, False)[0]
        return ops.norm_groups.default(x, weight, bias, *norm)

    def forward_and_moments(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        **operands: Any,
    ) -> tuple[torch.Tensor, Moments]:
        """Return the normalized tensor and the moments it used, without their gradient."""
        norm = self._norm(x)
        compute = ops.group.default if torch.compiler.is_compiling() else _groups
        y, stats = compute(x, weight, bias, *norm, True)
        own = (1,) if self.spec.groups else ()  # the axis of channels within a group
        shape = (x.shape[0], norm[0], *own, *(1,) * (x.ndim - 2))
        elements = x.shape[2:].numel() * (x.shape[1] // norm[0])
        return y, Moments((stats[0] + stats[1]).reshape(shape), stats[3].reshape(shape), elements)

    def _norm(self, x: torch.Tensor) -> tuple[int, int, float, float]:
        spec, sums = self.spec, torch.float64 if x.dtype is torch.float64 else torch.float32
        return spec.groups or x.shape[1], self.code, eps_of(spec, sums), spec.weight_offset


def group_plan(spec: NormSpec) -> GroupPlan | str | None:
    """Return the plan for norms of groups and instances; why there is none; or None for other norms."""
    instance = spec.scope is Scope.INSTANCE
    if not instance and spec.scope is not Scope.GROUP:
        return None
    reason = _reason(spec)
    if reason is not None:
        return reason
    code = Code.OFFSET_IN_WEIGHT_DTYPE if spec.offset_in_weight_dtype and spec.weight_offset else 0
    return GroupPlan(spec, int(code), len(spec.axes) + (2 if instance else 1))


def _reason(spec: NormSpec) -> str | None:
    """Return why no tensor is taken, or None."""
    if sorted(spec.axes) != list(range(-len(spec.axes), 0)):
        return "groups and instances must reach over all trailing axes"
    if spec.scope is Scope.GROUP and spec.groups is None:
        return "a norm of groups needs their number"
    if not spec.center or spec.statistic is not Statistic.VARIANCE or not spec.biased or spec.partial != 1:
        return "it takes the biased variance of centred groups"
    if spec.gate is not Gate.NONE or spec.modulation is not Modulation.NONE or spec.weight_on_input:
        return "gates, modulations and weights on the input are not part of this kernel"
    if spec.factor != 1 or spec.weight is Weight.SCALAR:
        return "a factor on the output and a single gain for all channels are not part of this kernel"
    if spec.form not in (Form.RECIPROCAL, Form.DIVISION):
        return f"the order of operations of form='{spec.form}' is in the eager kernel only"
    if not spec.eps_inside or spec.eps_clamp or spec.eps == 0:
        return "it adds an eps above 0 to the variance"
    if spec.stats_dtype != "float32" or spec.out_dtype is not None or spec.cast not in (Cast.NONE, Cast.AFTER_WEIGHT):
        return "it sums in float32 (float64 for float64) and rounds once, to the dtype of the input"
    return None
