"""What a ``NormSpec`` means, in plain torch: the definition that kernels, layers and facts are measured against.

Torch is loaded only when something is computed: the descriptions are used where torch is not wanted yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from normwise.spec.description import PROMOTED, Cast, Gate, Modulation, NormSpec, Scope, Statistic, Weight

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = [
    "activation",
    "along",
    "check_operands",
    "eps_of",
    "is_wanted_plain",
    "out_dtype",
    "plain",
    "reference",
    "stats_dtype",
]

_plain = 0  # how many `with plain()` are open


def reference(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    *,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    statistic: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute what ``spec`` says, in plain torch: the definition, made to be read and not to be fast.

    y = (weight' * factor * (x - m) / root(s, eps) + bias) * (1 + scale) + shift, with

    * m: the mean over ``axes`` if ``center``, else 0;
    * s: over the same axes, sum((x - mean)^2) / n (n - 1 unless ``biased``), sum(x^2) / n, sum(x^2), or
      (sum(x^2) + sum(x)^2) / (n + 1) (``completed``); over the first ``partial`` of the axis where asked;
    * root: sqrt(s + eps), sqrt(s) + eps (not ``eps_inside``), or max(sqrt(s), eps) (``eps_clamp``);
    * weight' = ``weight_offset`` + weight, on the input before everything where ``weight_on_input``;
    * a gate act(z) multiplies x (``before``) or the output (``after``).

    ``groups`` splits the leftmost of ``axes``: axis C of a GroupNorm on [N, C, *] (axes -3, -2, -1 for
    images), axis H of a grouped RMSNorm on [..., H] (axis -1). Everything runs in the wider of
    ``stats_dtype`` and the dtype of ``x``, so that a float64 input is judged in float64, and is rounded
    where ``cast`` says and at the end; an ``eps`` of None is the machine epsilon of that dtype, as in
    ``torch.nn.RMSNorm``. Elements where ``mask`` is False take no part: n counts the others, and the
    output there is 0. Axes without any element count as if they held zeros.

    Args:
        spec: what to compute.
        x: the input, in the layout that ``spec.axes`` counts in.
        weight: the gain; along ``axes`` for the hidden scope, along the channels for the others.
        bias: the shift, shaped like the gain.
        mask: bool, broadcastable to ``x``; True marks real elements.
        gate: z, shaped like ``x``, where the spec has a gate.
        scale: the modulation's scale, broadcastable to ``x``.
        shift: the modulation's shift, broadcastable to ``x``.
        mean: m to use instead of the one of ``x``, such as a running mean, broadcastable to ``x``.
        statistic: s to use instead of the one of ``x``, such as a running variance.

    Returns:
        A tensor shaped like ``x``, in the dtype that ``spec.out_dtype`` says.

    Raises:
        ValueError: the spec needs an operand that was not given, or one was given that it does not have.

    Examples:
        >>> import torch
        >>> rms = NormSpec(eps=0.0)
        >>> reference(rms, torch.tensor([3.0, 4.0]), torch.ones(2))
        tensor([0.8485, 1.1314])
    """
    check_operands(spec, weight, bias, gate, scale, shift)
    dtype = stats_dtype(spec, x)
    y = x.to(dtype) if mask is None else x.to(dtype).masked_fill(~mask, 0.0)
    gain = None if weight is None else along(spec, _gain(spec, weight, dtype), x.ndim)
    if gain is not None and spec.weight_on_input:
        y, gain = (gain * y).to(x.dtype).to(dtype), None
    if gate is not None and spec.gate is Gate.BEFORE:
        y = y * activation(spec)(gate.to(dtype))
    y = _normalize(spec, y, mask, mean, statistic)
    if spec.cast is Cast.BEFORE_WEIGHT:
        y = y.to(x.dtype)
    if gain is not None:
        y = gain * y
    if bias is not None:
        y = y + along(spec, bias, x.ndim)
    if scale is not None:
        y = y * (1 + scale)
    if shift is not None:
        y = y + shift
    if gate is not None and spec.gate is Gate.AFTER:
        y = y * activation(spec)(gate.to(dtype))
    y = y if mask is None else y.masked_fill(~mask, 0.0)
    return y if spec.out_dtype == PROMOTED else y.to(out_dtype(spec, x))


def check_operands(
    spec: NormSpec,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
) -> None:
    """Raise ``ValueError`` where the operands are not the ones the spec has."""
    if spec.statistic is Statistic.OTHER:
        raise ValueError("a spec whose statistic is 'other' names no formula to compute; choose one of the others")
    if weight is not None and spec.weight is Weight.NONE:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} was given to a spec with weight='none'; drop it")
    if bias is not None and not spec.bias:
        raise ValueError(f"a bias of shape {tuple(bias.shape)} was given to a spec with bias=False; drop it")
    if (gate is None) != (spec.gate is Gate.NONE):
        given = "no gate" if gate is None else f"a gate of shape {tuple(gate.shape)}"
        step = "pass gate=" if gate is None else "drop it, or change spec.gate"
        raise ValueError(f"{given} was given to a spec with gate='{spec.gate}'; {step}")
    wanted = (spec.modulation is not Modulation.NONE, spec.modulation is Modulation.SCALE_SHIFT)
    if (scale is not None, shift is not None) != wanted:
        given = [name for name, value in (("scale", scale), ("shift", shift)) if value is not None]
        raise ValueError(
            f"a spec with modulation='{spec.modulation}' takes {'scale' * wanted[0]}{' and shift' * wanted[1]}"
            f"{'neither scale nor shift' * (not any(wanted))}, given: {', '.join(given) or 'nothing'}; "
            "pass exactly those, or change spec.modulation"
        )


def stats_dtype(spec: NormSpec, x: torch.Tensor) -> torch.dtype:
    """Return the dtype statistics run in: the wider of ``spec.stats_dtype`` and the dtype of ``x``."""
    import torch

    return torch.promote_types(x.dtype, getattr(torch, spec.stats_dtype)) if spec.stats_dtype else x.dtype


def out_dtype(spec: NormSpec, x: torch.Tensor) -> torch.dtype:
    """Return the dtype of the output, where it is not ``promoted``."""
    import torch

    return getattr(torch, spec.out_dtype) if spec.out_dtype else x.dtype


def eps_of(spec: NormSpec, dtype: torch.dtype) -> float:
    """Return the number added or clamped to; None is the machine epsilon of the statistics' dtype."""
    import torch

    return torch.finfo(dtype).eps if spec.eps is None else spec.eps


def activation(spec: NormSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that a gate passes through."""
    import torch

    return torch.nn.functional.silu if spec.gate_activation == "silu" else torch.sigmoid


def along(spec: NormSpec, parameter: torch.Tensor, ndim: int) -> torch.Tensor:
    """Shape a gain or shift so that it broadcasts along the axes it belongs to."""
    axes = _parameter_axes(spec, ndim)
    trailing = tuple(range(-len(axes), 0))
    if parameter.numel() == 1 or axes == trailing or parameter.ndim != len(axes):
        return parameter
    sizes = dict(zip(axes, parameter.shape, strict=True))
    return parameter.reshape([sizes.get(axis, 1) for axis in range(-ndim, 0)])


def _parameter_axes(spec: NormSpec, ndim: int) -> tuple[int, ...]:
    if spec.groups:
        return (min(spec.axes),)
    if spec.scope in (Scope.HIDDEN, Scope.OTHER):
        return tuple(sorted(spec.axes))
    return (max(axis for axis in range(-ndim, 0) if axis not in spec.axes),)  # the channels: [N, C, *] or [..., C]


def _gain(spec: NormSpec, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if spec.cast is Cast.BEFORE_WEIGHT or spec.offset_in_weight_dtype:
        return spec.weight_offset + weight
    return spec.weight_offset + weight.to(dtype)


def _normalize(
    spec: NormSpec,
    x: torch.Tensor,
    mask: torch.Tensor | None,
    mean: torch.Tensor | None,
    statistic: torch.Tensor | None,
) -> torch.Tensor:
    import torch

    real = torch.ones_like(x) if mask is None else mask.expand(x.shape).to(x.dtype)
    # [..., C, ...] -> [..., G, C / G, ...]; negative axes keep their numbers, the first now counts within a group
    y, real = ((each.unflatten(min(spec.axes), (spec.groups, -1)) if spec.groups else each) for each in (x, real))
    count = real.sum(spec.axes, keepdim=True).clamp_min(1)
    if mean is None:
        mean = y.sum(spec.axes, keepdim=True) / count
    s = _statistic(spec, y, mean, real, count) if statistic is None else statistic.to(x.dtype)
    return ((y - mean if spec.center else y) / _root(spec, s)).reshape(x.shape) * spec.factor


def _statistic(
    spec: NormSpec, x: torch.Tensor, mean: torch.Tensor, real: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    if spec.partial < 1:
        first = int(x.shape[spec.axes[0]] * spec.partial)
        x, real = x.narrow(spec.axes[0], 0, first), real.narrow(spec.axes[0], 0, first)
        count = real.sum(spec.axes, keepdim=True).clamp_min(1)
    if spec.statistic is Statistic.VARIANCE:
        return ((x - mean) * real).square().sum(spec.axes, keepdim=True) / (count if spec.biased else count - 1)
    total = x.square().sum(spec.axes, keepdim=True)
    if spec.statistic is Statistic.COMPLETED:
        return (total + x.sum(spec.axes, keepdim=True).square()) / (count + 1)
    return total if spec.statistic is Statistic.L2 else total / count


def _root(spec: NormSpec, s: torch.Tensor) -> torch.Tensor:
    eps = eps_of(spec, s.dtype)
    if spec.eps_clamp:
        return s.sqrt().clamp_min(eps)
    return (s + eps).sqrt() if spec.eps_inside else s.sqrt() + eps


@contextmanager
def plain() -> Iterator[None]:
    """Have norms computed in plain torch: what traces a model sees operations, not the name of a compiled kernel."""
    global _plain
    _plain += 1
    try:
        yield
    finally:
        _plain -= 1


def is_wanted_plain() -> bool:
    """Return whether a ``with plain()`` is open."""
    return _plain > 0
