"""The short way of an ordinary call: a short row is normalized in a few microseconds, so its checks must take one.

Ordinary is a call of plain tensors on the CPU that the compiled kernel of rows takes and that has no error to
report. Whatever else comes is told apart in a look or two and left, with None, to the checks that can say why.
None of this may run while torch.compile traces.
"""

from __future__ import annotations

from typing import Any

import torch

from normwise.kernels import _autograd, cpu
from normwise.kernels._calls import refusal_of_call
from normwise.kernels._ops import ops
from normwise.kernels._plans import HALF, RowPlan
from normwise.spec import Cast, NormSpec, Weight

__all__ = ["attempt", "attempt_added"]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_WIDE = frozenset({torch.float32, torch.float64})
_SCALAR, _TO_WEIGHT = Weight.SCALAR, Cast.TO_WEIGHT  # looking up a member of an enum takes as long as three dtypes
_COMPILED = cpu.unavailable() is None
# What the operators' own __call__ calls, after half a microsecond.
_NORM, _ADD_NORM = ops.norm_rows.default._op, ops.add_norm_rows.default._op
# Function.apply looks for torch.func's transforms at each call, which are refused beforehand.
_RECORDED_NORM = super(torch.autograd.Function, _autograd._NormRows).apply  # type: ignore[misc]
_RECORDED_ADD_NORM = super(torch.autograd.Function, _autograd._AddNormRows).apply  # type: ignore[misc]


def attempt(
    spec: NormSpec, size: int, x: Any, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the norm over the last axis, which must have ``size`` elements, or None where a closer look is needed."""
    plan = cpu.plan_of(spec)
    if type(plan) is not RowPlan or not _takes(plan, size, x, weight, bias):
        return None
    code = plan.code if spec.cast is not _TO_WEIGHT else plan.code_of(x, weight)
    numbers = (size, code, plan.eps_of(x), spec.weight_offset)
    if torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    ):
        return _RECORDED_NORM(x, weight, bias, numbers)
    return _NORM(x, weight, bias, *numbers)


def attempt_added(
    spec: NormSpec,
    size: int,
    x: Any,
    residual: Any,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the norm of x + residual and the sum, both in their dtype, or None where a closer look is needed."""
    plan = cpu.plan_of(spec)
    if (
        type(plan) is not RowPlan
        or type(residual) not in _PLAIN
        or spec.cast is _TO_WEIGHT
        or not _takes(plan, size, x, weight, bias)
        or residual.dtype is not x.dtype
        or residual.shape != x.shape
        or not residual.is_cpu
        or residual.layout is not torch.strided
        or residual.is_nested
    ):
        return None
    numbers = (size, plan.code, plan.eps_of(x), spec.weight_offset)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or residual.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return _RECORDED_ADD_NORM(x, residual, weight, bias, numbers, False)
    y, summed, _ = _ADD_NORM(x, residual, weight, bias, *numbers, False)
    return y, summed


def _takes(plan: RowPlan, size: int, x: Any, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Return whether ``plan.refusal`` has no reason and the functions that call this have no error to raise."""
    if not _COMPILED or plan.axes != 1 or size < 2 or type(x) not in _PLAIN or not x.is_cpu:
        return False
    dtype, shape = x.dtype, x.shape
    half = dtype in HALF
    if (half and plan.half is not None) or not (half or dtype in _WIDE) or not shape or shape[-1] != size:
        return False
    if weight is not None:
        held = weight.dtype
        if (
            type(weight) not in _PLAIN
            or (held is not dtype and (held is not torch.float32 or not half))
            or weight.shape != (() if plan.spec.weight is _SCALAR else (size,))
            or not weight.is_cpu
        ):
            return False
        if bias is not None and (
            type(bias) not in _PLAIN
            or bias.dtype is not held
            or bias.shape != weight.shape
            or not bias.is_cpu
            or plan.with_bias is not None
            or (half and plan.half_with_bias is not None)
        ):
            return False
    elif bias is not None:
        return False
    return refusal_of_call(x) is None
