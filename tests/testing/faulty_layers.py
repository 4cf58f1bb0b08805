"""Norm layers with one fault each, as they have been shipped: the suite has to see every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from normwise.spec import Cast, NormSpec, Statistic

__all__ = ["FAULTS", "LAYER", "RMS", "Hand", "right", "rms"]

RMS = NormSpec(cast=Cast.AFTER_WEIGHT)
LAYER = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True, cast=Cast.AFTER_WEIGHT)


class Hand(nn.Module):
    """A layer with gain and shift that calls a function."""

    def __init__(self, size: int, function: Callable[..., Any], *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.function = function

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        return self.function(x, *more, self.weight, *([] if self.bias is None else [self.bias]))


def right(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    return (weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def eps_outside(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    return (weight * (h / (h.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6))).to(x.dtype)


def one_pass(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = h.mean(-1, keepdim=True)
    variance = (h * h).mean(-1, keepdim=True) - mean * mean
    return (weight * ((h - mean) * torch.rsqrt(variance.clamp_min(0) + 1e-5)) + bias).to(x.dtype)


def half_statistics(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def by_the_batch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return right(x * (1.0 + 1e-7 * x.shape[0]), weight)


def first_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The last rows of a batch that is no multiple of four are never written: faster-norm."""
    y, whole = torch.empty_like(x), x.shape[0] // 4 * 4
    return torch.cat([right(x[:whole], weight), y[whole:]])


class _InPlace(torch.autograd.Function):
    """Writes the gradient of the input into the one of the output: Liger's default."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return right(x, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dx, dw = _gradients(ctx.saved_tensors, upstream[0])
        return upstream[0].copy_(dx), dw


class _Detached(torch.autograd.Function):
    """Drops the second derivative without a word."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return right(x, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _gradients([each.detach() for each in ctx.saved_tensors], upstream[0].detach())


class _HalfSums(torch.autograd.Function):
    """Adds up the gradient of the gain row by row, in its dtype: torch's LayerNorm on CPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return right(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        terms = upstream[0] * right(x, torch.ones_like(weight))
        blocks = terms.flatten(0, -2)
        total = torch.zeros_like(weight)
        for block in blocks.split(64):
            total += block.to(torch.float32).sum(0).to(weight.dtype)
        return _gradients((x, weight), upstream[0])[0], total


def _gradients(saved: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        x, weight = (each.detach().requires_grad_() for each in saved)
        dx, dw = torch.autograd.grad(right(x, weight), [x, weight], upstream)
    return dx, dw


def drops_the_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the sum does not reach the residual: torchnorm."""
    summed = x + residual.detach()
    return right(summed, weight), summed


def rms(function: Callable[..., Any]) -> Callable[[int], nn.Module]:
    return lambda size: Hand(size, function)


# fault: factory, spec, what conformance() is told, and a part of the name of a check that has to fail
FAULTS: dict[str, tuple[Callable[[int], nn.Module], NormSpec, dict[str, bool], str]] = {
    "backward writes into the upstream gradient": (
        rms(_InPlace.apply),
        RMS,
        {},
        "upstream gradient is left alone",
    ),
    "residual gradient dropped": (rms(drops_the_residual), RMS, {"residual": True}, "added residual"),
    "eps outside the root": (rms(eps_outside), RMS, {}, "size and place of eps"),
    "unit offset forgotten": (rms(right), replace(RMS, weight_offset=1.0), {}, "the definition in float32"),
    "one pass": (lambda size: Hand(size, one_pass, bias=True), LAYER, {}, "offset of 1000"),
    "statistics in half precision": (rms(half_statistics), RMS, {}, "large finite rows in float16"),
    "gain's gradient in half precision": (rms(_HalfSums.apply), RMS, {}, "16,384 rows in bfloat16"),
    "second derivative dropped": (rms(_Detached.apply), RMS, {}, "second derivative"),
    "depends on the batch": (rms(by_the_batch), RMS, {}, "batch invariance in float32"),
    "rows never written": (rms(first_rows), RMS, {}, "every number is written"),
    "returns float32": (rms(lambda x, w: right(x.float(), w.float())), RMS, {}, "dtype of the output"),
}
