"""Gated norms for compiled code: RMSNorm(x) * act(z) and RMSNorm(x * act(z)), their gradients and their plan.

Kept for the backward pass are x, z and 1 / root of each group; act(z) is computed again. Second derivatives are
those of plain torch, as in ``_autograd``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from normwise.kernels import eager
from normwise.kernels._autograd import _apply, _recorded
from normwise.kernels._calls import refusal_of_call
from normwise.kernels._ops import LIBRARY, Code, ops
from normwise.kernels._ops_gated import GatedCode
from normwise.kernels._plans import HALF, RowPlan, row_plan
from normwise.kernels.eager import Moments
from normwise.spec import PROMOTED, Gate, NormSpec, Weight

__all__ = ["GatedPlan", "gated_plan", "gated_rows"]

_Tensors = tuple[torch.Tensor | None, ...]
_ROUND_PRODUCT = int(GatedCode.ROUND_PRODUCT)  # an IntFlag takes microseconds to join
_ONLY_RMS = int(Code.LAYER | Code.TORCH_LAYER | Code.EPS_OUTSIDE | Code.EPS_CLAMP)


def gated_rows(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    size: int,
    groups: int,
    code: int,
    eps: float,
    offset: float,
) -> torch.Tensor:
    """Compute ``normwise::gated_rows``, differentiable."""
    if torch.compiler.is_compiling():  # one operator in the graph: dynamo need not trace the autograd function
        return ops.gated.default(x, z, weight, size, groups, code, eps, offset)
    return _gated_rows(x, z, weight, size, groups, code, eps, offset)


def _gated_rows(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    size: int,
    groups: int,
    code: int,
    eps: float,
    offset: float,
) -> torch.Tensor:
    if _recorded(x, z, weight):
        return _apply(_GatedRows, x, z, weight, size, groups, code, eps, offset)
    return ops.gated_rows.default(x, z, weight, size, groups, code, eps, offset)


LIBRARY.impl("gated", _gated_rows, "CompositeImplicitAutograd")


class _GatedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor | None,
        size: int,
        groups: int,
        code: int,
        eps: float,
        offset: float,
    ) -> torch.Tensor:
        y, rstd = ops.gated_rows_saving.default(x, z, weight, size, groups, code, eps, offset)
        ctx.save_for_backward(x, z, rstd, weight)
        ctx.norm = (size, groups, code, eps, offset)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> _Tensors:
        x, z, rstd, weight = ctx.saved_tensors
        size, groups, code, eps, offset = ctx.norm
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            return *_differentiable(grads[0], x, z, weight, size, groups, code, eps, offset, wanted), *(None,) * 5
        dx, dz, dweight = ops.gated_rows_backward.default(
            grads[0], x, z, rstd, weight, size, groups, code, offset, wanted[2]
        )
        dweight = dweight.view(weight.shape) if wanted[2] else None
        return dx if wanted[0] else None, dz if wanted[1] else None, dweight, *(None,) * 5


def _differentiable(
    dy: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    size: int,
    groups: int,
    code: int,
    eps: float,
    offset: float,
    wanted: tuple[bool, ...],
) -> _Tensors:
    """Return the gradients as operations that can be differentiated again; formulas as in csrc/gated.h."""
    sums = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows, gates, upstream = (t.to(sums).reshape(-1, groups, size // groups) for t in (x, z, dy))
    s = gates.sigmoid()
    act = s if code & GatedCode.SIGMOID else gates * s
    slope = s * (1 - s) if code & GatedCode.SIGMOID else s + act * (1 - s)
    h = rows * act if code & GatedCode.GATE_FIRST else rows
    rstd = (h.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    hat = h * rstd
    gain = torch.ones((), dtype=sums) if weight is None else weight.to(sums).reshape(-1) + offset
    gain = gain.reshape(groups, -1) if gain.numel() == size else gain
    d = upstream if code & GatedCode.GATE_FIRST else upstream * act
    g = d * gain
    dh = (g - hat * (g * hat).mean(-1, keepdim=True)) * rstd
    if code & GatedCode.GATE_FIRST:
        dx, dz = dh * act, dh * rows * slope
    else:
        dx, dz = dh, upstream * gain * hat * slope
    dweight = None
    if weight is not None and wanted[2]:
        each = (d * hat).sum(0)
        dweight = (each if weight.numel() == size else each.sum()).reshape(weight.shape).to(weight.dtype)
    dx, dz = (t.reshape(x.shape).to(x.dtype) for t in (dx, dz))
    return dx if wanted[0] else None, dz if wanted[1] else None, dweight


@dataclass(frozen=True, slots=True)
class GatedPlan:
    """A gated RMSNorm over the trailing elements of each row.

    Args:
        spec: what is computed.
        rows: the plan of the same norm without gate and groups, whose refusals hold here too.
        code: what the gate adds to the code of the operators, see ``GatedCode``.
    """

    spec: NormSpec
    rows: RowPlan
    code: int

    def refusal(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        gate: torch.Tensor | None = None,
        **operands: Any,
    ) -> str | None:
        """Return why this call is not taken, or None."""
        for name, operand in (("mask", mask), ("bias", bias), *operands.items()):
            if operand is not None:
                return f"it takes no {name} beside a gate"
        if gate is None:
            return "a gated norm needs its gate"
        if gate.shape != x.shape or gate.dtype is not x.dtype or gate.device != x.device:
            return "the gate must have the shape and dtype of the input, on the same device"
        if hasattr(x, "placements") or hasattr(gate, "placements"):
            return "it has no rule for sharded tensors"
        why = self.rows.refusal(x, weight, bias, mask)
        if why is not None:
            return why
        if self.spec.groups and x.shape[-1] % self.spec.groups:
            return "the groups must divide the row"
        if x.dtype in HALF and self.spec.out_dtype == PROMOTED and self.spec.gate is Gate.AFTER:
            return "an output that stays in float32 is in the eager kernel only"
        return refusal_of_call(gate)

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        gate: torch.Tensor | None = None,
        **operands: Any,
    ) -> torch.Tensor:
        """Return the normalized and gated tensor."""
        assert gate is not None
        code, spec = self.code | self.rows.code_of(x, weight), self.spec
        if weight is not None and weight.dtype is x.dtype and (not spec.weight_offset or spec.offset_in_weight_dtype):
            code |= _ROUND_PRODUCT  # else gain and product are in float32
        size = math.prod(x.shape[x.ndim - self.rows.axes :])
        return gated_rows(x, gate, weight, size, spec.groups or 1, code, self.rows.eps_of(x), spec.weight_offset)

    def forward_and_moments(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        gate: torch.Tensor | None = None,
        **operands: Any,
    ) -> tuple[torch.Tensor, Moments | None]:
        """Return the normalized and gated tensor and the moments, of x * act(z) where the gate comes first."""
        return eager.forward_and_moments(self.spec, x, weight, gate=gate)


def gated_plan(spec: NormSpec) -> GatedPlan | str | None:
    """Return the plan for gated norms of rows; why there is none; or None for norms that are not of these."""
    if spec.gate is Gate.NONE:
        return None
    rows = row_plan(replace(spec, gate=Gate.NONE, groups=None))
    if not isinstance(rows, RowPlan):
        return rows
    if rows.code & _ONLY_RMS:
        return "beside a gate it takes mean squares with eps inside the root"
    if spec.groups and (spec.axes != (-1,) or spec.weight is Weight.SCALAR):
        return "it takes groups of features of the last axis, with a gain for each"
    code = 0
    if spec.gate is Gate.BEFORE:
        code |= GatedCode.GATE_FIRST
    if spec.gate_activation == "sigmoid":
        code |= GatedCode.SIGMOID
    return GatedPlan(spec=spec, rows=rows, code=int(code))
