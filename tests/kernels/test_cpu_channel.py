"""LayerNorm and RMSNorm over channels in compiled code, held to float64, to eager, and to themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normwise import kernels
from normwise.functional.hidden import LAYER, RMS
from normwise.layers import ChannelLayerNorm
from normwise.spec import Cast, NormSpec, Statistic
from tests.kernels.cpu_cases import needs_library
from tests.kernels.group_cases import DTYPES, as_eager, bits, laid, poisoned, results, threads
from tests.nearness import worse
from tests.strategies import seeds

pytestmark = needs_library

SPECS = {
    "layer": LAYER,
    "rms": replace(RMS, eps=1e-6),
    "llama": NormSpec(cast=Cast.BEFORE_WEIGHT, out_dtype="promoted"),
    "gemma": NormSpec(weight_offset=1.0),
    "l2": NormSpec(statistic=Statistic.L2, eps=1e-6, eps_inside=False, eps_clamp=True),
    "outside": NormSpec(eps=1e-6, eps_inside=False),
}


def _given(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(size, generator=generator) for size in (shape, shape[1], shape[1], shape))
    x, weight, bias, upstream = (each.to(dtype) for each in drawn)
    return x + 0.5, weight, bias, upstream


def _over_channels(name: str, ndim: int) -> NormSpec:
    return replace(SPECS[name], axes=(1 - ndim,))


@settings(max_examples=120, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 4), st.integers(1, 150), st.integers(1, 20), st.integers(1, 20)),
    name=st.sampled_from(list(SPECS)),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["contiguous", "last", "offset", "strided"]),
    wide=st.booleans(),
    affine=st.booleans(),
    seed=seeds,
)
def test_no_farther_from_float64_than_eager(
    shape: tuple[int, ...], name: str, dtype: torch.dtype, layout: str, wide: bool, affine: bool, seed: int
) -> None:
    x, weight, bias, upstream = _given(shape, dtype, seed)
    held = torch.float32 if wide and dtype in (torch.float16, torch.bfloat16) else dtype
    spec = _over_channels(name, 4)
    parameters = (weight.to(held) if affine else None, bias.to(held) if affine and spec.bias else None)
    if name == "l2":  # a gradient at the clamp is one of two
        x = x + 0.1
    poisoned(shape, dtype)
    found, eager, truth = as_eager(spec, laid(x, layout), *parameters, upstream)
    if shape[1] == 1 and spec.center:
        assert not found["dx"].any()
        return
    assert worse(found, eager, truth) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["layer", "rms"])
@pytest.mark.parametrize("shape", [(3, 96, 33, 29), (1, 700, 40, 40), (9, 40, 7, 7)])
def test_the_same_bits_for_any_number_of_threads(shape: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    x, weight, bias, upstream = _given(shape, dtype)
    spec = _over_channels(name, 4)
    found = []
    for count in (1, 2, 4, 8):
        with threads(count):
            poisoned(shape, dtype)
            found.append(bits(results("cpu", spec, x, weight, bias if spec.bias else None, upstream)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_a_position_does_not_depend_on_the_others(name: str) -> None:
    x, weight, _, upstream = _given((5, 24, 31, 37))
    spec = _over_channels(name, 4)
    whole = results("cpu", spec, x, weight, None, upstream)
    for part in ((slice(2, 3), slice(None)), (slice(None), slice(None), slice(3, 10), slice(5, 22))):
        alone = results("cpu", spec, x[part].contiguous(), weight, None, upstream[part])
        assert torch.equal(alone["y"], whole["y"][part])
        assert torch.equal(alone["dx"], whole["dx"][part])


@pytest.mark.parametrize("name", ["layer", "rms", "l2"])
@pytest.mark.parametrize("scale", [1e-18, 2.0**41, 1e25, 1e37])
def test_large_and_small_positions_as_eager(scale: float, name: str) -> None:
    x, weight, bias, upstream = _given((2, 12, 9, 11))
    x[:, :, ::2, ::3] *= scale
    spec = _over_channels(name, 4)
    found, eager, truth = as_eager(spec, x, weight, bias if spec.bias else None, upstream)
    for key, value in found.items():
        assert value.isfinite().all(), key
        size = truth[key].abs().max().item()
        far = (eager[key].double() - truth[key]).abs().max().item()
        assert (value.double() - truth[key]).abs().max().item() <= 2 * far + 1e-6 * size, key


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_at_its_position(dtype: torch.dtype, bad: float) -> None:
    x, weight, bias, _ = _given((2, 5, 7, 9), dtype)
    spec = _over_channels("layer", 4)
    clean = kernels.forward(spec, x, weight, bias, kernel="cpu")
    x[1, 3, 2, 2] = bad
    y = kernels.forward(spec, x, weight, bias, kernel="cpu")
    assert y[1, :, 2, 2].isnan().all()
    clean[1, :, 2, 2] = y[1, :, 2, 2] = 0
    assert torch.equal(y, clean)


def test_channels_last_stays_and_is_a_norm_of_rows() -> None:
    x, weight, bias, upstream = _given((2, 6, 5, 4))
    x = laid(x, "last")
    found = results("cpu", _over_channels("layer", 4), x, weight, bias, upstream)
    assert found["y"].stride() == x.stride() == found["dx"].stride()
    rows = torch.nn.functional.layer_norm(x.movedim(1, -1), (6,), weight, bias, LAYER.eps or 0.0)
    torch.testing.assert_close(found["y"], rows.movedim(-1, 1))


@pytest.mark.parametrize("axis", [-2, -3, -4])
def test_any_axis_but_the_last(axis: int) -> None:
    x = torch.randn(3, 5, 6, 7)
    weight, upstream = torch.randn(x.shape[axis]), torch.randn(x.shape)
    found, eager, truth = as_eager(replace(SPECS["rms"], axes=(axis,)), x, weight, None, upstream)
    assert worse(found, eager, truth) == []


@pytest.mark.parametrize("name", ["layer", "rms", "gemma", "outside"])
def test_derivatives_of_any_order(name: str) -> None:
    x, weight, bias, _ = _given((2, 4, 3, 2), torch.float64)
    spec = _over_channels(name, 4)
    leaves = [each.requires_grad_() for each in ((x, weight, bias) if spec.bias else (x, weight))]

    def norm(*leaves: torch.Tensor) -> torch.Tensor:
        return kernels.forward(spec, *leaves, kernel="cpu")

    assert torch.autograd.gradcheck(norm, leaves)
    assert torch.autograd.gradgradcheck(norm, leaves)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    x, weight, bias, upstream = _given((2, 4, 5, 6))
    spec = _over_channels("layer", 4)
    kept, whole = upstream.clone(), results("cpu", spec, x, weight, bias, upstream)
    assert torch.equal(kept, upstream)
    for name, index in (("dx", 0), ("dweight", 1), ("dbias", 2)):
        leaves = [each.detach() for each in (x, weight, bias)]
        leaves[index].requires_grad_()
        kernels.forward(spec, *leaves, kernel="cpu").backward(upstream)
        assert torch.equal(leaves[index].grad, whole[name])  # type: ignore[arg-type]


def test_what_is_left_to_eager_says_why() -> None:
    x, weight, bias, _ = _given((2, 4, 5, 6))
    spec = _over_channels("layer", 4)
    assert "mask" in kernels.refusals(spec, x, weight, bias, torch.ones(2, 1, 5, 6, dtype=torch.bool))["cpu"]
    assert "residual" in kernels.refusals(spec, x, weight, bias, residual=x)["cpu"]
    assert "shape" in kernels.refusals(spec, x, weight[:2], bias[:2])["cpu"]
    assert "axes" in kernels.refusals(spec, x[0, 0], weight, bias)["cpu"]
    for change in ({"eps": 0.0}, {"form": "welford"}, {"form": "division"}, {"biased": False}, {"weight": "scalar"}):
        assert "cpu" in kernels.refusals(replace(spec, **change), x, weight, bias), change


# dynamic shapes under AOT take most of a minute and ask nothing that these do not
opcheck = partial(torch.library.opcheck, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_the_operators_keep_the_rules_of_the_dispatcher() -> None:
    x, weight, bias, upstream = _given((2, 4, 5, 6))
    ops = torch.ops.normwise
    for each, code in ((x, 1), (x.bfloat16(), 8)):
        args = (each, weight, bias, -3, code, 1e-5, 0.0)
        opcheck(ops.norm_channels.default, args)
        opcheck(ops.norm_channels_saving.default, args)
        y, stats = ops.norm_channels_saving(*args)
        back = (upstream.to(y.dtype), each, stats, weight, -3, code, 1e-5, 0.0, 7)
        opcheck(ops.norm_channels_backward.default, back)


def test_compiled_by_torch() -> None:
    x = torch.randn(2, 4, 5, 6)
    layer = ChannelLayerNorm(4)
    norm = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(norm(x), layer(x))
    x.requires_grad_()
    inputs = (x, *layer.parameters())
    found, wanted = (torch.autograd.grad(each(x).pow(3).sum(), inputs) for each in (norm, layer))
    torch.testing.assert_close(found, wanted)
