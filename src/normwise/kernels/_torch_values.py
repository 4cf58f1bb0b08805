"""The values of torch's own group_norm and batch_norm kernels, for specs that ask for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from normwise.kernels._arithmetic import power_of_two
from normwise.kernels._torch_layer_norm import is_changed_before, is_of_torch, taken_beside, with_value
from normwise.spec import NormSpec, Scope, Weight
from normwise.spec.definition import eps_of, stats_dtype

__all__ = ["with_torch_values"]


def with_torch_values(
    spec: NormSpec,
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    given: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return ``y`` with its gradient and the value of torch's kernel, where that computes this spec.

    torch adds up in another order; sets of elements whose squares overflow there keep the value of ``y``.
    ``given`` is a mean and a variance.
    """
    if torch.compiler.is_compiling() or not _is_torch_norm(spec, x, given):
        return y
    operands = taken_beside(x, weight, bias, *(given or (None, None)))
    flat = [None if each is None else each.reshape(-1) for each in operands]
    same = with_value(y, _value(spec, x.detach(), *flat))
    safe = None if given is not None else _safe(spec, x)
    return same if safe is None else torch.where(safe, same, y)


def _is_torch_norm(spec: NormSpec, x: torch.Tensor, given: tuple[torch.Tensor, torch.Tensor] | None) -> bool:
    usual = (
        is_of_torch(spec)
        and not is_changed_before(spec)
        and spec.weight is not Weight.SCALAR
        and spec.weight_offset == 0.0
        and x.numel() > 0
    )
    rest = set(range(-x.ndim, 0)) - set(spec.axes)
    if spec.scope is Scope.GROUP:
        return usual and given is None and spec.groups is not None and rest == {-x.ndim}
    if spec.scope is Scope.INSTANCE:
        one = x.shape[:2].numel() == x.numel()  # torch refuses sets of a single element
        return usual and given is None and rest == {-x.ndim, 1 - x.ndim} and not one
    return (
        usual and spec.scope is Scope.BATCH and len(rest) == 1 and (given is not None or x.numel() > x.shape[max(rest)])
    )


def _value(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
) -> torch.Tensor:
    eps = eps_of(spec, stats_dtype(spec, x))
    if spec.scope is Scope.GROUP:
        return F.group_norm(x, spec.groups or 1, weight, bias, eps)
    if spec.scope is Scope.INSTANCE:
        return F.instance_norm(x, weight=weight, bias=bias, eps=eps)
    channels = next(axis for axis in range(-x.ndim, 0) if axis not in spec.axes)
    y = F.batch_norm(x.movedim(channels, 1), mean, variance, weight, bias, mean is None, 0.0, eps)
    return y.movedim(1, channels)


def _safe(spec: NormSpec, x: torch.Tensor) -> torch.Tensor | None:
    first = min(spec.axes)
    h = x.unflatten(first, (spec.groups, -1)) if spec.groups else x
    power = power_of_two(spec, x.dtype, h.float() if x.dtype is torch.float16 else h)
    if power is None:
        return None
    safe = power == 1
    return safe.expand(h.shape).flatten(first - 1, first) if spec.groups else safe
