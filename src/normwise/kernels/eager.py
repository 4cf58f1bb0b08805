"""The eager kernel: every spec in plain torch, and what the other kernels must return.

Forward, the operations are those of the models the convention comes from, in their order, so that results
agree with theirs bit for bit. Three things differ from what people write by hand:

* products and sums run in float32 (float64 for float64) and are rounded where the convention rounds, so the
  gradients of gain and bias are accumulated in float32 too;
* rows too large for their squares (|x| >= 2^41 in float32) are scaled by an exact power of two first; every other
  row is multiplied by 1, which changes no bit;
* autocast is switched off inside: the output dtype is what the spec says, whatever the context.

Everything is differentiable torch, so double backward, forward-mode AD, vmap, compile and export need no
rule of their own.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from normwise.kernels._arithmetic import (
    affine,
    count_real,
    masked,
    masked_mean,
    no_autocast,
    power_of_two,
    product,
    sqrt,
    total,
)
from normwise.kernels._torch_layer_norm import is_torch_layer_norm, torch_layer_norm
from normwise.kernels._torch_values import with_torch_values
from normwise.spec import PROMOTED, Cast, Form, Gate, NormSpec, Scope, Statistic
from normwise.spec.definition import activation, along, eps_of, out_dtype, stats_dtype

__all__ = ["RANK", "Moments", "forward", "forward_added", "forward_and_moments", "moments", "refusal", "unavailable"]

RANK = 0

_HALF = (torch.float16, torch.bfloat16)
_GAIN_WITHIN = (Form.FOLDED, Form.LEFT_TO_RIGHT)  # gain and bias are part of the quotient


class Moments(NamedTuple):
    """What a norm measures, each broadcastable to its input (or its grouped view)."""

    mean: torch.Tensor | None
    statistic: torch.Tensor
    elements: torch.Tensor | int  # real elements behind each statistic


def unavailable() -> str | None:
    """Return None: plain torch is everywhere."""
    return None


def refusal(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    **operands: Any,
) -> str | None:
    """Return None: plain torch takes every call."""
    return None


def forward(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    *,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    given: Moments | None = None,
) -> torch.Tensor:
    """Compute what ``spec`` says; arguments as in ``normwise.spec.reference``.

    Args:
        spec: what to compute.
        x: the input, in the layout that ``spec.axes`` counts in.
        weight: the gain.
        bias: the shift.
        mask: bool, broadcastable to ``x``; where it is False nothing counts and the output is 0.
        gate: z of a gated norm.
        scale: scale of a modulated norm.
        shift: shift of a modulated norm.
        given: statistics to use instead of those of ``x``, such as running ones.
    """
    return forward_and_moments(spec, x, weight, bias, mask, gate=gate, scale=scale, shift=shift, given=given)[0]


def forward_and_moments(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    *,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    given: Moments | None = None,
) -> tuple[torch.Tensor, Moments | None]:
    """Return what ``forward`` returns, and the moments it used: None where torch's kernel kept them to itself."""
    with no_autocast(x):
        h, dtype = _widened(spec, x, mask), stats_dtype(spec, x)
        # at padding these may hold NaN too, which the backward pass would multiply by 0
        gate, scale, shift = (None if each is None else masked(each, mask) for each in (gate, scale, shift))
        gain = None if weight is None else along(spec, _gain(spec, weight, dtype), x.ndim)
        addend = None if bias is None else along(spec, bias, x.ndim)
        found = None
        if gain is not None and spec.weight_on_input:
            h, gain = product(gain, h).to(x.dtype).to(dtype), None
        if gate is not None and spec.gate is Gate.BEFORE:
            h = h * activation(spec)(gate.to(dtype))
        if given is None and mask is None and is_torch_layer_norm(spec, x):
            y = torch_layer_norm(spec, x, h, gain, addend)
        else:
            y, found = _normalize(spec, x, h, mask, given, gain, addend)
            if spec.form not in _GAIN_WITHIN:
                y = affine(_cast(spec, y, x, weight), gain, addend)
            if mask is None and spec.form is Form.TORCH:
                told = None if given is None or given.mean is None else (given.mean, given.statistic)
                y = with_torch_values(spec, x, _returned(spec, x, y), weight, bias, told)
        y = _modulate(spec, y, dtype, scale, shift)
        if gate is not None and spec.gate is Gate.AFTER:
            y = y.to(dtype) * activation(spec)(gate.to(dtype))
        return _returned(spec, x, masked(y, mask)), found


def forward_added(
    spec: NormSpec,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x + residual in the dtype of x, and the sum, in float32 or wider if ``wide``."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    dtype = torch.promote_types(dtype, torch.float32) if wide else dtype
    summed = x.to(dtype) + residual.to(dtype)
    return forward(spec, summed, weight, bias).to(x.dtype), summed


def moments(spec: NormSpec, x: torch.Tensor, mask: torch.Tensor | None = None) -> Moments:
    """Return mean, statistic and number of elements of a batch, in the dtype of statistics.

    Where statistics are not taken over a single row (batch, group, instance), the mean is corrected by the mean
    of what is left after subtracting it, so that an offset of 1e4 standard deviations costs no more digits than
    storing ``x`` did.
    """
    with no_autocast(x):
        h, mask = _grouped(spec, _widened(spec, x, mask), mask)
        power = power_of_two(spec, x.dtype, h)
        return _unscaled(_measure(spec, h if power is None else h * power, mask)[1], power)


def _widened(spec: NormSpec, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return masked(x.to(stats_dtype(spec, x)), mask)  # before anything else: padding may hold NaN


def _unscaled(found: Moments, power: torch.Tensor | None) -> Moments:
    if power is None:
        return found
    mean = None if found.mean is None else found.mean / power
    return Moments(mean, found.statistic / power / power, found.elements)


# -- numerator and root -------------------------------------------------------------------------


def _normalize(
    spec: NormSpec,
    x: torch.Tensor,
    h: torch.Tensor,
    mask: torch.Tensor | None,
    given: Moments | None,
    gain: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, Moments]:
    """Return factor * (h - m) / root, with gain and bias already in it if folded, and the moments."""
    h, mask = _grouped(spec, h, mask)
    power = power_of_two(spec, x.dtype, h) if given is None else None
    if given is None:
        h = h if power is None else h * power
        centered, found = _measure(spec, h, mask)
    else:
        found = given
        centered = h if found.mean is None or not spec.center else h - found.mean
    if spec.form in _GAIN_WITHIN:
        gain, bias = _split(spec, gain), _split(spec, bias)
    if spec.form is Form.FOLDED:
        y = _folded(spec, h, found, gain, bias)
    elif spec.form is Form.LEFT_TO_RIGHT:
        y = _quotient(spec, x, centered if gain is None else product(gain, centered), found.statistic)
        y = y if bias is None else total(y, bias)
    else:
        y = _quotient(spec, x, centered, found.statistic)
    y = y.flatten(min(spec.axes) - 1, min(spec.axes)) if spec.groups else y
    return y, _unscaled(found, power)


def _quotient(spec: NormSpec, x: torch.Tensor, numerator: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    if spec.cast is Cast.RECIPROCAL:
        y = product(numerator.to(x.dtype), _reciprocal(spec, s).to(x.dtype))
    elif spec.eps_inside and not spec.eps_clamp and spec.form is not Form.DIVISION:
        y = product(numerator, _reciprocal(spec, s))
    else:
        y = numerator / _root(spec, s)
    return y if spec.factor == 1.0 else y * spec.factor


def _folded(
    spec: NormSpec,
    h: torch.Tensor,
    found: Moments,
    gain: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return h * (gain / root) + (bias - mean * gain / root): FrozenBatchNorm, PocketTTS."""
    scale = _reciprocal(spec, found.statistic) * spec.factor
    if gain is not None:
        scale = product(gain, scale)
    y = product(h, scale)
    if found.mean is None or not spec.center:
        return y if bias is None else y + bias
    return y + ((0.0 if bias is None else bias) - found.mean * scale)


def _split(spec: NormSpec, parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Return the view of a gain or bias that goes with the grouped view of the input."""
    if parameter is None or not spec.groups or parameter.numel() == 1:
        return parameter
    return parameter.unflatten(min(spec.axes), (spec.groups, -1))


def _grouped(spec: NormSpec, h: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the view [..., G, C / G, ...] of [..., C, ...], and the mask in that view."""
    if mask is not None:
        mask = mask.reshape((1,) * (h.ndim - mask.ndim) + mask.shape)
    if not spec.groups:
        return h, mask
    axis = min(spec.axes)
    if mask is not None:
        mask = mask.unsqueeze(axis) if mask.shape[axis] == 1 else mask.unflatten(axis, (spec.groups, -1))
    return h.unflatten(axis, (spec.groups, -1)), mask


def _measure(spec: NormSpec, h: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, Moments]:
    """Return the numerator h - m (or h) and the moments of ``h``, already masked and grouped."""
    axes = spec.axes
    count = math.prod([h.shape[axis] for axis in axes]) if mask is None else count_real(mask, h, axes)
    if spec.statistic in (Statistic.MEAN_SQUARE, Statistic.L2, Statistic.COMPLETED) and not spec.center:
        return h, Moments(None, _second_moment(spec, h, mask, count), count)
    mean = masked_mean(h, axes, count, mask)
    centered = masked(h - mean, mask)
    if spec.scope is not Scope.HIDDEN and spec.stats_dtype is not None:  # the rounding of the mean, taken back
        rest = masked_mean(centered, axes, count, mask)
        mean, centered = mean + rest, masked(centered - rest, mask)
    if spec.statistic is not Statistic.VARIANCE:
        s = _second_moment(spec, h, mask, count)
    elif mask is None and count > 1 and h.numel() > 0 and (not spec.biased or spec.form is Form.WELFORD):
        s = h.var(axes, correction=0 if spec.biased else 1, keepdim=True)
    elif spec.biased:
        s = masked_mean(centered.pow(2), axes, count, mask)
    else:  # one element has no spread to divide by: its variance is 0, as in the biased form
        others = 1 if isinstance(count, int) else (count - 1).clamp_min(1)
        s = centered.pow(2).sum(axes, keepdim=True) / others
    return (centered if spec.center else h), Moments(mean, s, count)


def _second_moment(
    spec: NormSpec, h: torch.Tensor, mask: torch.Tensor | None, count: torch.Tensor | int
) -> torch.Tensor:
    if spec.partial < 1:
        axis = spec.axes[0]
        h = h.narrow(axis, 0, int(h.shape[axis] * spec.partial))
        if mask is not None:
            mask = mask if mask.shape[axis] == 1 else mask.narrow(axis, 0, h.shape[axis])
            count = count_real(mask, h, spec.axes)
    if spec.statistic is Statistic.L2:
        return h.pow(2).sum(spec.axes, keepdim=True)
    if spec.statistic is Statistic.COMPLETED:
        return (h.pow(2).sum(spec.axes, keepdim=True) + h.sum(spec.axes, keepdim=True).pow(2)) / (count + 1)
    return masked_mean(h.pow(2), spec.axes, count, mask)


def _root(spec: NormSpec, s: torch.Tensor) -> torch.Tensor:
    eps = eps_of(spec, s.dtype)
    if eps == 0:
        return _one_for_zero(s).sqrt()
    if spec.eps_clamp:
        return sqrt(s).clamp_min(eps)
    return (s + eps).sqrt() if spec.eps_inside else sqrt(s) + eps


def _reciprocal(spec: NormSpec, s: torch.Tensor) -> torch.Tensor:
    eps = eps_of(spec, s.dtype)
    if not spec.eps_inside or spec.eps_clamp:
        return 1.0 / _root(spec, s)
    return torch.rsqrt(s + eps if eps > 0 else _one_for_zero(s))


def _one_for_zero(s: torch.Tensor) -> torch.Tensor:
    """Return 1 for a statistic of 0, when no eps guards it: a row of zeros stays zeros instead of 0 / 0."""
    return torch.where(s > 0, s, 1.0)


# -- gain, bias and roundings -------------------------------------------------------------------


def _gain(spec: NormSpec, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not spec.weight_offset:
        return weight
    return weight + spec.weight_offset if spec.offset_in_weight_dtype else weight.to(dtype) + spec.weight_offset


def _modulate(
    spec: NormSpec, y: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None, shift: torch.Tensor | None
) -> torch.Tensor:
    """Return y * (1 + scale) + shift: rounded at each step if the norm returns to the input's dtype first."""
    if spec.cast is Cast.BEFORE_WEIGHT:
        return affine(y, None if scale is None else 1 + scale, shift)
    if scale is not None:
        y = y.to(dtype) * (1 + scale.to(dtype))
    return y if shift is None else y + shift.to(dtype)


def _returned(spec: NormSpec, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y = y if spec.out_dtype == PROMOTED else y.to(out_dtype(spec, x))
    # rows in order, as torch's norms and the compiled kernels return them: a view of them must not fail here alone
    in_order = spec.scope is Scope.HIDDEN and spec.axes == tuple(range(-len(spec.axes), 0))
    return y.contiguous() if in_order else y


def _cast(spec: NormSpec, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    if spec.cast is Cast.BEFORE_WEIGHT:
        return y.to(x.dtype)
    if spec.cast is Cast.TO_WEIGHT and weight is not None and weight.dtype in _HALF:
        return y.to(weight.dtype)
    return y
