"""The short way of an ordinary call: a short row is normalized in a few microseconds, so its checks must take one.

Ordinary is a call of plain tensors on the CPU that the compiled kernel of rows takes and that has no error to
report. Here stands only what the operators cannot see; dtypes, shapes and layouts they look at themselves, where a
look costs nothing (``Code.CHECKED``), and what they do not take they raise for. Whatever is not ordinary is left, with
None, to the checks that can say why. None of this may run while torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import compiler
from torch.autograd import forward_ad

from normwise.kernels import cpu
from normwise.kernels._autograd import recorded_add_norm, recorded_norm
from normwise.kernels._ops import Code, ops
from normwise.kernels._plans import RowPlan
from normwise.spec import Cast, NormSpec, Weight, definition

__all__ = ["Way", "attempt", "short_way"]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_EPS = torch.finfo(torch.float32).eps
_COMPILED = cpu.unavailable() is None
# Looked up once: each of these names takes as long as a look at a tensor.
_transformed, _traced = torch._C._are_functorch_transforms_active, torch._C._is_tracing
_grad, _DOUBLE = torch.is_grad_enabled, torch.float64
# What operators raise: the compiled ones, or torch where there is none for such tensors; those in Python.
_NOT_TAKEN = (RuntimeError, ValueError)
# What the operators' own __call__ calls, after half a microsecond.
_NORM, _ADD_NORM = ops.norm_rows.default._op, ops.add_norm_rows.default._op

_NO_RESIDUAL = object()

Way = Callable[..., Any]
# For the id of a spec, which may be another's later, and a size: the spec and its short way.
_KNOWN: dict[tuple[int, int], tuple[NormSpec, Way]] = {}


def attempt(
    spec: NormSpec,
    size: int,
    x: Any,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: Any = _NO_RESIDUAL,
) -> Any:
    """Return the norm over the last axis, which must have ``size`` elements, or None where a closer look is needed.

    With a residual, return the norm of the sum, and the sum.
    """
    known = _KNOWN.get((id(spec), size))
    if known is None or known[0] is not spec:
        if len(_KNOWN) >= 4096:
            _KNOWN.clear()
        known = _KNOWN[id(spec), size] = spec, short_way(spec, size)
    return known[1](x, weight, bias, residual)


def short_way(spec: NormSpec, size: int) -> Way:
    """Return the function of (x, weight, bias, residual) that ``attempt`` calls, for callers who keep it.

    It is one function with all it needs at hand, for each further call of a function takes its time too.
    """
    plan = cpu.plan_of(spec)
    if not (_COMPILED and type(plan) is RowPlan and plan.axes == 1 and plan.half is None and size > 1):
        return _none
    of_double, with_bias, with_residual = spec.eps is not None, spec.cast is not Cast.BEFORE_WEIGHT, True
    code = plan.code | Code.CHECKED | (Code.ONE_GAIN if spec.weight is Weight.SCALAR else 0)
    numbers = own_numbers = (size, int(code), _EPS if spec.eps is None else spec.eps, spec.weight_offset)
    if spec.cast is Cast.TO_WEIGHT:  # beside a gain in the dtype of x
        own_numbers = (size, int(code | Code.ROUND_BEFORE_WEIGHT), *numbers[2:])
        with_residual = False
    norm, own_norm, added = recorded_norm(*numbers), recorded_norm(*own_numbers), recorded_add_norm(*numbers, False)

    def way(x: Any, weight: torch.Tensor | None, bias: torch.Tensor | None, residual: Any = _NO_RESIDUAL) -> Any:
        if (
            type(x) not in _PLAIN
            or not x.is_cpu
            or (weight is not None and type(weight) not in _PLAIN)
            or (bias is not None and (type(bias) not in _PLAIN or not with_bias))
            or _transformed()
            or definition._plain
            or compiler._is_compiling_flag
            or forward_ad._current_level >= 0
            or _traced()
            or (not of_double and x.dtype is _DOUBLE)
        ):
            return None
        recorded = _grad() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        )
        try:
            if residual is _NO_RESIDUAL:
                if own_numbers is not numbers and weight is not None and weight.dtype is x.dtype:
                    return own_norm(x, weight, bias) if recorded else _NORM(x, weight, bias, *own_numbers)
                return norm(x, weight, bias) if recorded else _NORM(x, weight, bias, *numbers)
            if type(residual) not in _PLAIN or not with_residual:
                return None
            if recorded or (residual.requires_grad and _grad()):
                return added(x, residual, weight, bias)
            y, summed, _ = _ADD_NORM(x, residual, weight, bias, *numbers, False)
            return y, summed
        except _NOT_TAKEN:
            return None

    return way


def _none(*args: Any) -> None:
    """Return None: there is no short way."""
