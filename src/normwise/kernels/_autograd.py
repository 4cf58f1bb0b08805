"""Gradients of the compiled operators: thin autograd functions, and the second derivative in plain torch.

What is kept for the backward pass is the input (or the summed residual) and its statistics in float32; the gain is
a reference. When the backward pass is itself recorded (``create_graph=True``), it runs as differentiable torch
operations on what was kept, so that derivatives of any order are right; the usual backward pass pays nothing for it.
"""

from __future__ import annotations

from typing import Any

import torch

from normwise.kernels._ops import LIBRARY, Code, ops

__all__ = ["add_norm_rows", "norm_rows"]

_Tensors = tuple[torch.Tensor | None, ...]
_Numbers = tuple[int, int, float, float]  # size, code, eps, offset: as one argument, for each takes its time
# What the operators' own __call__ calls, after half a microsecond.
_SAVING, _ADDING = ops.norm_rows_saving.default._op, ops.add_norm_rows.default._op
_BACKWARD = ops.norm_rows_backward.default._op


def _recorded(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd wants to know about an operation on these tensors."""
    if not torch.is_grad_enabled():
        return False
    return any(each is not None and each.requires_grad for each in tensors)


def norm_rows(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
) -> torch.Tensor:
    """Compute ``normwise::norm_rows``, differentiable."""
    if torch.compiler.is_compiling():  # one operator in the graph: dynamo need not trace the autograd function
        return ops.norm.default(x, weight, bias, size, code, eps, offset)
    return _norm_rows(x, weight, bias, size, code, eps, offset)


def _norm_rows(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
) -> torch.Tensor:
    if _recorded(x, weight, bias):
        return _apply(_NormRows, x, weight, bias, (size, code, eps, offset))
    return ops.norm_rows.default(x, weight, bias, size, code, eps, offset)


def add_norm_rows(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``normwise::add_norm_rows`` without its statistics, differentiable."""
    if torch.compiler.is_compiling():
        return ops.add_norm.default(x, residual, weight, bias, size, code, eps, offset, wide)
    return _add_norm_rows(x, residual, weight, bias, size, code, eps, offset, wide)


def _add_norm_rows(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if _recorded(x, residual, weight, bias):
        return _apply(_AddNormRows, x, residual, weight, bias, (size, code, eps, offset), wide)
    y, summed, _ = ops.add_norm_rows.default(x, residual, weight, bias, size, code, eps, offset, wide)
    return y, summed


LIBRARY.impl("norm", _norm_rows, "CompositeImplicitAutograd")
LIBRARY.impl("add_norm", _add_norm_rows, "CompositeImplicitAutograd")


def _apply(function: Any, *args: Any) -> Any:
    # Function.apply itself looks for torch.func's transforms at each call, which the kernels refuse beforehand
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


class _NormRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm: _Numbers,
    ) -> torch.Tensor:
        y, stats = _SAVING(x, weight, bias, *norm)
        ctx.save_for_backward(x, stats, weight)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> _Tensors:
        x, stats, weight = ctx.saved_tensors
        dx, dweight, dbias = _gradients(ctx, grads[0], None, x, stats, weight, ctx.needs_input_grad[:3])
        return dx, dweight, dbias, None


class _AddNormRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm: _Numbers,
        wide: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, summed, stats = _ADDING(x, residual, weight, bias, *norm, wide)
        ctx.save_for_backward(summed, stats, weight)
        ctx.norm = norm
        ctx.dtypes = (x.dtype, residual.dtype)
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[:2]):  # as in plain torch: the sum does not depend on the gain
            ctx.mark_non_differentiable(summed)
        return y, summed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> _Tensors:
        dy, dsum = grads
        summed, stats, weight = ctx.saved_tensors
        if dy is None:
            total, dweight, dbias = dsum, None, None
        else:
            needs = ctx.needs_input_grad
            wanted = (needs[0] or needs[1], *needs[2:4])
            total, dweight, dbias = _gradients(ctx, dy, dsum, summed, stats, weight, wanted)
        mine, streams = ctx.dtypes
        return _to(total, mine), _to(total, streams), dweight, dbias, None, None


def _to(gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return gradient if gradient is None or gradient.dtype is dtype else gradient.to(dtype)


def _gradients(
    ctx: Any,
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    stats: torch.Tensor,
    weight: torch.Tensor | None,
    wanted: tuple[bool, ...],
) -> _Tensors:
    size, code, eps, offset = ctx.norm
    if torch.is_grad_enabled():
        return _differentiable(dy, dsum, x, weight, size, code, eps, offset, wanted)
    needs = wanted[0] + 2 * wanted[1] + 4 * wanted[2]
    dx, dweight, dbias = _BACKWARD(dy, dsum, x, stats, weight, size, code, eps, offset, needs)
    if weight is not None and weight.ndim != 1:  # a view of one axis would take as long as all of this function
        dweight = dweight.view(weight.shape) if wanted[1] else dweight
        dbias = dbias.view(weight.shape) if wanted[2] else dbias
    return dx if wanted[0] else None, dweight if wanted[1] else None, dbias if wanted[2] else None


def _differentiable(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
    wanted: tuple[bool, ...],
) -> _Tensors:
    """Return the gradients as operations that can be differentiated again; formulas as in csrc/rows.h."""
    sums = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows, upstream = x.reshape(-1, size).to(sums), dy.reshape(-1, size).to(sums)
    kind = Code.kind(code)
    centred = kind in (Code.LAYER, Code.TORCH_LAYER)
    c = rows - rows.mean(-1, keepdim=True) if centred else rows
    s = c.pow(2).sum(-1, keepdim=True)
    s, count = (s, 1) if kind == Code.L2 else (s / size, size)
    if code & (Code.EPS_OUTSIDE | Code.EPS_CLAMP):
        length = torch.where(s > 0, torch.where(s > 0, s, 1.0).sqrt(), 0.0)
        root = length.clamp_min(eps) if code & Code.EPS_CLAMP else length + eps
        # d root / d s times 2 root: root / sqrt(s) where the root grows with s, 0 where it does not
        grows = (length > eps) if code & Code.EPS_CLAMP else (length > 0)
        share = torch.where(grows, root / torch.where(grows, length, 1.0), 0.0)
    else:
        root, share = (s + eps).sqrt(), 1.0
    hat = c / root
    gain = None if weight is None else (weight.to(sums) + offset).reshape(-1)
    g = upstream if gain is None else upstream * gain
    dx = g - hat * (g * hat).sum(-1, keepdim=True) * (share / count)
    dx = (dx - g.mean(-1, keepdim=True) if centred else dx) / root
    dx = dx.reshape(x.shape) if dsum is None else dx.reshape(x.shape) + dsum.to(sums)
    dweight = dbias = None
    if weight is not None and wanted[1]:
        each = (upstream * hat).sum(0)
        dweight = (each if weight.numel() == size else each.sum()).reshape(weight.shape).to(weight.dtype)
    if weight is not None and wanted[2]:
        dbias = upstream.sum(0).reshape(weight.shape).to(weight.dtype)
    return dx.to(x.dtype) if wanted[0] else None, dweight, dbias
