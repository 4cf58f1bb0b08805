"""What a call of a norm over hidden axes costs and which kernel serves it. Legend: rows [8, 64]."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import normwise.functional as nf
from normwise import kernels, layers
from normwise.functional import hidden
from normwise.kernels import cpu, eager
from normwise.spec import NormSpec

X, GATE, RESIDUAL = (torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
ONES, ZEROS = torch.ones(64), torch.zeros(64)
SEQUENCE = torch.randn(2, 5, 4, 64, generator=torch.Generator().manual_seed(3))  # [B, T, heads, D]

compiled = pytest.mark.skipif(cpu.unavailable() is not None, reason="no compiled kernel here")


def layer_calls() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """Return layers of every kind over hidden axes, and what each is called with."""
    return {
        "RMSNorm": (layers.RMSNorm(64), (X,)),
        "RMSNorm of two axes": (layers.RMSNorm((8, 64)), (X,)),
        "LayerNorm": (layers.LayerNorm(64), (X,)),
        "LayerNorm without gain": (layers.LayerNorm(64, elementwise_affine=False), (X,)),
        "T5": (layers.RMSNorm.like("t5", 64), (X,)),
        "ScaleNorm": (layers.ScaleNorm(64), (X,)),
        "L2Norm": (layers.L2Norm(), (X,)),
        "PartialRMSNorm": (layers.PartialRMSNorm(64), (X,)),
        "CenteredRMSNorm": (layers.CenteredRMSNorm(64), (X,)),
        "AddRMSNorm": (layers.AddRMSNorm(64), (X, RESIDUAL)),
        "AddLayerNorm": (layers.AddLayerNorm(64), (X, RESIDUAL)),
        "GatedRMSNorm": (layers.GatedRMSNorm(64), (X, GATE)),
        "ModulatedLayerNorm": (layers.ModulatedLayerNorm(64), (X, GATE, GATE)),
        "ModulatedRMSNorm": (layers.ModulatedRMSNorm(64), (X, GATE)),
        "AdaLayerNorm": (layers.AdaLayerNorm(64, 3), (X, torch.ones(8, 3))),
        "AdaRMSNorm": (layers.AdaRMSNorm(64, 3), (X, torch.ones(8, 3))),
        "ChannelLayerNorm": (layers.ChannelLayerNorm(5), (SEQUENCE,)),
        "ChannelRMSNorm": (layers.ChannelRMSNorm(5), (SEQUENCE,)),
        "QKNorm": (layers.QKNorm(64), (SEQUENCE, SEQUENCE)),
        "QKNorm over all heads": (layers.QKNorm(64, 4, over="all_heads"), (SEQUENCE, SEQUENCE)),
        "Norm": (layers.Norm(NormSpec(), 64), (X,)),
    }


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda **more: nf.rms_norm(X, 64, ONES, **more),
    "rms_norm of a tuple": lambda **more: nf.rms_norm(X, (64,), ONES, 1e-6, **more),
    "rms_norm of two axes": lambda **more: nf.rms_norm(X, (8, 64), **more),
    "layer_norm": lambda **more: nf.layer_norm(X, 64, ONES, ZEROS, **more),
    "scale_norm": lambda **more: nf.scale_norm(X, torch.tensor(2.0), **more),
    "l2_norm": lambda **more: nf.l2_norm(X, **more),
    "lp_norm": lambda **more: nf.lp_norm(X, **more),
    "partial_rms_norm": lambda **more: nf.partial_rms_norm(X, ONES, **more),
    "centered_rms_norm": lambda **more: nf.centered_rms_norm(X, ONES, **more),
    "gated_rms_norm": lambda **more: nf.gated_rms_norm(X, GATE, ONES, **more),
    "modulated_layer_norm": lambda **more: nf.modulated_layer_norm(X, 64, GATE, GATE, **more),
    "modulated_rms_norm": lambda **more: nf.modulated_rms_norm(X, 64, GATE, **more),
    "add_rms_norm": lambda **more: nf.add_rms_norm(X, RESIDUAL, 64, ONES, **more),
    "add_layer_norm": lambda **more: nf.add_layer_norm(X, RESIDUAL, 64, ONES, ZEROS, **more),
}
SPEC = NormSpec()
each_layer = pytest.mark.parametrize("name", list(layer_calls()))
each_function = pytest.mark.parametrize("name", list(FUNCTIONS))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note every spec that is built and every plan that is made."""
    noted: list[str] = []
    contradictions = NormSpec._contradictions

    def building(spec: NormSpec) -> Iterator[str]:
        noted.append("a spec")
        return contradictions(spec)

    def planning(family: Callable[[NormSpec], Any]) -> Callable[[NormSpec], Any]:
        return lambda spec: noted.append("a plan") or family(spec)

    monkeypatch.setattr(NormSpec, "_contradictions", building)
    monkeypatch.setattr(cpu, "FAMILIES", tuple(planning(family) for family in cpu.FAMILIES))
    return noted


@each_layer
def test_a_repeated_call_of_a_layer_builds_neither_spec_nor_plan(name: str, made: list[str]) -> None:
    layer, operands = layer_calls()[name]
    layer(*operands)
    made.clear()
    layer(*operands)
    assert made == []


@each_function
def test_a_repeated_call_of_a_function_builds_neither_spec_nor_plan(name: str, made: list[str]) -> None:
    FUNCTIONS[name]()
    made.clear()
    FUNCTIONS[name]()
    assert made == []


# -- the short way and the long way -------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECS = {
    "torch's RMSNorm": hidden.RMS,
    "torch's LayerNorm": hidden.LAYER,
    "llama": layers.FAMILIES["llama"],
    "gemma": layers.FAMILIES["gemma"],
    "t5": layers.FAMILIES["t5"],
    "cohere": layers.FAMILIES["cohere"],
    "eps of 0": NormSpec(eps=0.0),
    "scale": layers.ScaleNorm(64).spec,
    "two axes": NormSpec(axes=(-2, -1)),
    "partial": NormSpec(partial=0.5),
    "half": NormSpec(stats_dtype=None),
}


def parameters(spec: NormSpec, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return random gain and shift, which want gradients."""
    generator = torch.Generator().manual_seed(7)
    shape = {"scalar": (), "vector": (8, 64) if len(spec.axes) == 2 else (64,), "none": (64,)}[spec.weight]
    gain = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    return gain, torch.randn(shape, generator=generator).to(dtype).requires_grad_() if spec.bias else None


def leaf(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True).requires_grad_()


@compiled
@pytest.mark.parametrize("held", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_an_attempt_gives_what_the_cpu_kernel_gives_or_nothing(
    name: str, dtype: torch.dtype, held: torch.dtype
) -> None:
    spec = SPECS[name]
    gain, shift = parameters(spec, held)
    x, residual = leaf(X, dtype), leaf(RESIDUAL, dtype)
    refused = cpu.refusal(spec, x, gain, shift, None)
    y = kernels.attempt(spec, 64, x, gain, shift)
    seldom = spec.stats_dtype is None or (spec.eps is None and dtype is torch.float64)
    if refused is not None or spec.axes != (-1,) or seldom:
        assert y is None
        assert kernels.attempt(spec, 64, x, gain, shift, residual) is None
        return
    operands = [each for each in (x, gain, shift) if each is not None]
    wanted = cpu.forward(spec, x, gain, shift)
    assert y is not None
    assert torch.equal(y, wanted)
    for one, other in zip(*(torch.autograd.grad(each.sum(), operands) for each in (y, wanted)), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        again = kernels.attempt(spec, 64, x, gain, shift)
    assert again is not None
    assert torch.equal(again, wanted)
    assert not again.requires_grad
    both = kernels.attempt(spec, 64, x, gain, shift, residual)
    if cpu.refusal(spec, x, gain, shift, None, residual=residual) is not None:
        assert both is None
        return
    assert both is not None
    for one, other in zip(both, cpu.forward_added(spec, x, residual, gain, shift), strict=True):
        assert torch.equal(one, other)


@compiled
@pytest.mark.parametrize(
    ("size", "x", "gain"),
    [
        (63, X, ONES[:63]),
        (64, X, ONES[:1]),
        (64, [1.0], None),
        (64, X.int(), ONES),
        (64, torch.tensor(1.0), ONES),
        (64, X.to_sparse(), None),
        (64, X.to("meta"), None),
        (64, X, ONES.to("meta")),
        (1, X[:, :1], ONES[:1]),
        (64, X.double(), ONES),
        (64, X.half(), ONES.bfloat16()),
        (64, X.bfloat16(), ONES.double()),
    ],
    ids=[
        *("size", "gain", "list", "integers", "no axis", "sparse", "meta", "gain on meta", "one element"),
        *("a gain narrower than x", "two half precisions", "a gain wider than float32"),
    ],
)
def test_an_attempt_at_anything_else_leaves_it_to_the_checks(size: int, x: Any, gain: torch.Tensor | None) -> None:
    assert kernels.attempt(hidden.LAYER, size, x, gain, None) is None
    assert kernels.attempt(hidden.LAYER, size, x, gain, None, x) is None


@compiled
@pytest.mark.parametrize("residual", [X[:4], X.double(), X.to("meta"), X.to_sparse(), None], ids=str)
def test_an_attempt_at_an_odd_residual_leaves_it_to_the_checks(residual: torch.Tensor | None) -> None:
    assert kernels.attempt(hidden.RMS, 64, X, ONES, None, residual) is None


@compiled
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "LayerNorm without gain", "T5", "ScaleNorm", "AddRMSNorm"])
def test_ordinary_calls_of_layers_take_the_short_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, operands = layer_calls()[name]
    wanted = layer(*operands)
    monkeypatch.setattr(kernels, "forward", None)
    monkeypatch.setattr(kernels, "forward_added", None)
    found = layer(*operands)
    for one, other in zip(*((y if isinstance(y, tuple) else (y,)) for y in (found, wanted)), strict=True):
        assert torch.equal(one, other)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_a_parametrized_gain_counts() -> None:
    layer = layers.RMSNorm(64)
    plain = layer(X)
    parametrize.register_parametrization(layer, "weight", Doubled())
    assert torch.equal(layer(X), 2 * plain)


def test_a_gain_that_is_an_attribute_of_a_replica_counts() -> None:
    layer = layers.RMSNorm(64)._replicate_for_data_parallel()
    layer._parameters["bias"] = None  # as torch.nn.parallel.replicate does
    layer.weight = 2 * ONES  # type: ignore[assignment]
    assert torch.equal(layer(X), 2 * layers.RMSNorm(64)(X))


# -- the kernel is the caller's choice ----------------------------------------------------------


@each_layer
def test_a_layer_keeps_its_kernel(name: str) -> None:
    layer, operands = layer_calls()[name]
    assert "kernel" not in repr(layer)
    for each in layer.modules():
        if hasattr(each, "kernel"):
            each.kernel = "eager"  # type: ignore[assignment]
    wanted = layer(*operands)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert "kernel='eager'" in repr(copied)
        found = copied(*operands)
        for one, other in zip(*((y if isinstance(y, tuple) else (y,)) for y in (found, wanted)), strict=True):
            assert torch.equal(one, other)


@compiled
def test_the_kernel_of_a_layer_is_the_one_that_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "forward", lambda *_, **__: "eager")
    monkeypatch.setattr(cpu, "forward", lambda *_, **__: "cpu")
    for kernel in ("eager", "cpu"):
        assert layers.RMSNorm(64, kernel=kernel)(X) == kernel
        assert layers.LayerNorm.like("gpt2", 64, kernel=kernel)(X) == kernel
        assert layers.QKNorm(64, kernel=kernel)(SEQUENCE, SEQUENCE) == (kernel, kernel)
        assert nf.rms_norm(X, 64, kernel=kernel) == kernel  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    "make",
    [
        lambda kernel: layers.RMSNorm(64, kernel=kernel),
        lambda kernel: layers.LayerNorm(64, kernel=kernel),
        lambda kernel: layers.ScaleNorm(64, kernel=kernel),
        lambda kernel: layers.L2Norm(kernel=kernel),
        lambda kernel: layers.PartialRMSNorm(64, kernel=kernel),
        lambda kernel: layers.CenteredRMSNorm(64, kernel=kernel),
        lambda kernel: layers.AddRMSNorm(64, kernel=kernel),
        lambda kernel: layers.AddLayerNorm(64, kernel=kernel),
        lambda kernel: layers.GatedRMSNorm(64, kernel=kernel),
        lambda kernel: layers.ModulatedLayerNorm(64, kernel=kernel),
        lambda kernel: layers.ModulatedRMSNorm(64, kernel=kernel),
        lambda kernel: layers.AdaLayerNorm(64, 3, kernel=kernel),
        lambda kernel: layers.AdaRMSNorm(64, 3, kernel=kernel),
        lambda kernel: layers.ChannelLayerNorm(5, kernel=kernel),
        lambda kernel: layers.ChannelRMSNorm(5, kernel=kernel),
        lambda kernel: layers.QKNorm(64, kernel=kernel),
        lambda kernel: layers.Norm(SPEC, 64, kernel=kernel),
    ],
)
def test_an_unknown_kernel_is_refused_where_it_is_chosen(make: Callable[[str], nn.Module]) -> None:
    assert "kernel='eager'" in repr(make("eager"))
    with pytest.raises(ValueError, match=r"kernel='fast' is none of auto, .*; use kernel='auto'"):
        make("fast")


@each_function
def test_functions_take_a_kernel(name: str) -> None:
    auto, defined = FUNCTIONS[name](), FUNCTIONS[name](kernel="eager")
    for one, other in zip(*((y if isinstance(y, tuple) else (y,)) for y in (auto, defined)), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-22, atol=2**-22)
    with pytest.raises(ValueError, match="kernel='fast' is none of auto"):
        FUNCTIONS[name](kernel="fast")


# -- the sum of an added norm -------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "eager"])
@pytest.mark.parametrize("wanted", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("other", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_added_norm_is_the_norm_of_the_sum_in_the_dtype_asked_for(
    dtype: torch.dtype, other: torch.dtype, wanted: torch.dtype | None, kernel: str
) -> None:
    x, residual = X.to(dtype), RESIDUAL.to(other)
    layer = layers.AddRMSNorm(64, dtype=dtype, residual_dtype=wanted, kernel=kernel)
    stream = wanted or torch.promote_types(dtype, other)
    summed = x.to(stream) + residual.to(stream)
    y, found = layer(x, residual)
    assert torch.equal(found, summed)
    assert found.dtype is stream
    defined = eager.forward(layer.spec, summed, layer.weight).to(dtype)
    assert y.dtype is dtype
    torch.testing.assert_close(y, defined, rtol=torch.finfo(dtype).eps, atol=0.0)
    by_function = nf.add_rms_norm(x, residual, 64, layer.weight, residual_dtype=wanted, kernel=kernel)
    assert torch.equal(by_function[0], y)
    assert torch.equal(by_function[1], found)


@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_the_sum_wants_a_gradient_only_where_an_input_does(kernel: str) -> None:
    layer = layers.AddRMSNorm(64, kernel=kernel)
    y, summed = layer(X, RESIDUAL)
    assert y.requires_grad
    assert not summed.requires_grad
    y.sum().backward()
    assert layer.weight is not None
    assert layer.weight.grad is not None
    assert layer(X, leaf(RESIDUAL, torch.float32))[1].requires_grad
