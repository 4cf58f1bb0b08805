"""Arithmetic of the eager kernel: products rounded as torch rounds, masked means, safe ranges and roots."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch

from normwise.spec import NormSpec
from normwise.spec.definition import eps_of

__all__ = ["affine", "count_real", "masked", "masked_mean", "no_autocast", "power_of_two", "product", "sqrt", "total"]

# A row whose largest element is below 2^_LARGE has squares that can be summed 2^40 times and more, and a cube of
# 1 / root (in the backward of rsqrt) that does not vanish; larger rows are brought to it by a power of two. eps
# stays what it is: beside a row of that size it is below rounding, even where only the last bits differ.
_LARGE = {torch.float16: 4, torch.bfloat16: 40, torch.float32: 40, torch.float64: 320}
_SMALLEST = {torch.float16: -24, torch.bfloat16: -133, torch.float32: -149, torch.float64: -1074}


def _wide(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    result = torch.promote_types(a.dtype, b.dtype)
    return result, torch.promote_types(result, torch.float32)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a * b with torch's rounding, but so that gradients are summed in float32 or wider."""
    result, wide = _wide(a, b)
    return (a.to(wide) * b.to(wide)).to(result)


def total(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result, wide = _wide(a, b)
    return (a.to(wide) + b.to(wide)).to(result)


def affine(y: torch.Tensor, gain: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if gain is not None:
        if gain.numel() == 1 and y.ndim:  # torch adds up to a single number in an order that depends on threads
            gain = gain.reshape(1).expand(y.shape[-1])
        y = product(gain, y)
    return y if bias is None else total(y, bias)


def sqrt(s: torch.Tensor) -> torch.Tensor:
    """Return the root with derivative 0 at 0, where sqrt has infinity: constant rows keep finite gradients."""
    positive = s > 0
    return torch.where(positive, torch.where(positive, s, 1.0).sqrt(), 0.0)


def masked(value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    # where, not masked_fill: the latter makes channels_last contiguous when the mask repeats
    return value if mask is None else torch.where(mask, value, 0.0)


def masked_mean(
    value: torch.Tensor, axes: tuple[int, ...], count: torch.Tensor | int, mask: torch.Tensor | None
) -> torch.Tensor:
    return (
        value.mean(axes, keepdim=True)
        if mask is None
        else value.sum(axes, keepdim=True) / torch.as_tensor(count).clamp_min(1)
    )


def count_real(mask: torch.Tensor, h: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Return how many elements behind each statistic are real; ``mask`` has as many axes as ``h``."""
    varying = [axis for axis in axes if mask.shape[axis] != 1]
    real = mask.to(h.dtype)
    if varying:
        real = real.sum(varying, keepdim=True)
    repeated = math.prod([h.shape[axis] for axis in axes if axis not in varying])
    return real * repeated


def power_of_two(spec: NormSpec, given: torch.dtype, h: torch.Tensor) -> torch.Tensor | None:
    """Return the power of two that brings each set of elements into a range where squares can be summed.

    It is exactly 1 for every ordinary row, so it changes nothing there. None where nothing can overflow:
    float16 widened to float32, or no element at all. With eps = 0 rows of tiny numbers are scaled up too.
    """
    if h.numel() == 0 or (given is torch.float16 and h.dtype is not given and not spec.weight_on_input):
        return None
    part = h.detach()
    if spec.partial < 1:
        part = part.narrow(spec.axes[0], 0, int(h.shape[spec.axes[0]] * spec.partial))
    peak = torch.linalg.vector_norm(part, math.inf, spec.axes, keepdim=True)
    large, exponent = _LARGE[h.dtype], peak.log2().floor()
    if eps_of(spec, h.dtype) > 0:
        return torch.exp2(large - exponent.clamp_min(large))
    exponent = exponent.clamp_min(_SMALLEST[h.dtype])  # zeros: -inf
    return torch.exp2(exponent.clamp(-large, large) - exponent)


def no_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
