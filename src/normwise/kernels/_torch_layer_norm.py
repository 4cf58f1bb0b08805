"""torch's own layer_norm kernel, with the gradients it gets wrong put right."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from normwise.kernels._arithmetic import affine, power_of_two
from normwise.spec import Cast, Form, Gate, NormSpec, Scope, Statistic
from normwise.spec.definition import eps_of

__all__ = ["is_changed_before", "is_of_torch", "is_torch_layer_norm", "taken_beside", "torch_layer_norm", "with_value"]


def is_of_torch(spec: NormSpec) -> bool:
    """Return whether one of torch's kernels computes the quotient of ``spec``, and is asked for."""
    return (
        spec.form is Form.TORCH
        and spec.center
        and spec.statistic is Statistic.VARIANCE
        and spec.biased
        and spec.eps_inside
        and not spec.eps_clamp
        and spec.factor == 1.0
        and spec.eps != 0
    )


def is_changed_before(spec: NormSpec) -> bool:
    """Return whether something is multiplied into the input before it is normalized."""
    return spec.gate is Gate.BEFORE or spec.weight_on_input


def is_torch_layer_norm(spec: NormSpec, x: torch.Tensor) -> bool:
    return (
        is_of_torch(spec)
        and spec.scope is Scope.HIDDEN
        and spec.groups is None
        and sorted(spec.axes) == list(range(-len(spec.axes), 0))
        and math.prod([x.shape[axis] for axis in spec.axes]) > 1  # of one element torch returns a gradient for the gain
    )


def torch_layer_norm(
    spec: NormSpec, x: torch.Tensor, h: torch.Tensor, gain: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return what torch's kernel returns, to the bit, with gradients of gain and bias summed in float32."""
    shape, eps = tuple([x.shape[axis] for axis in sorted(spec.axes)]), eps_of(spec, h.dtype)
    fits = (gain is None or gain.shape == shape) and (bias is None or bias.shape == shape)
    inside = spec.cast is not Cast.BEFORE_WEIGHT and fits
    g, b = (gain, bias) if inside else (None, None)
    power = power_of_two(spec, x.dtype, h)
    wide_g, wide_b = (None if each is None else each.to(h.dtype) for each in (g, b))
    y = _layer_norm(h if power is None else h * power, shape, wide_g, wide_b, eps)
    if spec.cast in (Cast.NONE, Cast.BEFORE_WEIGHT) and x.dtype != h.dtype:
        y = y.to(x.dtype)
        if not torch.compiler.is_compiling() and not is_changed_before(spec):
            y = _with_value_of_half_kernel(y, x, shape, g, b, eps, power)
    return y if inside else affine(y, gain, bias)


def _layer_norm(
    h: torch.Tensor, shape: tuple[int, ...], gain: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    no_gradient = not torch.is_grad_enabled() or (gain is None and bias is None)
    if no_gradient or (gain is not None and (torch.compiler.is_compiling() or h.device.type != "cpu")):
        return F.layer_norm(h, shape, gain, bias, eps)
    # On a CPU torch's gradients of gain and shift depend on the number of threads, and anywhere it raises in the
    # second derivative of a shift without a gain: its value, the gradients of a product and of a sum
    y = affine(F.layer_norm(h, shape, None, None, eps), gain, bias)
    own, addend = (None if each is None else each.detach() for each in (gain, bias))
    return with_value(y, F.layer_norm(h.detach(), shape, own, addend, eps))


def _with_value_of_half_kernel(
    y: torch.Tensor,
    x: torch.Tensor,
    shape: tuple[int, ...],
    gain: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    power: torch.Tensor | None,
) -> torch.Tensor:
    """Keep the gradient of ``y`` and take the value of torch's half-precision kernel.

    That kernel sums in another order than its float32 twin, so that one result in some thousands rounds to
    the other side; its backward sums the gradients of gain and bias in half precision, which ends at 256.
    """
    own, addend = taken_beside(x, gain, bias)
    same = with_value(y, F.layer_norm(x.detach(), shape, own, addend, eps))
    return same if power is None else torch.where(power == 1, same, y)


def taken_beside(x: torch.Tensor, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return parameters and statistics, detached, in the one dtype that torch's kernels take beside ``x``."""
    if all(each is None or each.dtype is x.dtype for each in parameters):
        dtype = x.dtype
    else:  # only the CPU kernels take float32 beside a half-precision input
        dtype = torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype
    return [None if each is None else each.detach().to(dtype) for each in parameters]


def with_value(y: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` with the gradient of ``y``."""
    return value + (y - y.detach())
