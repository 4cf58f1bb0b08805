"""The two descriptions everything in normwise shares: what a norm computes, and where it sits.

Both are plain data. A new convention found in a real model family is a new field with
its default first; code that does not know the field refuses what it cannot serve.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "PROMOTED",
    "Cast",
    "Form",
    "Gain",
    "Gate",
    "Kind",
    "Modulation",
    "NormSpec",
    "Scope",
    "Statistic",
    "Weight",
    "Wiring",
]

PROMOTED = "promoted"  # an ``out_dtype``: whatever the last product gave, such as float32 of a float32 gain
_FLOATS = ("float16", "bfloat16", "float32", "float64")


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
    COMPLETED = "completed"  # mean square of a zero-sum vector stored without its last entry, -sum(x): CRMSNorm
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
    TO_WEIGHT = "to_weight"  # T5: to the dtype of a half-precision gain before the product, else not at all
    RECIPROCAL = "reciprocal"  # DeepSeek-V4: x * (1 / root).to(dtype), the product taken in the dtype of the input
    NONE = "none"  # no cast was seen


class Form(StrEnum):
    """How the quotient is written: the same mathematics, other last bits."""

    RECIPROCAL = "reciprocal"  # weight * (c * rsqrt(s + eps)): most hand-written norms
    DIVISION = "division"  # weight * (c / sqrt(s + eps)): DeBERTa, ImageGPT
    FOLDED = "folded"  # c * (weight * rsqrt(s + eps)), the mean folded into the bias: FrozenBatchNorm
    LEFT_TO_RIGHT = "left_to_right"  # (weight * c) * rsqrt(s + eps), or / root: Gradium, Annotated Transformer
    WELFORD = "welford"  # as reciprocal, with the variance of torch.var, not the mean of c^2: PocketTTS, xLSTM
    TORCH = "torch"  # whatever torch's own layer_norm kernel does


class Gate(StrEnum):
    """A gate multiplied into the norm (Mamba-2, Qwen3-Next)."""

    NONE = "none"
    BEFORE = "before"  # N(x * act(z))
    AFTER = "after"  # N(x) * act(z)


class Modulation(StrEnum):
    """Gain and shift computed from data (AdaLN, FiLM)."""

    NONE = "none"
    SCALE = "scale"
    SCALE_SHIFT = "scale_shift"


_WORDS: dict[str, type[StrEnum]] = {
    "scope": Scope,
    "statistic": Statistic,
    "weight": Weight,
    "modulation": Modulation,
    "gate": Gate,
    "form": Form,
    "cast": Cast,
}


def _member(words: type[StrEnum], name: str, word: object) -> StrEnum:
    if word not in list(words):
        raise ValueError(f"no norm is like this: {name}={word!r} is none of {', '.join(words)}")
    return words(word)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """What a norm computes: y = weight' * (x - m) / root(s, eps) + bias.

    ``m`` is the mean over ``axes`` when ``center`` is set, else 0; ``s`` is ``statistic``
    over the same axes; ``weight'`` is ``weight_offset + weight``. ``root`` is
    sqrt(s + eps) with ``eps_inside``, sqrt(s) + eps without, max(sqrt(s), eps) with
    ``eps_clamp``. Axes are negative, in the layout of the norm's input.

    Raises:
        ValueError: fields that contradict each other, or a value no norm can have; the message names the fields.
    """

    scope: Scope = Scope.HIDDEN
    axes: tuple[int, ...] = (-1,)
    center: bool = False
    statistic: Statistic = Statistic.MEAN_SQUARE
    eps: float | None = 1e-6
    eps_inside: bool = True
    eps_clamp: bool = False
    biased: bool = True  # False: the variance divides by n - 1
    partial: float = 1.0  # the statistic is taken over the first int(n * partial) elements of the axis: pRMSNorm
    groups: int | None = None
    factor: float = 1.0  # a constant on the output, such as sqrt(H) of an L2 norm
    weight: Weight = Weight.VECTOR
    weight_offset: float = 0.0
    offset_in_weight_dtype: bool = False  # Nemotron adds 1 in the dtype of the gain, Gemma in that of the statistics
    weight_on_input: bool = False  # y = N(weight' * x): MuseSpark
    bias: bool = False
    modulation: Modulation = Modulation.NONE
    gate: Gate = Gate.NONE
    gate_activation: str = "silu"  # or sigmoid
    form: Form = Form.RECIPROCAL
    stats_dtype: str | None = "float32"  # None: the dtype of the input
    cast: Cast = Cast.NONE
    out_dtype: str | None = None  # None: the dtype of the input
    running: bool = False  # keeps running statistics
    momentum: float | None = None

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            if type(word := getattr(self, name)) is not words:  # a plain string, which compares equal but is another
                object.__setattr__(self, name, _member(words, name, word))
        for contradiction in self._contradictions():
            raise ValueError(f"no norm is like this: {contradiction}")

    def _contradictions(self) -> Iterator[str]:
        axes, eps, groups = self.axes, self.eps, self.groups
        if not axes or max(axes) >= 0:
            yield f"{axes=} must be negative numbers, at least one"
        if len(set(axes)) != len(axes):
            yield f"{axes=} names an axis twice"
        if eps is not None and not 0 <= eps < float("inf"):
            yield f"{eps=} must be a finite number, 0 or more"
        if groups is not None and groups < 1:
            yield f"{groups=} must be 1 or more"
        if groups is not None and self.scope in (Scope.BATCH, Scope.INSTANCE):
            yield f"{groups=} splits channels, but scope='{self.scope}'; use scope='group'"
        if not self.biased and self.statistic is not Statistic.VARIANCE:
            yield f"biased=False is about a variance, but statistic='{self.statistic}'"
        if self.partial != 1 and (not 0 < self.partial < 1 or len(axes) > 1 or self.center):
            yield f"partial={self.partial} is a fraction in (0, 1] of one axis; given {axes=}, center={self.center}"
        if self.statistic is Statistic.COMPLETED and (self.center or len(axes) > 1):
            yield f"statistic='completed' is for one axis, not centred; given {axes=}, center={self.center}"
        if self.weight is Weight.NONE and (self.cast is Cast.TO_WEIGHT or self.weight_on_input):
            yield f"cast='{self.cast}', weight_on_input={self.weight_on_input} need a gain, but weight='none'"
        if self.momentum is not None and not self.running:
            yield f"momentum={self.momentum} moves running statistics, but running=False"
        if self.gate_activation not in ("silu", "sigmoid"):
            yield f"gate_activation={self.gate_activation!r} is neither 'silu' nor 'sigmoid'"
        if self.stats_dtype not in (None, *_FLOATS) or self.out_dtype not in (None, PROMOTED, *_FLOATS):
            yield f"stats_dtype={self.stats_dtype!r}, out_dtype={self.out_dtype!r} are not among None and {_FLOATS}"

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
class Gain:
    """A learned factor on a skip or a branch.

    Args:
        initial: its first value.
        vector: one number for each feature, else one number.
        shared: one parameter for all sublayers of a layer.
    """

    initial: float = 1.0
    vector: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """How one sublayer's norms sit on the residual stream.

    x' = after_add( skip_scale * x + branch_scale * after_branch( F( input_scale * before(x) ) ) ), where before,
    after_branch and after_add say whether a norm stands there, and skip_gain and branch_gain are learned factors
    beside the constants.

    Args:
        before: a norm before the sublayer.
        after_branch: a norm on what the sublayer returns.
        after_add: a norm after the add.
        inner: a norm inside the sublayer, before its last matrix.
        input_scale: constant on what enters the sublayer.
        skip_scale: constant on the stream.
        branch_scale: constant on the branch.
        skip_gain: learned factor on the stream.
        branch_gain: learned factor on the branch.
        parallel: the sublayers of a layer read the same stream and are added together.
        shares_norm: in parallel, they read one norm.
        adds_block_input: what entered the layer is added once more.
        qkv: of which of q, k and v heads are normalized, whatever the option for query and key says.
        head_gains: each attention head has a learned factor.
    """

    before: bool = False
    after_branch: bool = False
    after_add: bool = False
    inner: bool = False
    input_scale: float = 1.0
    skip_scale: float = 1.0
    branch_scale: float = 1.0
    skip_gain: Gain | None = None
    branch_gain: Gain | None = None
    parallel: bool = False
    shares_norm: bool = False
    adds_block_input: bool = False
    qkv: str = ""
    head_gains: bool = False
