"""The two descriptions everything in normwise shares: what a norm computes, and where it sits.

Both are plain data. A new convention found in a real model family is a new field with
its default first; code that does not know the field refuses what it cannot serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Cast", "Gate", "Kind", "Modulation", "NormSpec", "Scope", "Statistic", "Weight", "Wiring"]


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
