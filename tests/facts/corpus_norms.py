"""Hand-written and native norms with what each computes, and near misses that are no norms.

Every case lives in a small host (projection, norm, projection) so that the norm's input is an
activation. Most are one function under ``@norm(...)``: its expected fields are those of
``NormSpec`` (plus ``kind``), its docstring says where the form is met. ``closed_form`` computes
the same fields in float64, so that the expectations themselves are tested by running.

B=2, T=7, H=24 for tokens; [N=2, C=12, 9, 8] for images; 4 heads of 6 for heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, TIME, HIDDEN, WIDTH_IN, WIDTH_OUT = 2, 7, 24, 10, 5
HEADS, HEAD_SIZE = 4, 6
CHANNELS, HEIGHT, WIDTH = 12, 9, 8
SIZES = {"tokens": HIDDEN, "heads": HEAD_SIZE, "image": CHANNELS, "conditioned": HIDDEN, "gated": HIDDEN}


class OneOf(tuple[Any, ...]):
    """Several equally right values of one field."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NormCase:
    """One implementation in its host and what a map of it must say."""

    name: str
    build: Callable[[], nn.Module]
    layout: str = "tokens"
    expected: Mapping[str, Any] = field(default_factory=dict)
    unknown: bool = False  # may be missed or reported as not understood, but never mislabelled
    count: int = 1  # norms inside the module under test
    formula: Callable[..., Tensor] | None = None  # float64 reference where closed_form does not apply
    verified: bool = False  # plain algebra on real tensors: replay must succeed
    tolerance: float = 3e-5


class Hand(nn.Module):
    """A norm whose arithmetic is one function; its parameters follow from the expected fields."""

    def __init__(self, compute: Callable[..., Tensor], size: int, expected: Mapping[str, Any], image: bool) -> None:
        super().__init__()
        shape = {"vector": (size, 1, 1) if image else (size,), "scalar": (1,)}
        weight = expected.get("weight", "none")
        weight = weight[0] if isinstance(weight, OneOf) else weight
        self.compute = compute
        self.eps = expected.get("eps", 0.0)
        self.weight: Any = nn.Parameter(torch.rand(shape[weight]) + 0.5) if weight != "none" else None
        self.bias: Any = nn.Parameter(torch.rand(shape["vector"])) if expected.get("bias") else None
        self.eps_buffer: Any
        self.register_buffer("eps_buffer", torch.tensor(1e-5))

    def forward(self, x: Tensor, *conditions: Tensor) -> Tensor:
        return self.compute(self, x, *conditions)


class Host(nn.Module):
    """Projects, normalizes, projects: the norm under test sits at ``norm``."""

    def __init__(self, norm: nn.Module, layout: str) -> None:
        super().__init__()
        self.layout = layout
        image = layout == "image"
        self.into = nn.Conv2d(3, CHANNELS, 3, padding=1) if image else nn.Linear(WIDTH_IN, HIDDEN)
        self.norm = norm
        self.out = nn.Conv2d(CHANNELS, WIDTH_OUT, 1) if image else nn.Linear(HIDDEN, WIDTH_OUT)
        self.condition = nn.Linear(3, 2 * HIDDEN) if layout == "conditioned" else None
        self.gate = nn.Linear(WIDTH_IN, HIDDEN) if layout == "gated" else None

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        h = self.into(x)
        if self.layout == "heads":
            h = h.view(*h.shape[:2], HEADS, HEAD_SIZE).transpose(1, 2)
            return self.out(self.norm(h).transpose(1, 2).flatten(2))
        if self.condition is not None:
            scale, shift = self.condition(condition).unsqueeze(1).chunk(2, dim=-1)
            return self.out(self.norm(h, scale, shift))
        if self.gate is not None:
            return self.out(self.norm(h, self.gate(x)))
        return self.out(self.norm(h))


def host(case: NormCase) -> Host:
    """Build a case in its host, in eval mode."""
    torch.manual_seed(0)
    return Host(case.build(), case.layout).eval()


def inputs(case: NormCase) -> tuple[Tensor, ...]:
    """Return example inputs of a case's host."""
    generator = torch.Generator().manual_seed(1)
    if case.layout == "image":
        return (torch.randn(2, 3, HEIGHT, WIDTH, generator=generator),)
    x = torch.randn(BATCH, TIME, WIDTH_IN, generator=generator)
    return (x, torch.randn(BATCH, 3, generator=generator)) if case.layout == "conditioned" else (x,)


def closed_form(x: Tensor, expected: Mapping[str, Any], weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute what the expected fields say, in float64 (the first of several right values is taken)."""
    fields = {key: value[0] if isinstance(value, OneOf) else value for key, value in expected.items()}
    x, kind = x.double(), fields["kind"]
    axes, eps = fields.get("axes", (-1,)), fields.get("eps") or 0.0
    if fields.get("center", kind not in ("rms", "scale")):
        x = x - x.mean(axes, keepdim=True)
    count = math.prod(x.shape[axis] for axis in axes)
    moment = x.square().sum(axes, keepdim=True)
    if kind != "scale":
        moment = moment / (count if fields.get("biased", True) else count - 1)
    if fields.get("eps_clamp"):
        root = moment.sqrt().clamp_min(eps)
    else:
        root = (moment + eps).sqrt() if fields.get("eps_inside", True) else moment.sqrt() + eps
    y = x / root * fields.get("factor", 1.0)
    if weight is not None:
        y = y * (fields.get("weight_offset", 0.0) + weight.double())
    return y if bias is None else y + bias.double()


NORMS: list[NormCase] = []
CONTROLS: list[NormCase] = []

Compute = Callable[..., Tensor]
Build = Callable[[], nn.Module]


def norm(layout: str = "tokens", **options: Any) -> Callable[[Compute], Compute]:
    """Register a norm written as one function of (module, x)."""
    own = {key: options.pop(key) for key in ("unknown", "count", "formula", "verified", "tolerance") if key in options}

    def register(compute: Compute) -> Compute:
        def build() -> nn.Module:
            return Hand(compute, SIZES[layout], options, layout == "image")

        NORMS.append(NormCase(name=compute.__name__, build=build, layout=layout, expected=options, **own))
        return compute

    return register


def module(layout: str = "tokens", **options: Any) -> Callable[[Build], Build]:
    """Register a norm that a function builds as a module."""
    own = {key: options.pop(key) for key in ("unknown", "count", "formula", "verified", "tolerance") if key in options}

    def register(build: Build) -> Build:
        NORMS.append(NormCase(name=build.__name__, build=build, layout=layout, expected=options, **own))
        return build

    return register


def control(layout: str = "tokens", **expected: Any) -> Callable[[Compute], Compute]:
    """Register something that is no norm, written as one function of (module, x)."""

    def register(compute: Compute) -> Compute:
        def build() -> nn.Module:
            return Hand(compute, SIZES[layout], expected, layout == "image")

        CONTROLS.append(NormCase(name=compute.__name__, build=build, layout=layout, count=0))
        return compute

    return register


LAYER: dict[str, Any] = {"kind": "layer", "center": True, "eps": 1e-5, "weight": "vector", "bias": True, "axes": (-1,)}
RMS: dict[str, Any] = {"kind": "rms", "center": False, "eps": 1e-6, "weight": "vector", "bias": False, "axes": (-1,)}
SCALE: dict[str, Any] = {"kind": "scale", "center": False, "weight": "none", "bias": False, "axes": (-1,)}
INSIDE: dict[str, Any] = {"eps_inside": True, "eps_clamp": False, "biased": True, "factor": 1.0, "weight_offset": 0.0}
HAND: dict[str, Any] = {"verified": True, **INSIDE}


# Layer norms


@norm(**LAYER, **HAND)
def layer_seed(n: Hand, x: Tensor) -> Tensor:
    """The form of the seed repositories."""
    mean = x.mean(dim=-1, keepdim=True)
    variance = x.var(dim=-1, keepdim=True, unbiased=False)
    return n.weight * ((x - mean) / torch.sqrt(variance + n.eps)) + n.bias


@norm(**{**LAYER, **HAND, "eps_inside": False})
def layer_eps_outside_biased(n: Hand, x: Tensor) -> Tensor:
    """The formula common in notes: (x - mu) / (sigma + eps)."""
    mean = x.mean(-1, keepdim=True)
    variance = x.var(-1, keepdim=True, correction=0)
    return (x - mean) / (variance.sqrt() + n.eps) * n.weight + n.bias


@norm(**{**LAYER, **HAND, "eps_inside": False, "biased": False})
def layer_eps_outside_unbiased(n: Hand, x: Tensor) -> Tensor:
    """The Annotated Transformer."""
    return n.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + n.eps) + n.bias


@norm(**{**LAYER, **HAND, "biased": False})
def layer_unbiased_inside(n: Hand, x: Tensor) -> Tensor:
    """torch.var's default left in place."""
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + n.eps) * n.weight + n.bias


@norm(**{**LAYER, **HAND, "biased": False})
def layer_unbiased_by_hand(n: Hand, x: Tensor) -> Tensor:
    """The squares are summed and divided by n - 1."""
    h = x - x.mean(-1, keepdim=True)
    return h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1) + n.eps) * n.weight + n.bias


@norm(**LAYER, **HAND)
def layer_two_pass(n: Hand, x: Tensor) -> Tensor:
    """Center first, then square."""
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt((centered * centered).mean(-1, keepdim=True) + n.eps) * n.weight + n.bias


@norm(**LAYER, **HAND)
def layer_raw_moments(n: Hand, x: Tensor) -> Tensor:
    """E[x^2] - E[x]^2."""
    mean, mean_square = x.mean(-1, keepdim=True), x.pow(2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(mean_square - mean**2 + n.eps) * n.weight + n.bias


@norm(**LAYER, **HAND)
def layer_var_mean(n: Hand, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
    return (x - mean) * (variance + n.eps).rsqrt() * n.weight + n.bias


@norm(**LAYER, **HAND)
def layer_sums(n: Hand, x: Tensor) -> Tensor:
    """Sums divided by the width."""
    centered = x - x.sum(-1, keepdim=True) / x.size(-1)
    variance = centered.square().sum(-1, keepdim=True) / x.size(-1)
    return centered / (variance + n.eps).sqrt() * n.weight + n.bias


@norm(**LAYER, **HAND)
def layer_in_place(n: Hand, x: Tensor) -> Tensor:
    """A chain of in-place operations on a copy."""
    y = x.clone()
    y.sub_(x.mean(-1, keepdim=True))
    root = y.square().mean(-1, keepdim=True).add_(n.eps).sqrt_()
    return y.div_(root).mul_(n.weight).add_(n.bias)


@norm(**LAYER, **HAND)
def layer_pow_half(n: Hand, x: Tensor) -> Tensor:
    return (x - x.mean(-1, True)) / (x.var(-1, False, keepdim=True) + n.eps).pow(0.5) * n.weight + n.bias


@norm(**LAYER, **HAND)
def layer_addcmul(n: Hand, x: Tensor) -> Tensor:
    """Gain and shift fused into one operation."""
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return torch.addcmul(n.bias, (x - mean) * torch.rsqrt(variance + n.eps), n.weight)


@norm(**LAYER, **INSIDE, unknown=True)
def layer_folded_shift(n: Hand, x: Tensor) -> Tensor:
    """scale * x + (bias - mean * scale), the way batch norms are folded; numerator is not centered first."""
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    scale = n.weight * torch.rsqrt(variance + n.eps)
    return x * scale + (n.bias - mean * scale)


@norm(**LAYER, **HAND)
def layer_eps_buffer(n: Hand, x: Tensor) -> Tensor:
    """eps held in a 0-dim buffer."""
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, correction=0, keepdim=True) + n.eps_buffer) * (
        n.weight
    ) + n.bias


@norm(**{**LAYER, **HAND, "weight": "scalar", "bias": False})
def layer_scalar_weight(n: Hand, x: Tensor) -> Tensor:
    """One gain for the whole vector."""
    return n.weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + n.eps)


@norm(**{**LAYER, **HAND, "weight": "none", "bias": False})
def layer_without_parameters(n: Hand, x: Tensor) -> Tensor:
    """OLMo-1."""
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + n.eps)


@norm(**{**LAYER, **HAND, "weight_offset": 1.0})
def layer_unit_offset(n: Hand, x: Tensor) -> Tensor:
    """Nemotron's LayerNorm1P."""
    return F.layer_norm(x, (HIDDEN,), n.weight + 1, n.bias, n.eps)


@norm(**{**LAYER, **HAND, "stats_dtype": "float64"})
def layer_in_double(n: Hand, x: Tensor) -> Tensor:
    """Statistics in float64, gain in the dtype of the input."""
    y = x.double()
    y = (y - y.mean(-1, keepdim=True)) * torch.rsqrt(y.var(-1, keepdim=True, correction=0) + n.eps)
    return y.to(x.dtype) * n.weight + n.bias


@norm(**{**LAYER, **HAND, "axes": (-2, -1), "weight": "none", "bias": False})
def layer_over_tokens(n: Hand, x: Tensor) -> Tensor:
    """Statistics over time and hidden: leaks along the sequence, and the map must show it."""
    centered = x - x.mean((-2, -1), keepdim=True)
    return centered / torch.sqrt(centered.square().mean((-2, -1), keepdim=True) + n.eps)


class _LayerFunction(torch.autograd.Function):
    """A layer norm with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
        xhat = (x - mean) * rstd
        ctx.save_for_backward(xhat, rstd, weight)
        return xhat * weight + bias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        xhat, rstd, weight = ctx.saved_tensors
        dxhat = grads[0] * weight
        inner = dxhat.mean(-1, keepdim=True) + xhat * (dxhat * xhat).mean(-1, keepdim=True)
        return rstd * (dxhat - inner), (grads[0] * xhat).flatten(0, -2).sum(0), grads[0].flatten(0, -2).sum(0), None


@norm(**LAYER, **HAND)
def layer_autograd_function(n: Hand, x: Tensor) -> Tensor:
    y = _LayerFunction.apply(x, n.weight, n.bias, n.eps)
    assert isinstance(y, Tensor)
    return y


@norm(**LAYER, **INSIDE)
def layer_functional(n: Hand, x: Tensor) -> Tensor:
    return F.layer_norm(x, (HIDDEN,), n.weight, n.bias, n.eps)


@module(**LAYER, **INSIDE)
def layer_torch() -> nn.Module:
    return nn.LayerNorm(HIDDEN)


@module(**{**LAYER, **INSIDE, "bias": False, "eps": 1e-3})
def layer_torch_without_bias() -> nn.Module:
    return nn.LayerNorm(HIDDEN, eps=1e-3, bias=False)


@module(**{**LAYER, **INSIDE, "bias": False, "weight": "none"})
def layer_torch_without_affine() -> nn.Module:
    return nn.LayerNorm(HIDDEN, elementwise_affine=False)


@module(**{**LAYER, **INSIDE, "axes": (-2, -1)})
def layer_torch_over_tokens() -> nn.Module:
    return nn.LayerNorm([TIME, HIDDEN])


class JitLayer(nn.Module):
    """A layer norm that TorchScript compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.bias = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


@module(**LAYER, **INSIDE)
def layer_scripted() -> nn.Module:
    return _quietly(torch.jit.script, JitLayer())


@module(**LAYER, **INSIDE)
def layer_jit_traced() -> nn.Module:
    return _quietly(torch.jit.trace, JitLayer(), torch.randn(BATCH, TIME, HIDDEN))


@module(**LAYER, **INSIDE)
def layer_compiled_eager() -> nn.Module:
    compiled = torch.compile(JitLayer(), backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


def _quietly(function: Callable[..., Any], *arguments: Any) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


@norm("heads", **{**LAYER, **HAND})
def layer_per_head(n: Hand, x: Tensor) -> Tensor:
    """QK norm with statistics per head."""
    return F.layer_norm(x, (HEAD_SIZE,), n.weight, n.bias, n.eps)


def _modulated(n: Hand, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    normalized = closed_form(x, {"kind": "layer", "eps": 1e-5}, None, None)
    return normalized * (1 + scale.double()) + shift.double()


@norm(
    "conditioned",
    **{**LAYER, **INSIDE, "weight": "none", "bias": False, "modulation": "scale_shift"},
    formula=_modulated,
)
def layer_modulated(n: Hand, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """DiT's adaLN."""
    return F.layer_norm(x, (HIDDEN,), eps=n.eps) * (1 + scale) + shift


def _scaled(n: Hand, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return closed_form(x, {"kind": "rms", "eps": 1e-6}, None, None) * (1 + scale.double())


@norm("conditioned", **{**RMS, **INSIDE, "weight": "none", "modulation": "scale"}, formula=_scaled)
def rms_modulated(n: Hand, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.eps) * (1 + scale)


# Root-mean-square norms


@norm(**{**RMS, **HAND, "weight_offset": 1.0})
def rms_seed(n: Hand, x: Tensor) -> Tensor:
    """Unit offset on the gain."""
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + n.eps) * (1 + n.weight)


@norm(**{**RMS, **HAND, "stats_dtype": "float32", "cast": "before_weight"})
def rms_llama(n: Hand, x: Tensor) -> Tensor:
    dtype = x.dtype
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + n.eps)
    return n.weight * h.to(dtype)


@norm(**{**RMS, **HAND, "stats_dtype": "float32", "cast": "after_weight", "weight_offset": 1.0})
def rms_gemma(n: Hand, x: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + n.eps)
    return (h * (1.0 + n.weight.float())).type_as(x)


@norm(**{**RMS, **HAND, "stats_dtype": "float32"})
def rms_t5(n: Hand, x: Tensor) -> Tensor:
    """Only the mean square is taken in float32."""
    mean_square = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(mean_square + n.eps)
    return n.weight * (x.to(n.weight.dtype) if n.weight.dtype in (torch.float16, torch.bfloat16) else x)


@norm(**{**RMS, **HAND, "stats_dtype": "float32", "cast": "after_weight"})
def rms_olmo(n: Hand, x: Tensor) -> Tensor:
    dtype = x.dtype
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + n.eps)
    return (n.weight * h).to(dtype)


@norm(**{**RMS, **HAND, "stats_dtype": OneOf((None, "float32"))})  # the model is float32
def rms_without_upcast(n: Hand, x: Tensor) -> Tensor:
    return n.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.eps))


@norm(**{**RMS, **HAND, "eps_inside": False})
def rms_norm_times_power(n: Hand, x: Tensor) -> Tensor:
    """The RMSNorm authors' code: ||x|| * D^-0.5 + eps."""
    return n.weight * (x / (x.norm(2, dim=-1, keepdim=True) * x.size(-1) ** -0.5 + n.eps))


@norm(**{**RMS, **HAND, "eps_clamp": True, "eps_inside": OneOf((False, True)), "eps": 1e-8})
def rms_norm_times_power_clamped(n: Hand, x: Tensor) -> Tensor:
    """lucidrains: g * x / max(||x|| * D^-0.5, eps)."""
    return x / (torch.norm(x, dim=-1, keepdim=True) * HIDDEN**-0.5).clamp(min=n.eps) * n.weight


@norm(**RMS, **HAND)
def rms_pow_minus_half(n: Hand, x: Tensor) -> Tensor:
    return x * (x * x).mean(-1, keepdim=True).add(n.eps).pow(-0.5) * n.weight


@norm(**RMS, **HAND)
def rms_reciprocal_of_sqrt(n: Hand, x: Tensor) -> Tensor:
    return x * torch.reciprocal(torch.sqrt(torch.square(x).mean(-1, keepdim=True) + n.eps)) * n.weight


@norm(**RMS, **HAND)
def rms_one_over_sqrt(n: Hand, x: Tensor) -> Tensor:
    return n.weight * x * (1.0 / ((x**2).mean(-1, keepdim=True) + n.eps).sqrt())


@norm(**RMS, **INSIDE, unknown=True)
def rms_exp_log(n: Hand, x: Tensor) -> Tensor:
    """exp(-log(ms + eps) / 2)."""
    return x * torch.exp(-0.5 * torch.log(x.pow(2).mean(-1, keepdim=True) + n.eps)) * n.weight


@norm(**RMS, **HAND)
def rms_scale_before(n: Hand, x: Tensor) -> Tensor:
    """The gain multiplies the input; the statistic is of the input without it."""
    return (x * n.weight) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.eps)


def _weight_inside(n: Hand, x: Tensor) -> Tensor:
    return closed_form(x.double() * n.weight.double(), {"kind": "rms", "eps": 1e-6}, None, None)


@norm(kind=OneOf(("rms", "other")), eps=1e-6, weight=OneOf(("vector", "none")), unknown=True, formula=_weight_inside)
def rms_of_weighted_input(n: Hand, x: Tensor) -> Tensor:
    """The gain is inside the statistic as well: N(w * x), not w * N(x)."""
    h = x * n.weight
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


# eps rides on the rescaled mean square here, so its effective size depends on the row
@norm(**{**RMS, "eps": OneOf((1e-12, 1e-6, 0.0))}, eps_inside=OneOf((True, False)), tolerance=1e-4)
def rms_amax_prescaled(n: Hand, x: Tensor) -> Tensor:
    """Divide by the largest entry first so that squares cannot overflow."""
    h = x / x.abs().amax(-1, keepdim=True)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-12) * n.weight


@norm(**RMS, **HAND)
def rms_in_place(n: Hand, x: Tensor) -> Tensor:
    return x.clone().mul_(x.pow(2).mean(-1, keepdim=True).add_(n.eps).rsqrt_()).mul_(n.weight)


@norm(**{**RMS, **HAND, "eps": 0.0})
def rms_linalg_norm(n: Hand, x: Tensor) -> Tensor:
    return x / (torch.linalg.norm(x, dim=-1, keepdim=True) / math.sqrt(HIDDEN)) * n.weight


@norm(**{**RMS, **HAND, "eps": 0.0})
def rms_vector_norm(n: Hand, x: Tensor) -> Tensor:
    return x * (HIDDEN**0.5 / torch.linalg.vector_norm(x, dim=-1, keepdim=True)) * n.weight


@norm(**{**RMS, **HAND, "eps": OneOf((1e-3, 1e-6)), "eps_clamp": True, "eps_inside": OneOf((False, True))})
def rms_clamped_mean_square(n: Hand, x: Tensor) -> Tensor:
    """max(ms, 1e-6) under the root, the same as max(rms, 1e-3)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp_min(1e-6)) * n.weight


@norm(**{**RMS, **HAND, "eps": 1e-5, "eps_clamp": True, "eps_inside": OneOf((False, True))})
def rms_maximum_with_buffer(n: Hand, x: Tensor) -> Tensor:
    return x / torch.maximum(x.pow(2).mean(-1, keepdim=True).sqrt(), n.eps_buffer) * n.weight


@norm(**RMS, **INSIDE, unknown=True)
def rms_einsum(n: Hand, x: Tensor) -> Tensor:
    """A contraction of x with itself as reduction."""
    mean_square = torch.einsum("bth,bth->bt", x, x) / x.size(-1)
    return x * torch.rsqrt(mean_square + n.eps).unsqueeze(-1) * n.weight


@norm(**RMS, **INSIDE, unknown=True)
def rms_matmul_with_ones(n: Hand, x: Tensor) -> Tensor:
    mean_square = (x * x) @ torch.full((HIDDEN, 1), 1 / HIDDEN)
    return x * torch.rsqrt(mean_square + n.eps) * n.weight


@norm(**RMS, **INSIDE, unknown=True)
def rms_bmm_row_by_itself(n: Hand, x: Tensor) -> Tensor:
    mean_square = (x.unsqueeze(-2) @ x.unsqueeze(-1)).squeeze(-1) / HIDDEN
    return x * torch.rsqrt(mean_square + n.eps) * n.weight


@torch.library.custom_op("normwise_corpus::rms", mutates_args=())
def _opaque_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@_opaque_rms.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@norm(**RMS, **INSIDE, unknown=True)
def rms_custom_op(n: Hand, x: Tensor) -> Tensor:
    """One opaque operation."""
    return _opaque_rms(x, n.weight, n.eps)


@norm(**RMS, **INSIDE, unknown=True)
def rms_numpy_detour(n: Hand, x: Tensor) -> Tensor:
    """The dataflow breaks: torch sees a tensor that nobody produced."""
    import numpy as np

    values, weight = x.detach().numpy(), n.weight.detach().numpy()
    y = values / np.sqrt((values**2).mean(-1, keepdims=True) + n.eps) * weight
    return torch.from_numpy(y.astype(np.float32))


@norm(**RMS, **HAND)
def rms_functional(n: Hand, x: Tensor) -> Tensor:
    return F.rms_norm(x, (HIDDEN,), n.weight, n.eps)


@module(**{**RMS, **INSIDE, "eps": OneOf((torch.finfo(torch.float32).eps, None))})
def rms_torch_default_eps() -> nn.Module:
    return nn.RMSNorm(HIDDEN)


@module(**{**RMS, **INSIDE, "weight": "none", "eps": 1e-5})
def rms_torch_without_weight() -> nn.Module:
    return nn.RMSNorm(HIDDEN, eps=1e-5, elementwise_affine=False)


class _RmsFunction(torch.autograd.Function):
    """An RMS norm with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, rstd, weight)
        return x * rstd * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, rstd, weight = ctx.saved_tensors
        xhat, dxhat = x * rstd, grads[0] * weight
        dx = rstd * (dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True))
        return dx, (grads[0] * xhat).flatten(0, -2).sum(0), None


@norm(**RMS, **HAND)
def rms_autograd_function(n: Hand, x: Tensor) -> Tensor:
    y = _RmsFunction.apply(x, n.weight, n.eps)
    assert isinstance(y, Tensor)
    return y


@norm("heads", **RMS, **HAND)
def rms_per_head(n: Hand, x: Tensor) -> Tensor:
    """QK norm of Qwen3."""
    return n.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.eps))


def _partial(n: Hand, x: Tensor) -> Tensor:
    root = (x.double()[..., :6].square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return x.double() / root * n.weight.double()


@norm(**{**RMS, **HAND, "partial": 0.25}, formula=_partial)
def rms_partial(n: Hand, x: Tensor) -> Tensor:
    """pRMSNorm: the statistic of the first quarter divides the whole row."""
    return x * torch.rsqrt(x[..., :6].pow(2).mean(-1, keepdim=True) + 1e-6) * n.weight


def _grouped(n: Hand, x: Tensor) -> Tensor:
    groups = closed_form(x.unflatten(-1, (4, 6)), {"kind": "rms", "eps": 1e-6}, None, None)
    return groups.flatten(-2) * n.weight.double()


@norm(kind=OneOf(("group", "rms")), center=False, eps=1e-6, weight="vector", bias=False, formula=_grouped)
def rms_of_groups(n: Hand, x: Tensor) -> Tensor:
    """Each of four groups of the hidden axis has its own statistic (Mamba-2 with n_groups, RetNet)."""
    groups = x.unflatten(-1, (4, 6))
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + n.eps)
    return n.weight * groups.flatten(-2)


def _gate_before(n: Hand, x: Tensor, z: Tensor) -> Tensor:
    return closed_form(x.double() * F.silu(z.double()), {"kind": "rms", "eps": 1e-6}, n.weight, None)


@norm("gated", **{**RMS, **INSIDE, "gate": OneOf(("before", "none"))}, formula=_gate_before)
def rms_gate_before(n: Hand, x: Tensor, z: Tensor) -> Tensor:
    """Mamba-2: N(x * silu(z)); the norm itself is the plain one of the product."""
    h = x.float() * F.silu(z.float())
    return n.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + n.eps)).to(x.dtype)


def _gate_after(n: Hand, x: Tensor, z: Tensor) -> Tensor:
    return closed_form(x, {"kind": "rms", "eps": 1e-6}, n.weight, None) * F.silu(z.double())


@norm("gated", **{**RMS, **INSIDE, "gate": "after"}, formula=_gate_after)
def rms_gate_after(n: Hand, x: Tensor, z: Tensor) -> Tensor:
    """Qwen3-Next: N(x) * silu(z)."""
    h = x.float()
    h = n.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + n.eps)).to(x.dtype)
    return h * F.silu(z.float())


def _deferred(n: Hand, x: Tensor) -> Tensor:
    root = (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return x.double() * n.weight.double() / root


@norm(**{**RMS, "weight": OneOf(("vector", "none"))}, **INSIDE, formula=_deferred, unknown=True)
def rms_deferred(n: Hand, x: Tensor) -> Tensor:
    """hy_v4: the reciprocal root is applied after a bias-free linear map."""
    return F.linear(x, torch.diag(n.weight)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.eps)


def _masked(n: Hand, x: Tensor) -> Tensor:
    x, keep = x.double(), TIME - 2
    mean = x[:, :keep].mean((1, 2), keepdim=True)
    variance = (x[:, :keep] - mean).square().mean((1, 2), keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt()


@norm(kind=OneOf(("layer", "other")), unknown=True, formula=_masked)
def layer_masked_statistics(n: Hand, x: Tensor) -> Tensor:
    """Statistics over the valid tokens only."""
    mask = (torch.arange(TIME) < TIME - 2).to(x.dtype)[None, :, None]
    count = mask.sum() * x.size(-1)
    mean = (x * mask).sum((1, 2), keepdim=True) / count
    variance = ((x - mean).square() * mask).sum((1, 2), keepdim=True) / count
    return (x - mean) / torch.sqrt(variance + 1e-5)


# Scale (L2) norms


@norm(**{**SCALE, "weight": "scalar", "eps": 1e-5, "eps_clamp": True, "factor": 1.0}, verified=True)
def scale_norm(n: Hand, x: Tensor) -> Tensor:
    """Nguyen and Salazar: g * x / max(||x||, eps)."""
    return n.weight * x / x.norm(dim=-1, keepdim=True).clamp(min=n.eps)


@norm(**{**SCALE, "eps": 1e-12, "eps_clamp": True, "factor": 1.0}, verified=True)
def scale_normalize(n: Hand, x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


@norm(**{**SCALE, "eps": 1e-6, "eps_clamp": True, "weight": "vector"}, verified=True)
def scale_normalize_weight(n: Hand, x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=1e-6) * n.weight


# x / ||x|| * sqrt(H) may as well be called an rms norm with a clamp of eps / sqrt(H)
NORMALIZED: dict[str, Any] = {
    "kind": OneOf(("scale", "rms")),
    "eps": OneOf((1e-12, 1e-12 / math.sqrt(HIDDEN), 1e-12 / math.sqrt(CHANNELS))),
    "eps_clamp": True,
    "center": False,
    "weight": "vector",
}


@norm(**NORMALIZED, factor=OneOf((math.sqrt(HIDDEN), 1.0)), verified=True)
def scale_normalize_times_root(n: Hand, x: Tensor) -> Tensor:
    """lucidrains' RMSNorm."""
    return F.normalize(x, dim=-1) * HIDDEN**0.5 * n.weight


@norm(**{**SCALE, "eps": 1e-6, "eps_inside": True, "eps_clamp": False}, verified=True)
def scale_rsqrt_of_sum(n: Hand, x: Tensor) -> Tensor:
    """The l2norm of gated delta nets: x * rsqrt(sum(x^2) + eps)."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + n.eps)


@norm(**{**SCALE, "eps": 1e-6, "eps_inside": False, "eps_clamp": False}, verified=True)
def scale_eps_outside(n: Hand, x: Tensor) -> Tensor:
    return x / (torch.sqrt(x.square().sum(-1, keepdim=True)) + n.eps)


@norm("heads", **{**SCALE, "eps": 1e-12, "eps_clamp": True}, verified=True)
def scale_per_head(n: Hand, x: Tensor) -> Tensor:
    """Cosine attention (Swin v2)."""
    return F.normalize(x, dim=-1)


# Channels-first, batch, group and instance norms

IMAGE_LAYER = {**LAYER, "axes": OneOf(((-3,), (-1,)))}


@norm("image", **{**IMAGE_LAYER, **HAND, "axes": (-3,)})
def layer_channels_first(n: Hand, x: Tensor) -> Tensor:
    """ConvNeXt."""
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + n.eps) * n.weight + n.bias


class ChannelsLastDetour(nn.Module):
    """Permutes to channels-last, normalizes, permutes back (SAM, ConvNeXt)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(CHANNELS) + 0.5)
        self.bias = nn.Parameter(torch.rand(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), (CHANNELS,), self.weight, self.bias, 1e-5)
        return x.permute(0, 3, 1, 2)


def _channels_last(n: ChannelsLastDetour, x: Tensor) -> Tensor:
    y = closed_form(x.movedim(1, -1), {"kind": "layer", "eps": 1e-5}, n.weight, n.bias)
    return y.movedim(-1, 1)


@module("image", **IMAGE_LAYER, **INSIDE, formula=_channels_last)
def layer_permuted() -> nn.Module:
    return ChannelsLastDetour()


@norm(
    "image",
    **{**NORMALIZED, "axes": (-3,)},
    factor=OneOf((math.sqrt(CHANNELS), 1.0)),
    verified=True,
)
def rms_channels_first_normalize(n: Hand, x: Tensor) -> Tensor:
    """The RMSNorm of diffusion U-Nets."""
    return F.normalize(x, dim=1) * n.weight * CHANNELS**0.5


@norm("image", **{**RMS, **HAND, "axes": (-3,)})
def rms_channels_first(n: Hand, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + n.eps) * n.weight


BATCHED = {"kind": "batch", "center": True, "eps": 1e-5, "eps_inside": True}
BATCH_NORM = {**BATCHED, "weight": "vector", "bias": True, "running": True}


def _running(n: nn.Module, x: Tensor) -> Tensor:
    (mean, var), shape = n.buffers() if not isinstance(n, nn.modules.batchnorm._BatchNorm) else _stats(n), [1, -1]
    shape += [1] * (x.dim() - 2)
    y = (x.double() - mean.double().view(shape)) / (var.double().view(shape) + 1e-5).sqrt()
    weight, bias = n.weight, n.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    return y * weight.double().view(shape) + bias.double().view(shape)


def _stats(n: nn.modules.batchnorm._BatchNorm) -> tuple[Tensor, Tensor]:
    assert n.running_mean is not None
    assert n.running_var is not None
    return n.running_mean, n.running_var


def _seasoned(n: nn.modules.batchnorm._BatchNorm) -> nn.Module:
    mean, var = _stats(n)
    mean.normal_()
    var.uniform_(0.5, 2.0)
    return n


@module("image", **BATCH_NORM, momentum=0.1, axes=(-4, -2, -1), formula=_running)
def batch_torch() -> nn.Module:
    return _seasoned(nn.BatchNorm2d(CHANNELS))


class FunctionalBatchNorm(nn.Module):
    """F.batch_norm with its own buffers; ``training`` decides whose statistics are used."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.by_batch = training
        self.weight, self.bias = nn.Parameter(torch.rand(CHANNELS) + 0.5), nn.Parameter(torch.rand(CHANNELS))
        self.register_buffer("running_mean", torch.randn(CHANNELS))
        self.register_buffer("running_var", torch.rand(CHANNELS) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.get_buffer("running_mean"), self.get_buffer("running_var")
        return F.batch_norm(x, mean, var, self.weight, self.bias, training=self.by_batch, momentum=0.3, eps=1e-5)


def _by_batch(n: FunctionalBatchNorm, x: Tensor) -> Tensor:
    weight, bias = n.weight.view(-1, 1, 1), n.bias.view(-1, 1, 1)
    return closed_form(x, {"kind": "batch", "eps": 1e-5, "axes": (-4, -2, -1)}, weight, bias)


@module("image", **BATCH_NORM, formula=_running)
def batch_functional() -> nn.Module:
    return FunctionalBatchNorm(training=False)


@module("image", **BATCH_NORM, momentum=0.3, axes=(-4, -2, -1), formula=_by_batch)
def batch_functional_training() -> nn.Module:
    return FunctionalBatchNorm(training=True)


@module("image", **BATCH_NORM, formula=_running)
def batch_sync() -> nn.Module:
    return _seasoned(nn.SyncBatchNorm(CHANNELS))


@module(**BATCH_NORM, formula=_running)
def batch_over_token_axis() -> nn.Module:
    """BatchNorm1d(T) on [B, T, H] takes time for channels."""
    return _seasoned(nn.BatchNorm1d(TIME))


class TransposedBatchNorm(nn.Module):
    """BatchNorm1d over the hidden axis of [B, T, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = _seasoned(nn.BatchNorm1d(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x.transpose(1, 2)).transpose(1, 2)


@module(**BATCH_NORM, formula=lambda n, x: _running(n.bn, x.transpose(1, 2)).transpose(1, 2))
def batch_over_hidden() -> nn.Module:
    return TransposedBatchNorm()


@norm("image", **{**BATCHED, "axes": (-4, -2, -1), "weight": "vector", "bias": True, "running": False}, biased=True)
def batch_by_hand(n: Hand, x: Tensor) -> Tensor:
    """Batch statistics in every mode, no running ones."""
    mean = x.mean((0, 2, 3), keepdim=True)
    variance = (x - mean).square().mean((0, 2, 3), keepdim=True)
    return (x - mean) * torch.rsqrt(variance + n.eps) * n.weight + n.bias


@module("image", **{**BATCHED, "weight": "none", "bias": False, "running": False, "axes": (-4, -2, -1)})
def batch_without_running_statistics() -> nn.Module:
    return nn.BatchNorm2d(CHANNELS, affine=False, track_running_stats=False)


class FrozenBatchNorm(nn.Module):
    """The backbone norm of detection models: nothing but buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(CHANNELS) + 0.5)
        self.register_buffer("bias", torch.randn(CHANNELS))
        self.register_buffer("running_mean", torch.randn(CHANNELS))
        self.register_buffer("running_var", torch.rand(CHANNELS) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.get_buffer("weight").reshape(1, -1, 1, 1), self.get_buffer("bias").reshape(1, -1, 1, 1)
        mean = self.get_buffer("running_mean").reshape(1, -1, 1, 1)
        scale = weight * (self.get_buffer("running_var").reshape(1, -1, 1, 1) + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


def _frozen(n: FrozenBatchNorm, x: Tensor) -> Tensor:
    weight, bias, mean, var = (b.double().view(1, -1, 1, 1) for b in n.buffers())
    return (x.double() - mean) / (var + 1e-5).sqrt() * weight + bias


# Its affine part is constant: saying so, or that it has none, are both fair
@module("image", kind="batch", eps=1e-5, running=True, formula=_frozen)
def batch_frozen() -> nn.Module:
    return FrozenBatchNorm()


class Standardize(nn.Module):
    """Standardizes by running estimates of the data (RL observations, speech features)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(HIDDEN))
        self.register_buffer("var", torch.rand(HIDDEN) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.get_buffer("mean")) / torch.sqrt(self.get_buffer("var") + 1e-8)


def _standardized(n: Standardize, x: Tensor) -> Tensor:
    return (x.double() - n.get_buffer("mean").double()) / (n.get_buffer("var").double() + 1e-8).sqrt()


@module(kind="batch", unknown=True, formula=_standardized)
def batch_standardize_by_buffers() -> nn.Module:
    return Standardize()


GROUP = {"kind": "group", "center": True, "eps": 1e-5, "groups": 3}


def _group(n: nn.Module, x: Tensor) -> Tensor:
    y = closed_form(x.unflatten(1, (3, 4)), {"kind": "group", "eps": 1e-5, "axes": (-3, -2, -1)}, None, None)
    weight, bias = n.weight, n.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    return y.flatten(1, 2) * weight.double().view(-1, 1, 1) + bias.double().view(-1, 1, 1)


@module("image", **GROUP, weight="vector", bias=True, formula=_group)
def group_torch() -> nn.Module:
    return nn.GroupNorm(3, CHANNELS)


@norm("image", **GROUP, weight="vector", bias=True, formula=_group)
def group_functional(n: Hand, x: Tensor) -> Tensor:
    return F.group_norm(x, 3, n.weight.flatten(), n.bias.flatten(), n.eps)


@norm("image", **GROUP, axes=(-3, -2, -1), weight="vector", bias=True, formula=_group)
def group_by_hand(n: Hand, x: Tensor) -> Tensor:
    groups = x.reshape(x.size(0), 3, -1)
    variance, mean = torch.var_mean(groups, -1, keepdim=True, correction=0)
    groups = (groups - mean) * torch.rsqrt(variance + n.eps)
    return groups.view_as(x) * n.weight + n.bias


@norm("image", **GROUP, axes=(-3, -2, -1), weight="vector", bias=True, formula=_group)
def group_by_unflatten(n: Hand, x: Tensor) -> Tensor:
    groups = x.unflatten(1, (3, -1))
    variance, mean = torch.var_mean(groups, (2, 3, 4), keepdim=True, correction=0)
    return ((groups - mean) * torch.rsqrt(variance + n.eps)).flatten(1, 2) * n.weight + n.bias


def _everything(n: nn.Module, x: Tensor) -> Tensor:
    weight, bias = n.weight, n.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    wide = {"kind": "group", "axes": (-3, -2, -1), "eps": 1e-5}
    return closed_form(x, wide, weight.view(-1, 1, 1), bias.view(-1, 1, 1))


@module("image", kind="group", groups=1, eps=1e-5, weight="vector", bias=True, formula=_everything)
def group_of_everything() -> nn.Module:
    """GroupNorm(1, C): a layer norm over channels and space."""
    return nn.GroupNorm(1, CHANNELS)


INSTANCE = {"kind": "instance", "center": True, "eps": 1e-5, "axes": (-2, -1)}


@module("image", **INSTANCE, weight="none", bias=False)
def instance_torch() -> nn.Module:
    return nn.InstanceNorm2d(CHANNELS)


@norm("image", **INSTANCE, weight="vector", bias=True)
def instance_functional(n: Hand, x: Tensor) -> Tensor:
    return F.instance_norm(x, weight=n.weight.flatten(), bias=n.bias.flatten(), eps=n.eps)


@norm("image", **INSTANCE, weight="vector", bias=True, verified=True)
def instance_by_hand(n: Hand, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, (2, 3), keepdim=True, correction=0)
    return (x - mean) / (variance + n.eps).sqrt() * n.weight + n.bias


@norm("image", **{**INSTANCE, "kind": OneOf(("instance", "layer"))}, biased=False, eps_inside=False, formula=None)
def instance_adain_style(n: Hand, x: Tensor) -> Tensor:
    """Unbiased standard deviation over space, eps added outside."""
    return (x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + n.eps)


@module("image", kind="other", unknown=True, formula=lambda n, x: F.local_response_norm(x.double(), 3))
def local_response() -> nn.Module:
    return nn.LocalResponseNorm(3)


# Harder to read: detours, two norms in one module, gains in disguise


@norm(**RMS, **HAND)
def rms_unsqueezed(n: Hand, x: Tensor) -> Tensor:
    """The statistic loses its axis and gets it back."""
    return x * torch.rsqrt(x.pow(2).mean(-1) + n.eps)[..., None] * n.weight


@norm(**RMS, **HAND)
def rms_flattened(n: Hand, x: Tensor) -> Tensor:
    """Rows [B T, H], as kernels see them."""
    rows = x.reshape(-1, HIDDEN)
    return (rows * torch.rsqrt(rows.pow(2).mean(1, keepdim=True) + n.eps) * n.weight).view_as(x)


@norm(**{**RMS, **HAND, "bias": True})
def rms_with_bias(n: Hand, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.eps) * n.weight + n.bias


@norm(**{**RMS, **HAND, "eps": 0.0})
def rms_frobenius(n: Hand, x: Tensor) -> Tensor:
    return HIDDEN**0.5 * x / torch.norm(x, p="fro", dim=-1, keepdim=True) * n.weight


@norm(**RMS, **INSIDE, unknown=True)
def rms_vecdot(n: Hand, x: Tensor) -> Tensor:
    return x * torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) / HIDDEN + n.eps) * n.weight


@norm(**RMS, **INSIDE, unknown=True)
def rms_vmapped(n: Hand, x: Tensor) -> Tensor:
    """Written for one row, mapped over batch and time."""

    def one(row: Tensor) -> Tensor:
        return row * torch.rsqrt(row.pow(2).mean() + n.eps) * n.weight

    return torch.vmap(torch.vmap(one))(x)


@norm(**{**LAYER, **HAND, "eps_inside": False})
def layer_std_mean(n: Hand, x: Tensor) -> Tensor:
    std, mean = torch.std_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) / (std + n.eps) * n.weight + n.bias


def _exponential(n: Hand, x: Tensor) -> Tensor:
    return closed_form(x, {"kind": "rms", "eps": 1e-6}, n.weight.exp(), None)


@norm(kind="rms", eps=1e-6, center=False, axes=(-1,), weight="vector", formula=_exponential, unknown=True)
def rms_exponential_gain(n: Hand, x: Tensor) -> Tensor:
    """The gain is the exponential of its parameter."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.eps) * n.weight.exp()


def _twice(n: Hand, x: Tensor) -> Tensor:
    rms = {"kind": "rms", "eps": 1e-6}
    return closed_form(closed_form(x, rms, n.weight, None), rms, n.weight, None)


@norm(**RMS, **INSIDE, count=2, formula=_twice)
def rms_twice(n: Hand, x: Tensor) -> Tensor:
    """One norm right after the other."""
    for _ in range(2):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.eps) * n.weight
    return x


def _halves(n: Hand, x: Tensor) -> Tensor:
    rms = {"kind": "rms", "eps": 1e-6}
    return torch.cat([closed_form(half, rms, None, None) for half in x.chunk(2, -1)], -1)


@norm(**{**RMS, **INSIDE, "weight": "none"}, count=2, formula=_halves)
def rms_of_halves(n: Hand, x: Tensor) -> Tensor:
    """Two norms of two chunks, joined again."""
    halves = [h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + n.eps) for h in x.chunk(2, -1)]
    return torch.cat(halves, -1)


class GainTable(nn.Module):
    """Takes its gain from one row of a table of all layers' gains."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(3, HIDDEN) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.table[1]


@module(**RMS, **INSIDE, formula=lambda n, x: closed_form(x, {"kind": "rms", "eps": 1e-6}, n.table[1], None))
def rms_gain_from_a_table() -> nn.Module:
    return GainTable()


@norm("image", **{**RMS, **HAND, "axes": (-3,), "weight": "none", "eps": 1e-8})
def rms_pixel(n: Hand, x: Tensor) -> Tensor:
    """StyleGAN's pixel norm."""
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + n.eps)


@norm("image", kind=OneOf(("rms", "instance")), center=False, eps=1e-6, axes=(-2, -1), weight="vector", bias=True)
def rms_filter_response(n: Hand, x: Tensor) -> Tensor:
    """FRN: the mean square over space."""
    return x * torch.rsqrt(x.square().mean((2, 3), keepdim=True) + n.eps) * n.weight + n.bias


# Norms with safeguards: steps that change nothing on ordinary rows


@norm(**RMS, **HAND)
def rms_power_of_two(n: Hand, x: Tensor) -> Tensor:
    """Rows too large to be squared are brought into range by an exact power of two."""
    exponent = torch.linalg.vector_norm(x.detach(), math.inf, -1, keepdim=True).log2().floor()
    y = x * torch.exp2(40 - exponent.clamp_min(40))
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + n.eps) * n.weight


@norm(**RMS, **HAND)
def rms_divided_when_large(n: Hand, x: Tensor) -> Tensor:
    """The same with a maximum and a division."""
    y = x / (x.abs().amax(-1, keepdim=True) / 1e4).clamp(min=1.0)
    return n.weight * (y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + n.eps))


@norm(**RMS, **HAND)
def rms_factor_chosen(n: Hand, x: Tensor) -> Tensor:
    """The same with a comparison."""
    largest = x.abs().max(-1, keepdim=True).values
    y = torch.where(largest > 1e15, 1e-10, torch.ones_like(largest)) * x
    return n.weight * (y * (y.pow(2).mean(-1, keepdim=True) + n.eps).rsqrt())


@norm(**LAYER, **HAND)
def layer_row_chosen(n: Hand, x: Tensor) -> Tensor:
    """Huge rows are divided by their largest element, the others taken as they are."""
    largest = x.abs().amax(-1, keepdim=True)
    y = torch.where(largest > 1e10, x / largest, x)
    c = y - y.mean(-1, keepdim=True)
    return c * torch.rsqrt(c.square().mean(-1, keepdim=True) + n.eps) * n.weight + n.bias


@norm(**LAYER, **HAND)
def layer_all_chosen(n: Hand, x: Tensor) -> Tensor:
    """One question for the whole tensor."""
    y = torch.where((x.abs() > 1e12).any(), x * 1e-12, x)
    c = y - y.mean(-1, keepdim=True)
    return c / (c.square().mean(-1, keepdim=True) + n.eps).sqrt() * n.weight + n.bias


@norm(**LAYER, **HAND)
def layer_compensated(n: Hand, x: Tensor) -> Tensor:
    """The rounding of the mean is taken back by a second mean."""
    c = x - x.mean(-1, keepdim=True)
    c = c - c.mean(-1, keepdim=True)
    return c * torch.rsqrt(c.square().mean(-1, keepdim=True) + n.eps) * n.weight + n.bias


@norm(**LAYER, **HAND)
def layer_compensated_sums(n: Hand, x: Tensor) -> Tensor:
    """The same with sums and squeezed statistics."""
    c = x - (x.sum(-1) / x.size(-1)).unsqueeze(-1)
    c = c - (c.sum(-1) / c.size(-1)).unsqueeze(-1)
    return c / torch.sqrt(c.pow(2).sum(-1, keepdim=True) / c.size(-1) + n.eps) * n.weight + n.bias


@norm(**{**LAYER, **HAND, "eps": 0.0, "weight": "none", "bias": False})
def layer_constant_rows_kept(n: Hand, x: Tensor) -> Tensor:
    """No eps: a variance of zero divides by one."""
    c = x - x.mean(-1, keepdim=True)
    variance = c.square().mean(-1, keepdim=True)
    return c / torch.where(variance > 0, variance, 1.0).sqrt()


@norm(**LAYER, **INSIDE)
def layer_value_pinned(n: Hand, x: Tensor) -> Tensor:
    """The value of one computation with the gradient of another."""
    y = F.layer_norm(x, (HIDDEN,), n.weight, n.bias, n.eps)
    return F.layer_norm(x.detach(), (HIDDEN,), n.weight.detach(), n.bias.detach(), n.eps) + (y - y.detach())


@norm(**RMS, **HAND)
def rms_value_pinned(n: Hand, x: Tensor) -> Tensor:
    """The other spelling: y + (value - y).detach()."""
    y = F.rms_norm(x, (HIDDEN,), n.weight, n.eps)
    value = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + n.eps) * n.weight
    return y + (value.to(x.dtype) - y).detach()


@norm(**RMS, **HAND)
def rms_products_widened(n: Hand, x: Tensor) -> Tensor:
    """Both operands of each product are cast, the result is cast back."""
    h = x.float()
    y = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + n.eps)).to(torch.float32)
    return (n.weight.float() * y.float()).to(torch.float32).to(x.dtype)


@norm("image", kind="batch", center=True, eps=1e-5, axes=(-4, -2, -1), **HAND)
def batch_compensated(n: Hand, x: Tensor) -> Tensor:
    axes = (0, 2, 3)
    c = x - x.mean(axes, keepdim=True)
    c = c - c.mean(axes, keepdim=True)
    return c * torch.rsqrt(c.square().mean(axes, keepdim=True) + n.eps)


@norm(kind="batch", center=True, eps=1e-5, axes=(-3, -2), weight="vector", bias=True, **HAND)
def batch_masked(n: Hand, x: Tensor) -> Tensor:
    """Statistics over real positions: sums divided by the number of those."""
    real = torch.ones(BATCH, TIME, 1)
    count = real.sum((0, 1), keepdim=True).clamp(min=1)
    c = (x - (x * real).sum((0, 1), keepdim=True) / count) * real
    return c * torch.rsqrt(c.square().sum((0, 1), keepdim=True) / count + n.eps) * n.weight + n.bias


class FrozenChannelsLast(nn.Module):
    """Running statistics, gain and shift in buffers, channels last."""

    def __init__(self, *, folded: bool) -> None:
        super().__init__()
        self.folded = folded
        self.a: Any
        self.b: Any
        self.c: Any
        self.d: Any
        for name in "abcd":  # names say nothing
            self.register_buffer(name, torch.rand(HIDDEN) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.d + 1e-5).rsqrt()
        if self.folded:
            scale = scale * self.a
            return x * scale + (self.b - self.c * scale)
        return (x - self.c) * scale * self.a + self.b


def _frozen_last(n: FrozenChannelsLast, x: Tensor) -> Tensor:
    a, b, c, d = (held.double() for held in (n.a, n.b, n.c, n.d))
    return (x.double() - c) / (d + 1e-5).sqrt() * a + b


FROZEN: dict[str, Any] = {"kind": "batch", "center": True, "eps": 1e-5, "axes": (-3, -2), "running": True}
FROZEN |= {"weight": "vector", "bias": True, "weight_offset": 0.0, "verified": True, "formula": _frozen_last}


@module(**FROZEN)
def batch_frozen_channels_last() -> nn.Module:
    return FrozenChannelsLast(folded=False)


@module(**FROZEN)
def batch_frozen_folded() -> nn.Module:
    return FrozenChannelsLast(folded=True)


def _completed(n: Hand, x: Tensor) -> Tensor:
    whole = torch.cat([x, -x.sum(-1, keepdim=True)], -1)
    return closed_form(whole, {"kind": "rms", "eps": 1e-6}, None, None)[..., :-1]


@norm(kind="rms", statistic="completed", center=False, eps=1e-6, axes=(-1,), verified=True, formula=_completed)
def rms_completed(n: Hand, x: Tensor) -> Tensor:
    """CRMSNorm: the root mean square of a zero-sum vector stored without its last entry."""
    total = x.square().sum(-1, keepdim=True) + x.sum(-1, keepdim=True).square()
    return x * torch.rsqrt(total / (x.size(-1) + 1) + n.eps)


def _input_scaled(n: Hand, x: Tensor) -> Tensor:
    return closed_form(n.weight * x, {"kind": "rms", "eps": 1e-6}, None, None)


@norm(**{**RMS, **HAND, "weight_on_input": True}, formula=_input_scaled)
def rms_gain_first(n: Hand, x: Tensor) -> Tensor:
    """The gain is on the input, and part of the statistic."""
    y = n.weight * x
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + n.eps)


# No norms


@control()
def softmax(n: Hand, x: Tensor) -> Tensor:
    return x.softmax(-1)


@control()
def softmax_by_hand(n: Hand, x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


@control()
def log_softmax(n: Hand, x: Tensor) -> Tensor:
    return x - x.logsumexp(-1, keepdim=True)


@control()
def router_l1(n: Hand, x: Tensor) -> Tensor:
    """Sigmoid router weights renormalized to sum one."""
    p = x.sigmoid()
    return p / (p.sum(-1, keepdim=True) + 1e-20)


@control()
def router_top_k(n: Hand, x: Tensor) -> Tensor:
    values, indices = x.softmax(-1).topk(4, dim=-1)
    return torch.zeros_like(x).scatter(-1, indices, values / values.sum(-1, keepdim=True))


@control()
def linear_attention_denominator(n: Hand, x: Tensor) -> Tensor:
    q = F.elu(x) + 1
    return (q @ (q.transpose(1, 2) @ x)) / (q * q.sum(1, keepdim=True)).sum(-1, keepdim=True)


@control()
def sinkhorn(n: Hand, x: Tensor) -> Tensor:
    p = x.exp()
    for _ in range(3):
        p = p / p.sum(-1, keepdim=True)
        p = p / p.sum(-2, keepdim=True)
    return p


@control()
def absmax_quantize(n: Hand, x: Tensor) -> Tensor:
    scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).round() / scale


@control()
def divide_by_maximum(n: Hand, x: Tensor) -> Tensor:
    return x / x.amax(-1, keepdim=True)


@control()
def min_max_scaling(n: Hand, x: Tensor) -> Tensor:
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return (x - low) / (high - low + 1e-6)


@control()
def divide_by_mean(n: Hand, x: Tensor) -> Tensor:
    return x / x.mean(-1, keepdim=True)


@control()
def l1_normalize(n: Hand, x: Tensor) -> Tensor:
    return F.normalize(x, p=1.0, dim=-1)


@control()
def largest_entry_normalize(n: Hand, x: Tensor) -> Tensor:
    return F.normalize(x, p=float("inf"), dim=-1)


@control()
def centering(n: Hand, x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


@control(weight="vector", bias=True)
def affine_no_norm(n: Hand, x: Tensor) -> Tensor:
    """MobileBERT's NoNorm."""
    return x * n.weight + n.bias


@control(weight="vector", bias=True)
def dynamic_tanh(n: Hand, x: Tensor) -> Tensor:
    return torch.tanh(0.5 * x) * n.weight + n.bias


@control()
def attention_scaling(n: Hand, x: Tensor) -> Tensor:
    return x / math.sqrt(HIDDEN)


@control()
def attention_by_hand(n: Hand, x: Tensor) -> Tensor:
    return (x @ x.transpose(-2, -1) / math.sqrt(HIDDEN)).softmax(-1) @ x


@control()
def gelu_tanh_by_hand(n: Hand, x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@control()
def clipped_row(n: Hand, x: Tensor) -> Tensor:
    """Rows with an element above one are divided by it: a factor that does something to ordinary rows."""
    return x / x.abs().amax(-1, keepdim=True).clamp(min=1.0)


@control()
def clipped_only_when_large(n: Hand, x: Tensor) -> Tensor:
    """A guard without a norm behind it."""
    return x / (x.abs().amax(-1, keepdim=True) / 1e4).clamp(min=1.0)


@control()
def quantized_straight_through(n: Hand, x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return x + ((x / step).round() * step - x).detach()


@control()
def centred_twice(n: Hand, x: Tensor) -> Tensor:
    c = x - x.mean(-1, keepdim=True)
    return c - c.mean(-1, keepdim=True)


@control()
def softplus(n: Hand, x: Tensor) -> Tensor:
    return torch.log1p(x.exp())


@control()
def softsign(n: Hand, x: Tensor) -> Tensor:
    return x / (1 + x.abs())


@control()
def elementwise_unit(n: Hand, x: Tensor) -> Tensor:
    """x / sqrt(x^2 + 1): a root of a square, but nothing is reduced."""
    return x * torch.rsqrt(x.square() + 1)


@control()
def squared_relu(n: Hand, x: Tensor) -> Tensor:
    return F.relu(x).square()


@control()
def energy_gate(n: Hand, x: Tensor) -> Tensor:
    """x times its mean square: degree 3, not 0."""
    return x * x.square().mean(-1, keepdim=True)


@control()
def divide_by_mean_square(n: Hand, x: Tensor) -> Tensor:
    """The root is missing: degree -1."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-6)


@control()
def divide_by_another(n: Hand, x: Tensor) -> Tensor:
    """The statistic is that of an unrelated activation (bounded, so not homogeneous in x)."""
    return x * torch.rsqrt(x.sigmoid().square().mean(-1, keepdim=True) + 1e-6)


@control()
def statistics_as_features(n: Hand, x: Tensor) -> Tensor:
    return torch.cat([x[..., 2:], x.mean(-1, keepdim=True), x.std(-1, keepdim=True)], -1)


@control()
def squeeze_and_excite(n: Hand, x: Tensor) -> Tensor:
    return x * x.mean(1, keepdim=True).sigmoid()


@control()
def mean_over_valid_tokens(n: Hand, x: Tensor) -> Tensor:
    mask = torch.ones(BATCH, TIME, 1)
    return ((x * mask).sum(1) / mask.sum(1).clamp(min=1e-9)).unsqueeze(1).expand_as(x)


@control()
def temperature(n: Hand, x: Tensor) -> Tensor:
    return x / (x.size(-1) ** 0.5 + 1e-6)


@control(weight="vector")
def weight_normalized_by_hand(n: Hand, x: Tensor) -> Tensor:
    """The norm of a parameter divides, not that of an activation."""
    return F.linear(x, torch.diag(n.weight / n.weight.norm()))


@control(weight="vector")
def weight_standardized(n: Hand, x: Tensor) -> Tensor:
    w = torch.outer(n.weight, n.weight)
    w = (w - w.mean(1, keepdim=True)) * torch.rsqrt(w.var(1, keepdim=True, correction=0) + 1e-5)
    return F.linear(x, w)


@control()
def rotary(n: Hand, x: Tensor) -> Tensor:
    angle = torch.arange(TIME)[:, None] / 10000 ** (torch.arange(HIDDEN // 2) / 12)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


@control("image", weight="vector", bias=True)
def global_response(n: Hand, x: Tensor) -> Tensor:
    """ConvNeXt V2's GRN: gates by relative channel norms and keeps the input."""
    spatial = x.norm(p=2, dim=(2, 3), keepdim=True)
    relative = spatial / (spatial.mean(1, keepdim=True) + 1e-6)
    return n.weight * (x * relative) + n.bias + x


def _control_module(build: Build) -> Build:
    CONTROLS.append(NormCase(name=build.__name__, build=build, count=0))
    return build


@_control_module
def weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN))


@_control_module
def weight_norm_old_style() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(HIDDEN, HIDDEN))


@_control_module
def spectral_norm() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(HIDDEN, HIDDEN))


class AffineDropPath(nn.Module):
    """Scales a branch by a learned vector and drops it at random, by sample, also here."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((HIDDEN,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.empty(x.size(0), 1, 1).bernoulli_(0.9)
        return self.scale * x.div(0.9) * keep


@_control_module
def affine_drop_path() -> nn.Module:
    return AffineDropPath()


@_control_module
def dropout() -> nn.Module:
    return nn.Dropout(0.3)


@_control_module
def recurrent() -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0]

    return Recurrent()
