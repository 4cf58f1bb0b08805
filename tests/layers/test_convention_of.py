"""Foreign norms named by what they do. Legend: [B, T, H] rows, [N, C, *] images."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.kernels.eager import forward as eager
from normwise.layers import FrozenBatchNorm
from normwise.layers.convention import convention_of, families_of, match_of
from normwise.spec import PROMOTED, Cast, Form, Gate, Kind, NormSpec, Scope, Statistic, Weight
from tests.layers.norm_calls import class_of
from tests.layers.transformers_norms import GROUPS, NORMS, WIDTH, Norm

LAYER = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True, form=Form.TORCH)
IMAGE, VOLUME = (-4, -2, -1), (-5, -3, -2, -1)
BATCH = replace(LAYER, scope=Scope.BATCH, running=True, momentum=0.1)

TORCH = {
    "LayerNorm": (nn.LayerNorm(24), LAYER),
    "LayerNorm of two axes": (nn.LayerNorm([4, 6], eps=1e-12), replace(LAYER, axes=(-2, -1), eps=1e-12)),
    "LayerNorm without bias": (nn.LayerNorm(24, bias=False), replace(LAYER, bias=False)),
    "RMSNorm": (nn.RMSNorm(24), NormSpec(eps=None, cast=Cast.AFTER_WEIGHT)),
    "RMSNorm with eps": (nn.RMSNorm(24, eps=1e-5), NormSpec(eps=1e-5, cast=Cast.AFTER_WEIGHT)),
    "GroupNorm": (nn.GroupNorm(4, 24), replace(LAYER, scope=Scope.GROUP, axes=(-2, -1), groups=4)),
    "GroupNorm of one group": (nn.GroupNorm(1, 24), replace(LAYER, scope=Scope.GROUP, axes=(-2, -1), groups=1)),
    "BatchNorm1d": (nn.BatchNorm1d(24), replace(BATCH, axes=(-3, -1))),
    "BatchNorm2d": (nn.BatchNorm2d(24, momentum=None), replace(BATCH, axes=IMAGE, momentum=None)),
    "BatchNorm2d in eval": (nn.BatchNorm2d(24, momentum=0.02).eval(), replace(BATCH, axes=IMAGE, momentum=0.02)),
    "BatchNorm3d": (nn.BatchNorm3d(24), replace(BATCH, axes=VOLUME)),
    "BatchNorm that tracks nothing": (
        nn.BatchNorm1d(24, track_running_stats=False),
        replace(BATCH, axes=(-3, -1), running=False, momentum=None),
    ),
    "InstanceNorm1d": (nn.InstanceNorm1d(24, affine=True), replace(LAYER, scope=Scope.INSTANCE)),
    "InstanceNorm2d": (
        nn.InstanceNorm2d(24, affine=True, track_running_stats=True),
        replace(BATCH, scope=Scope.INSTANCE, axes=(-2, -1)),
    ),
    "InstanceNorm3d": (
        nn.InstanceNorm3d(24, affine=True),
        replace(LAYER, scope=Scope.INSTANCE, axes=(-3, -2, -1)),
    ),
}


class Lambda(nn.Module):
    """A hand-written norm: ``function`` of the input and of parameters with names of their own."""

    def __init__(self, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.operands = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.operands)


def mean_square(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return x.pow(2).mean(dim, keepdim=True)


def annotated_transformer(x: torch.Tensor, a_2: torch.Tensor, b_2: torch.Tensor) -> torch.Tensor:
    return a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + b_2


def root_and_eps(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return g * (x / (mean_square(x).sqrt() + 1e-8))


def scale_norm(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return g * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5)


def x_transformers(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * g


def channels_of_an_image(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    mean = x.mean(1, keepdim=True)
    centred = x - mean
    return gamma[:, None, None] * (centred / torch.sqrt(mean_square(centred, 1) + 1e-6)) + beta[:, None, None]


def partial(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return g * (x * torch.rsqrt(mean_square(x[..., :6]) + 1e-6))


def completed(x: torch.Tensor) -> torch.Tensor:
    squares = x.pow(2).sum(-1, keepdim=True) + x.sum(-1, keepdim=True).pow(2)
    return x * torch.rsqrt(squares / (x.shape[-1] + 1) + 1e-6)


H = ((24,), (24,))
HAND = {
    "annotated transformer": (
        Lambda(annotated_transformer, *H),
        {"center": True, "statistic": "variance", "biased": False, "eps": 1e-6, "eps_inside": False, "bias": True},
    ),
    "eps outside the root": (Lambda(root_and_eps, H[0]), {"eps": 1e-8, "eps_inside": False, "kind": "rms"}),
    "scale norm": (Lambda(scale_norm, ()), {"kind": "scale", "weight": "scalar", "eps": 1e-5, "eps_clamp": True}),
    "x-transformers": (Lambda(x_transformers, H[0]), {"kind": "scale", "factor": 24**0.5, "eps": 1e-12}),
    "channels of an image": (Lambda(channels_of_an_image, *H), {"kind": "layer", "axes": (-3,), "bias": True}),
    "partial": (Lambda(partial, H[0]), {"partial": 0.25, "eps": 1e-6}),
    "completed": (Lambda(completed), {"statistic": "completed", "eps": 1e-6, "weight": "none"}),
}

REFUSED = {
    "linear": (nn.Linear(24, 24), "no statistic of its input divides it: multiplying the input by 4"),
    "dynamic tanh": (Lambda(lambda x, a, g: g * torch.tanh(a * x), (1,), H[0]), "on its own input element alone"),
    "identity": (nn.Identity(), "on its own input element alone"),
    "dropout": (nn.Dropout(), "two calls on the same input give two results"),
    "softmax": (nn.Softmax(-1), "no statistic of its input divides it"),
    "local response": (nn.LocalResponseNorm(3), "no statistic of its input divides it"),
    "constant": (Lambda(lambda x, g: torch.ones_like(x) * g, H[0]), "does not depend on its input"),
    "mean of sizes": (
        Lambda(lambda x, g: g * x / (x.abs().mean(-1, keepdim=True) + 1e-6), H[0]),
        "no known statistic divides it; closest is mean_square",
    ),
    "norm and relu": (nn.Sequential(nn.LayerNorm(24), nn.ReLU()), "one gain and one shift"),
    "norm and linear": (nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24)), r"has gains \['0.weight', '1.weight'\]"),
    "exponential gain": (Lambda(lambda x, g: root_and_eps(x, g.exp()), H[0]), "is no gain: the output is not linear"),
    "two guards": (
        Lambda(lambda x, g: g * (x / ((mean_square(x) + 1e-6).sqrt() + 1e-3)), H[0]),
        "its eps is neither added",
    ),
    "wide output": (
        Lambda(lambda x, g: root_and_eps(x.double(), g.double()), H[0]),
        "the output of a bfloat16 input with float32 parameters is float64, not float32",
    ),
    "embedding": (nn.Embedding(5, 5), "no input of shape .* gives an output of the same shape"),
    "root alone": (Lambda(lambda x: torch.rsqrt(mean_square(x) + 1e-6)), r"it returns shape \[.*1\]"),
}

NAMED_BY_DEFAULT = {
    "llama.LlamaRMSNorm",
    "llama4.Llama4TextRMSNorm",
    "olmo2.Olmo2RMSNorm",
    "gemma.GemmaRMSNorm",
    "gemma3n.Gemma3nRMSNorm",
    "t5.T5LayerNorm",
    "cohere.CohereLayerNorm",
    "nemotron.NemotronLayerNorm1P",
    "deberta.DebertaLayerNorm",
    "imagegpt.ImageGPTLayerNorm",
    "llama4.Llama4TextL2Norm",
    "deepseek_v4.DeepseekV4UnweightedRMSNorm",
    "pocket_tts.PocketTTSTimestepNorm",
    "mamba2.MambaRMSNormGated",
    "qwen3_next.Qwen3NextRMSNormGated",
    "kimi_linear.KimiLinearRMSNormGated",
    "detr.DetrFrozenBatchNorm2d",
    "muse_spark.MuseSparkTextInputScaledRMSNorm",
}
# In the layout of x alone; the rest needs other inputs, or moves axes around torch's kernel, whose bits no spec tells.
CALLS = ("plain", "gated", "frozen", "heads", "channels", "wrapped", "grouped")
WORKS_ON = {"heads": (7, GROUPS, 4, WIDTH), "channels": (2, WIDTH, 3, 5), "grouped": (2, WIDTH, 3, 5)}
# Its own words differ by dtype: half-precision parameters in bfloat16, float32 ones in float16.
NOT_ONE_SPEC = {"esm.EsmFoldLayerNorm"}
CLASSES = [(norm, name) for norm in NORMS if norm.call in CALLS for name in norm.names if name not in NOT_ONE_SPEC]


@pytest.mark.parametrize(("module", "spec"), TORCH.values(), ids=TORCH)
def test_names_the_norms_of_torch_to_the_bit(module: nn.Module, spec: NormSpec) -> None:
    match = match_of(module)
    assert match.spec == spec
    assert match.exact == (True,) * len(match.exact)
    assert len(match.exact) >= 6


def test_names_a_batch_norm_without_gain_and_shift() -> None:
    # not to the bit: in half precision torch's rounding depends on the dtype of the running statistics
    spec = convention_of(nn.BatchNorm3d(24, affine=False))
    assert spec == replace(BATCH, axes=VOLUME, weight=Weight.NONE, bias=False)


@pytest.mark.parametrize(("module", "facts"), HAND.values(), ids=HAND)
def test_names_norms_written_by_hand(module: nn.Module, facts: dict[str, object]) -> None:
    spec = convention_of(module)
    assert {name: getattr(spec, name) for name in facts} == facts


@pytest.mark.parametrize(("module", "why"), REFUSED.values(), ids=REFUSED)
def test_refuses_what_is_no_known_norm_and_says_why(module: nn.Module, why: str) -> None:
    with pytest.raises(NotKnown, match=why):
        convention_of(module)


def named(norm: Norm, name: str) -> None:
    """Assert that a class of transformers is named as the spec it is known to follow, to the bit."""
    module = class_of(name)(*norm.args, **dict(norm.kwargs))
    x = torch.zeros(WORKS_ON.get(norm.call, (5, 3, WIDTH)))
    example = (x, x) if norm.call == "gated" else None if norm.call == "frozen" else x
    match = match_of(module.norm if norm.call == "wrapped" else module, example=example)  # type: ignore[arg-type]
    assert replace(match.spec, eps=norm.spec.eps, axes=norm.spec.axes) == replace(norm.spec, momentum=None)
    assert all(match.exact)


@pytest.mark.parametrize(("norm", "name"), [each for each in CLASSES if each[1] in NAMED_BY_DEFAULT])
def test_names_the_conventions_of_model_families_to_the_bit(norm: Norm, name: str) -> None:
    named(norm, name)


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "name"), CLASSES, ids=[f"{norm.call}-{name}" for norm, name in CLASSES])
def test_names_every_norm_class_of_transformers_to_the_bit(norm: Norm, name: str) -> None:
    named(norm, name)


def test_names_the_family() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    assert {"gemma", "gemma2", "recurrent-gemma"} <= set(families_of(convention_of(GemmaRMSNorm(24))))
    assert families_of(NormSpec(eps=0.5, factor=3.0)) == ()


def test_names_our_frozen_batch_norm_to_the_bit() -> None:
    match = match_of(FrozenBatchNorm(24))
    assert (match.spec.form, match.spec.running) == (Form.FOLDED, True)
    assert all(match.exact)


@pytest.mark.parametrize("gate", [Gate.BEFORE, Gate.AFTER])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_names_gates(gate: Gate, activation: str) -> None:
    spec = NormSpec(gate=gate, gate_activation=activation, cast=Cast.AFTER_WEIGHT, groups=4)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(24))

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return eager(spec, x, self.scale, gate=gate)

    assert convention_of(Gated()) == spec


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3, 3.5e-4])
@pytest.mark.parametrize(("inside", "clamp"), [(True, False), (False, False), (False, True)])
def test_measures_the_size_and_the_place_of_eps(eps: float, inside: bool, clamp: bool) -> None:
    spec = NormSpec(eps=eps, eps_inside=inside, eps_clamp=clamp, cast=Cast.AFTER_WEIGHT)
    found = convention_of(Lambda(lambda x, g: eager(spec, x, g), H[0]))
    assert found.eps == eps
    assert eps == 0 or (found.eps_inside, found.eps_clamp) == (inside, clamp)


@pytest.mark.parametrize("offset", [0.0, 1.0, 0.5, -1.0])
def test_measures_what_is_added_to_the_gain(offset: float) -> None:
    spec = NormSpec(weight_offset=offset, cast=Cast.AFTER_WEIGHT)
    assert convention_of(Lambda(lambda x, g: eager(spec, x, g), H[0])) == spec


def test_leaves_the_module_and_the_random_state_as_found() -> None:
    calls: list[object] = []
    module = nn.Sequential(nn.BatchNorm1d(24)).train()
    module(torch.randn(5, 24)).sum().backward()
    module[0].register_forward_hook(lambda *given: calls.append(given))
    before, grads = copy.deepcopy(module.state_dict()), [p.grad for p in module.parameters()]
    state = torch.get_rng_state()
    assert convention_of(module).kind is Kind.BATCH
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(p.grad is grad for p, grad in zip(module.parameters(), grads, strict=True))
    assert module.training
    assert calls == []


def test_takes_the_size_or_an_example_where_no_parameter_tells() -> None:
    module = nn.LayerNorm(40, elementwise_affine=False)
    with pytest.raises(NotKnown, match="pass size= or example="):
        convention_of(module)
    assert convention_of(module, 40) == convention_of(module, example=torch.zeros(2, 40))
    assert convention_of(nn.GroupNorm(3, 6), example=torch.zeros(2, 6, 4, 5)).axes == (-3, -2, -1)


def test_says_how_the_output_of_half_precision_differs() -> None:
    def rounded_twice(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        y = eager(NormSpec(cast=Cast.AFTER_WEIGHT), x, g)
        return y.half() if x.dtype is torch.bfloat16 else y

    with pytest.raises(NotKnown, match=r"closest is rms norm over axes \[-1\], eps 1e-06 inside.* is float16, not"):
        convention_of(Lambda(rounded_twice, H[0]))


def test_refuses_a_module_without_numbers() -> None:
    with pytest.raises(NotKnown, match="meta device"):
        convention_of(nn.LayerNorm(4, device="meta"))


def test_a_promoted_output_is_named() -> None:
    spec = NormSpec(cast=Cast.BEFORE_WEIGHT, out_dtype=PROMOTED)
    assert convention_of(Lambda(lambda x, g: eager(spec, x, g), H[0])) == spec
