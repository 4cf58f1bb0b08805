"""Gradients of the compiled operators: thin autograd functions, and the second derivative in plain torch.

What is kept for the backward pass is the input (or the summed residual) and its statistics in float32; the gain is
a reference. When the backward pass is itself recorded (``create_graph=True``), it runs as differentiable torch
operations on what was kept, so that derivatives of any order are right; the usual backward pass pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from normwise.kernels._ops import LIBRARY, Code, ops

__all__ = ["add_norm_rows", "norm_rows", "recorded_add_norm", "recorded_norm"]

_Tensors = tuple[torch.Tensor | None, ...]
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
        return _kept(recorded_norm, size, code, eps, offset)(x, weight, bias)
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
        return _kept(recorded_add_norm, size, code, eps, offset, wide)(x, residual, weight, bias)
    y, summed, _ = ops.add_norm_rows.default(x, residual, weight, bias, size, code, eps, offset, wide)
    return y, summed


LIBRARY.impl("norm", _norm_rows, "CompositeImplicitAutograd")
LIBRARY.impl("add_norm", _add_norm_rows, "CompositeImplicitAutograd")


def _apply(function: Any, *args: Any) -> Any:
    return _apply_of(function)(*args)


def _apply_of(function: Any) -> Callable[..., Any]:
    # Function.apply itself looks for torch.func's transforms at each call, which the kernels refuse beforehand
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def _kept(made: Any, size: int, *numbers: Any) -> Callable[..., Any]:
    return (made if type(size) is int else made.__wrapped__)(size, *numbers)  # a traced size has no hash


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Function.apply`` of a function of autograd.

    There is one for each norm, with its numbers at hand: as arguments they would be looked at, and kept, at each call.
    """
    made: Any = type(name, (torch.autograd.Function,), {"forward": forward, "backward": backward})
    made._backward_cls.apply = backward  # what BackwardCFunction.apply calls, after half a microsecond
    return _apply_of(made)


@lru_cache(maxsize=4096)
def recorded_norm(size: int, code: int, eps: float, offset: float) -> Callable[..., Any]:
    """Return the function of (x, weight, bias) that autograd records."""

    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        y, stats = _SAVING(x, weight, bias, size, code, eps, offset)
        ctx.save_for_backward(x, stats, weight)
        return y

    def backward(ctx: Any, dy: torch.Tensor) -> _Tensors:
        x, stats, weight = ctx.saved_tensors
        ofx, ofweight, ofbias = wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return _differentiable(dy, None, x, weight, size, code, eps, offset, wanted)
        needs = ofx + 2 * ofweight + 4 * ofbias
        found = _BACKWARD(dy, None, x, stats, weight, size, code, eps, offset, needs)
        return found if weight is None or weight.ndim == 1 else _like_the_weight(found, weight)

    return _function("NormRows", forward, backward)


@lru_cache(maxsize=4096)
def recorded_add_norm(size: int, code: int, eps: float, offset: float, wide: bool) -> Callable[..., Any]:
    """Return the function of (x, residual, weight, bias) that autograd records."""

    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, summed, stats = _ADDING(x, residual, weight, bias, size, code, eps, offset, wide)
        ctx.save_for_backward(summed, stats, weight)
        ctx.dtypes = (x.dtype, residual.dtype)
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[:2]):  # as in plain torch: the sum does not depend on the gain
            ctx.mark_non_differentiable(summed)
        return y, summed

    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> _Tensors:
        summed, stats, weight = ctx.saved_tensors
        ofx, ofresidual, *parameters = ctx.needs_input_grad
        wanted = (ofx or ofresidual, *parameters)
        if dy is None:
            total, dweight, dbias = dsum, None, None
        elif torch.is_grad_enabled():
            total, dweight, dbias = _differentiable(dy, dsum, summed, weight, size, code, eps, offset, wanted)
        else:
            needs = wanted[0] + 2 * wanted[1] + 4 * wanted[2]
            found = _BACKWARD(dy, dsum, summed, stats, weight, size, code, eps, offset, needs)
            total, dweight, dbias = _like_the_weight(found, weight)
        mine, streams = ctx.dtypes
        return _to(total, mine), _to(total, streams), dweight, dbias

    return _function("AddNormRows", forward, backward)


def _like_the_weight(found: _Tensors, weight: torch.Tensor | None) -> _Tensors:
    if weight is None or weight.ndim == 1:  # a view would take as long as the rest of a short backward pass
        return found
    dx, *parameters = found
    return dx, *(each if each is None else each.view(weight.shape) for each in parameters)


def _to(gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return gradient if gradient is None or gradient.dtype is dtype else gradient.to(dtype)


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
    """Return the gradients as operations that can be differentiated again; formulas as in csrc/rows_back.h."""
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
