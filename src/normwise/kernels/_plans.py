"""Norms of rows for compiled code: a spec as a few numbers, or the reason why compiled code does not take it.

A plan holds what does not depend on the tensors; its ``refusal`` looks at the rest. Both name the reason in words
that can be shown: eager then serves the call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from normwise.kernels import _autograd, eager
from normwise.kernels._calls import refusal_of_call
from normwise.kernels._ops import Code
from normwise.kernels._torch_layer_norm import is_of_torch
from normwise.kernels.eager import Moments
from normwise.spec import PROMOTED, Cast, Form, Gate, Modulation, NormSpec, Scope, Statistic, Weight

__all__ = ["HALF", "Plan", "RowPlan", "row_plan"]

_EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
HALF = frozenset({torch.float16, torch.bfloat16})
_ROUND = int(Code.ROUND_BEFORE_WEIGHT)  # an IntFlag takes microseconds to join


class Plan(Protocol):
    """How compiled code serves the calls of one spec."""

    def refusal(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        **operands: Any,
    ) -> str | None:
        """Return why this call is not taken, or None."""
        ...

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        **operands: Any,
    ) -> torch.Tensor:
        """Return the normalized tensor."""
        ...

    def forward_and_moments(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        **operands: Any,
    ) -> tuple[torch.Tensor, Moments | None]:
        """Return the normalized tensor and the moments it used."""
        ...


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A norm over the trailing elements of each row.

    Args:
        spec: what is computed.
        code: the same for the operators, see ``Code``.
        axes: how many trailing axes make a row.
        half: why half-precision inputs are refused, if they are.
        half_with_bias: why half-precision inputs with a shift are refused, if they are.
        with_bias: why a shift is refused, if it is.
    """

    spec: NormSpec
    code: int
    axes: int
    half: str | None
    half_with_bias: str | None
    with_bias: str | None

    def refusal(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        **operands: Any,
    ) -> str | None:
        """Return why this call is not taken, or None."""
        if mask is not None or operands:
            why = self._refusal_of_operands(x, mask, **operands)
            if why is not None:
                return why
        return self._refusal_of_tensors(x, weight, bias) or refusal_of_call(x)

    def _refusal_of_operands(
        self, x: torch.Tensor, mask: torch.Tensor | None, residual: torch.Tensor | None = None, **operands: Any
    ) -> str | None:
        for name, operand in (("mask", mask), *operands.items()):
            if operand is not None:
                return f"it takes no {name} for a norm of rows"
        if residual is None:
            return None
        if residual.shape != x.shape or residual.device != x.device:
            return "the residual must have the shape of the input, on the same device"
        if residual.dtype is not x.dtype and (residual.dtype is not torch.float32 or x.dtype is torch.float64):
            return "it takes a residual in the input's dtype or float32"
        if self.spec.cast is Cast.TO_WEIGHT:
            return "a sum in float32 beside a half-precision weight is rounded in the eager kernel only"
        return refusal_of_call(residual)

    def _refusal_of_tensors(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> str | None:
        dtype = x.dtype
        if dtype not in _DTYPES:
            return f"it computes float16, bfloat16, float32 and float64, not {_short(dtype)}"
        if x.ndim < self.axes:
            return "the input has too few axes"
        half = dtype in HALF
        if half and self.half is not None:
            return self.half
        shape = x.shape[x.ndim - self.axes :]
        if self.code & 3 == Code.TORCH_LAYER and shape.numel() < 2:
            return "of a row of one element torch's layer_norm returns what eager corrects"
        if shape.numel() == 0:
            return "rows without an element have no statistic"
        if weight is not None:
            held = weight.dtype
            if held is not dtype and (held is not torch.float32 or not half):
                return f"it takes a weight in the input's dtype or float32, not {_short(held)} beside {_short(dtype)}"
            if weight.numel() != 1 if self.spec.weight is Weight.SCALAR else weight.shape != shape:
                return "the weight must have the shape of a row"
            if weight.device != x.device:
                return "the weight is on another device"
        if bias is not None:
            if weight is None or bias.dtype is not weight.dtype or bias.shape != shape or weight.shape != shape:
                return "it takes a shift beside a gain of the same shape and dtype"
            if bias.device != x.device:
                return "the bias is on another device"
            why = self.half_with_bias if half and self.half_with_bias is not None else self.with_bias
            if why is not None:
                return why
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
        code, eps = self.code_of(x, weight), self.eps_of(x)
        return _autograd.norm_rows(x, weight, bias, self._size(x), code, eps, self.spec.weight_offset)

    def forward_added(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        wide: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual in the dtype of x, and the sum."""
        eps, offset = self.eps_of(x), self.spec.weight_offset
        return _autograd.add_norm_rows(x, residual, weight, bias, self._size(x), self.code, eps, offset, wide)

    def forward_and_moments(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        **operands: Any,
    ) -> tuple[torch.Tensor, Moments]:
        """Return the normalized tensor and the moments it used."""
        return self.forward(x, weight, bias, mask), eager.moments(self.spec, x)

    def _size(self, x: torch.Tensor) -> int:
        return x.shape[-1] if self.axes == 1 else math.prod(x.shape[x.ndim - self.axes :])

    def code_of(self, x: torch.Tensor, weight: torch.Tensor | None) -> int:
        """Return the code for these dtypes: T5 does not round beside a float32 weight."""
        if self.spec.cast is Cast.TO_WEIGHT and weight is not None and weight.dtype is x.dtype:
            return self.code | _ROUND
        return self.code

    def eps_of(self, x: torch.Tensor) -> float:
        """Return eps as a number."""
        eps = self.spec.eps
        return eps if eps is not None else _EPS[torch.float64 if x.dtype is torch.float64 else torch.float32]


def row_plan(spec: NormSpec) -> RowPlan | str | None:
    """Return the plan for norms of rows; why there is none; or None for norms that are not of rows."""
    if spec.scope is not Scope.HIDDEN or sorted(spec.axes) != list(range(-len(spec.axes), 0)):
        return None
    reason = _reason(spec)
    if reason is not None:
        return reason
    code = 0
    torchs = spec.form is Form.TORCH
    if torchs:
        code |= Code.TORCH_LAYER
    elif spec.statistic is Statistic.VARIANCE:
        code |= Code.LAYER
    elif spec.statistic is Statistic.L2:
        code |= Code.L2
    if spec.eps_clamp:
        code |= Code.EPS_CLAMP | Code.DIVIDE
    elif not spec.eps_inside:
        code |= Code.EPS_OUTSIDE | Code.DIVIDE
    if spec.cast is Cast.BEFORE_WEIGHT:
        code |= Code.ROUND_BEFORE_WEIGHT
    if spec.out_dtype == PROMOTED:
        code |= Code.PROMOTE
    if spec.offset_in_weight_dtype and spec.weight_offset:
        code |= Code.OFFSET_IN_WEIGHT_DTYPE
    twice = spec.cast is Cast.BEFORE_WEIGHT
    return RowPlan(
        spec=spec,
        code=int(code),
        axes=len(spec.axes),
        half=_reason_of_half(spec),
        half_with_bias="half precision is rounded between gain and shift" if twice else None,
        with_bias="torch's layer_norm is followed by a gain and a shift of its own" if twice and torchs else None,
    )


def _reason(spec: NormSpec) -> str | None:
    """Return why no tensor is taken, or None."""
    if spec.groups is not None:
        return "it takes groups of features only beside a gate"
    if spec.partial != 1 or spec.statistic is Statistic.COMPLETED:
        return "statistics of a part of a row, or of a completed one, are in the eager kernel only"
    if spec.statistic is Statistic.OTHER or spec.center != (spec.statistic is Statistic.VARIANCE) or not spec.biased:
        return "it takes mean squares, sums of squares and the biased variance of centred rows"
    if spec.gate is not Gate.NONE or spec.modulation is not Modulation.NONE or spec.weight_on_input:
        return "gates, modulations and weights on the input are not part of this kernel"
    if spec.factor != 1:
        return "a factor on the output is not part of this kernel"
    if spec.form is Form.DIVISION:  # torch takes roots from MKL, which rounds one in five the other way
        return "the last bit of a quotient by torch's square root is in the eager kernel only"
    if spec.form in (Form.FOLDED, Form.LEFT_TO_RIGHT, Form.WELFORD):
        return f"the order of operations of form='{spec.form}' is in the eager kernel only"
    if spec.form is Form.TORCH and not is_of_torch(spec):
        return "torch's layer_norm computes no such norm"
    if spec.eps == 0:
        return "with eps = 0 rows of zeros and of tiny numbers need the eager kernel"
    if spec.stats_dtype not in (None, "float32") or spec.out_dtype not in (None, PROMOTED):
        return "it sums in float32 (float64 for float64) and returns the dtype of the input, or the promoted one"
    return None


def _reason_of_half(spec: NormSpec) -> str | None:
    """Return why half-precision inputs are not taken, or None."""
    if spec.stats_dtype is None:
        return "statistics in half precision are in the eager kernel only"
    if spec.cast is Cast.RECIPROCAL:
        return "a reciprocal in half precision is in the eager kernel only"
    if spec.cast is Cast.AFTER_WEIGHT and spec.form is Form.TORCH:
        return "torch's float32 layer_norm of a half-precision input is in the eager kernel only"
    if spec.out_dtype == PROMOTED and spec.cast not in (Cast.BEFORE_WEIGHT, Cast.TO_WEIGHT):
        return "an output that stays in float32 is in the eager kernel only"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
