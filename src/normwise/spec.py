"""The two descriptions everything in normwise shares: what a norm computes, and where it sits.

Both are plain data. A new convention found in a real model family is a new field with
its default first; code that does not know the field refuses what it cannot serve.
``reference()`` is the definition of a spec in plain torch: kernels, layers and facts are
measured against it. Torch is loaded only when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Cast", "Gate", "Kind", "Modulation", "NormSpec", "Scope", "Statistic", "Weight", "Wiring", "reference"]


class Scope(StrEnum):
    """Over which elements one statistic is taken, in the layout of the norm's input."""

    HIDDEN = "hidden"  # the trailing axes of one position: LayerNorm, RMSNorm
    BATCH = "batch"  # every axis but the channels: BatchNorm
    INSTANCE = "instance"  # the spatial axes of one sample and channel: InstanceNorm
    GROUP = "group"  # a group of channels and the spatial axes of one sample: GroupNorm
    OTHER = "other"  # any other set of axes, spelled out in ``axes``


class Statistic(StrEnum):
    """The second moment that divides."""

    VARIANCE = "variance"
    MEAN_SQUARE = "mean_square"
    L2 = "l2"  # the root of the sum of squares
    OTHER = "other"


class Kind(StrEnum):
    """The field's short name of a norm, derived from its other properties."""

    LAYER = "layer"
    RMS = "rms"
    BATCH = "batch"
    GROUP = "group"
    INSTANCE = "instance"
    SCALE = "scale"
    OTHER = "other"


class Weight(StrEnum):
    """The shape of the learned gain."""

    NONE = "none"
    VECTOR = "vector"
    SCALAR = "scalar"


class Cast(StrEnum):
    """Where the normalized value returns to the dtype of the input, relative to the gain."""

    BEFORE_WEIGHT = "before_weight"  # Llama: weight * xhat.to(dtype)
    AFTER_WEIGHT = "after_weight"  # Gemma, OLMo-2: (weight * xhat).to(dtype)
    NONE = "none"  # no cast was seen


class Gate(StrEnum):
    """A gate multiplied into the norm (Mamba-2, Qwen3-Next)."""

    NONE = "none"
    BEFORE = "before"  # N(x * silu(z))
    AFTER = "after"  # N(x) * silu(z)


class Modulation(StrEnum):
    """Gain and shift computed from data (AdaLN, FiLM)."""

    NONE = "none"
    SCALE = "scale"
    SCALE_SHIFT = "scale_shift"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """What a norm computes: y = weight' * (x - m) / root(s, eps) + bias.

    ``m`` is the mean over ``axes`` when ``center`` is set, else 0; ``s`` is ``statistic``
    over the same axes; ``weight'`` is ``weight_offset + weight``. ``root`` is
    sqrt(s + eps) with ``eps_inside``, sqrt(s) + eps without, max(sqrt(s), eps) with
    ``eps_clamp``. Axes are negative, in the layout of the norm's input.
    """

    scope: Scope = Scope.HIDDEN
    axes: tuple[int, ...] = (-1,)
    center: bool = False
    statistic: Statistic = Statistic.MEAN_SQUARE
    eps: float | None = 1e-6
    eps_inside: bool = True
    eps_clamp: bool = False
    biased: bool = True  # False: the variance divides by n - 1
    groups: int | None = None
    factor: float = 1.0  # a constant on the output, such as sqrt(H) of an L2 norm
    weight: Weight = Weight.VECTOR
    weight_offset: float = 0.0
    bias: bool = False
    modulation: Modulation = Modulation.NONE
    gate: Gate = Gate.NONE
    stats_dtype: str | None = "float32"  # None: the dtype of the input
    cast: Cast = Cast.NONE
    out_dtype: str | None = None  # None: the dtype of the input
    running: bool = False  # keeps running statistics
    momentum: float | None = None

    @property
    def kind(self) -> Kind:
        """Return the short name that reports and the JSON schema use."""
        if self.statistic is Statistic.OTHER:
            return Kind.OTHER
        by_scope = {Scope.BATCH: Kind.BATCH, Scope.GROUP: Kind.GROUP, Scope.INSTANCE: Kind.INSTANCE}
        if self.scope in by_scope:
            return by_scope[self.scope]
        if self.statistic is Statistic.L2:
            return Kind.SCALE
        # a variance without centring, or the reverse, is neither of the two
        if self.center != (self.statistic is Statistic.VARIANCE):
            return Kind.OTHER
        return Kind.LAYER if self.center else Kind.RMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """How one sublayer's norms sit on the residual stream.

    x' = after_add( skip_scale * x + branch_scale * after_branch( F( before(x) ) ) ), where each
    of the three names says whether a norm stands there.
    """

    before: bool = False
    after_branch: bool = False
    after_add: bool = False
    skip_scale: float = 1.0
    branch_scale: float = 1.0


def reference(
    spec: NormSpec, x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute what ``spec`` says, in plain torch: the definition, made to be read and not to be fast.

    y = weight' * factor * (x - m) / root(s, eps) + bias, with

    * m: the mean over ``axes`` if ``center``, else 0;
    * s: over the same axes, sum((x - mean)^2) / n (n - 1 unless ``biased``), sum(x^2) / n, or sum(x^2);
    * root: sqrt(s + eps), sqrt(s) + eps (not ``eps_inside``), or max(sqrt(s), eps) (``eps_clamp``);
    * weight' = ``weight_offset`` + weight.

    ``groups`` splits the leftmost of ``axes``: axis C of a GroupNorm on [N, C, *] (axes -3, -2, -1 for
    images), axis H of a grouped RMSNorm on [..., H] (axis -1). Statistics are taken in the wider of
    ``stats_dtype`` and the dtype of ``x``, so that a float64 input is judged in float64; an ``eps`` of None
    is the machine epsilon of that dtype, as in ``torch.nn.RMSNorm``. Running statistics are not used: a
    batch norm is the one of training.

    Args:
        spec: what to compute.
        x: the input, in the layout that ``spec.axes`` counts in.
        weight: the gain; along ``axes`` for the hidden scope, along the channels for the others.
        bias: the shift, shaped like the gain.

    Returns:
        A tensor shaped like ``x``, in ``spec.out_dtype`` or the dtype of ``x``.

    Raises:
        ValueError: the spec needs data that is not an argument here (a gate, a modulation, another
            statistic), or a gain or shift was given that the spec does not have.

    Examples:
        >>> import torch
        >>> rms = NormSpec(eps=0.0)
        >>> reference(rms, torch.tensor([3.0, 4.0]), torch.ones(2))
        tensor([0.8485, 1.1314])
    """
    _check_arguments(spec, weight, bias)
    y = _normalize(spec, x.to(_stats_dtype(spec, x)))
    if spec.cast is Cast.BEFORE_WEIGHT:
        y = y.to(x.dtype)
    if weight is not None:
        gain = weight if spec.cast is Cast.BEFORE_WEIGHT else weight.to(y.dtype)
        y = _along(spec, spec.weight_offset + gain, x.ndim) * y
    if bias is not None:
        y = y + _along(spec, bias, x.ndim)
    return y.to(_dtype(spec.out_dtype) if spec.out_dtype else x.dtype)


def _normalize(spec: NormSpec, x: torch.Tensor) -> torch.Tensor:
    # [..., C, ...] -> [..., G, C / G, ...]; negative axes keep their numbers, the first now counts within a group
    y = x.unflatten(min(spec.axes), (spec.groups, -1)) if spec.groups else x
    mean = y.mean(spec.axes, keepdim=True)
    root = _root(spec, _statistic(spec, y, mean))
    return ((y - mean if spec.center else y) / root).reshape(x.shape) * spec.factor


def _check_arguments(spec: NormSpec, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    if spec.gate is not Gate.NONE or spec.modulation is not Modulation.NONE:
        raise ValueError(f"reference() takes no gate and no modulation, the spec has {spec.gate=}, {spec.modulation=}")
    if spec.statistic is Statistic.OTHER:
        raise ValueError("reference() defines variance, mean_square and l2; the spec's statistic is 'other'")
    if weight is not None and spec.weight is Weight.NONE:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} was given to a spec that has none")
    if bias is not None and not spec.bias:
        raise ValueError(f"a bias of shape {tuple(bias.shape)} was given to a spec that has none")


def _dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, name)


def _stats_dtype(spec: NormSpec, x: torch.Tensor) -> torch.dtype:
    import torch

    return torch.promote_types(x.dtype, _dtype(spec.stats_dtype)) if spec.stats_dtype else x.dtype


def _statistic(spec: NormSpec, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    if spec.statistic is Statistic.L2:
        return x.square().sum(spec.axes, keepdim=True)
    if spec.statistic is Statistic.MEAN_SQUARE:
        return x.square().mean(spec.axes, keepdim=True)
    count = x.numel() // mean.numel()
    return (x - mean).square().sum(spec.axes, keepdim=True) / (count if spec.biased else count - 1)


def _root(spec: NormSpec, s: torch.Tensor) -> torch.Tensor:
    import torch

    eps = torch.finfo(s.dtype).eps if spec.eps is None else spec.eps
    if spec.eps_clamp:
        return s.sqrt().clamp_min(eps)
    return (s + eps).sqrt() if spec.eps_inside else s.sqrt() + eps


def _along(spec: NormSpec, parameter: torch.Tensor, ndim: int) -> torch.Tensor:
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
