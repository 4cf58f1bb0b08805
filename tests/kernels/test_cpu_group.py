"""GroupNorm and InstanceNorm in compiled code, held to float64, to eager, and to themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import normwise.functional as nf
from normwise import kernels
from normwise.functional.batch import instance_spec
from normwise.functional.group import group_spec
from tests.kernels.cpu_cases import needs_library
from tests.kernels.group_cases import DTYPES, as_eager, bits, laid, poisoned, results, threads
from tests.nearness import worse
from tests.strategies import seeds

pytestmark = needs_library

LAYOUTS = ("contiguous", "last", "offset", "strided")


def _spec(groups: int | None, ndim: int) -> kernels.eager.NormSpec:
    return instance_spec(1e-5, ndim) if groups is None else group_spec(groups, 1e-5, ndim)


def _given(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(size, generator=generator) for size in (shape, shape[1], shape[1], shape))
    x, weight, bias, upstream = (each.to(dtype) for each in drawn)
    return x + 0.5, weight, bias, upstream


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int | None, tuple[int, ...]]:
    width, groups = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    spatial = draw(st.lists(st.integers(1, 45), min_size=0, max_size=2))
    shape = (draw(st.integers(0, 4)), width * groups, *spatial)
    return (None if draw(st.booleans()) and spatial else groups), shape


@settings(max_examples=120, deadline=None)
@given(
    case=_cases(),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    wide=st.booleans(),
    affine=st.sampled_from(["both", "weight", "bias", "none"]),
    offset=st.sampled_from([0.0, 1.0]),
    shift=st.sampled_from([0.0, -3.0, 1e4]),
    seed=seeds,
)
def test_no_farther_from_float64_than_eager(
    case: tuple[int | None, tuple[int, ...]],
    dtype: torch.dtype,
    layout: str,
    wide: bool,
    affine: str,
    offset: float,
    shift: float,
    seed: int,
) -> None:
    groups, shape = case
    x, weight, bias, upstream = _given(shape, dtype, seed)
    held = torch.float32 if wide and dtype in (torch.float16, torch.bfloat16) else dtype
    x = laid((x + shift).to(dtype), layout)
    spec = replace(_spec(groups, len(shape)), weight_offset=offset)
    parameters = (
        weight.to(held) if affine in ("both", "weight") else None,
        bias.to(held) if affine in ("both", "bias") else None,
    )
    poisoned(shape, dtype)
    found, eager, truth = as_eager(spec, x, *parameters, upstream)
    one = x[0, 0].numel() * (1 if groups is None else shape[1] // groups) == 1 if shape[0] else False
    if not one:  # of a single element only eager's gradient is exactly 0, too
        assert worse(found, eager, truth) == []
    else:
        assert all(each.isfinite().all() for each in found.values())
        assert not found["dx"].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "last"])
@pytest.mark.parametrize(
    ("groups", "shape"),
    [
        (1, (1, 8, 120, 90)),  # one row for many threads
        (2, (3, 6, 70, 131)),
        (8, (5, 64, 9, 9)),
        (None, (3, 5, 200, 301)),
        (4, (300, 24)),
    ],
)
def test_the_same_bits_for_any_number_of_threads(
    groups: int | None, shape: tuple[int, ...], layout: str, dtype: torch.dtype
) -> None:
    x, *rest = _given(shape, dtype)
    x, spec = laid(x, layout), _spec(groups, len(shape))
    found = []
    for count in (1, 2, 4, 8):
        with threads(count):
            poisoned(shape, dtype)
            found.append(bits(results("cpu", spec, x, *rest)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("layout", ["contiguous", "last"])
@pytest.mark.parametrize("groups", [1, 4, None])
def test_a_sample_does_not_depend_on_the_others(groups: int | None, layout: str) -> None:
    x, weight, bias, upstream = _given((7, 8, 61, 83))
    spec = _spec(groups, 4)
    whole = results("cpu", spec, laid(x, layout), weight, bias, upstream)
    for sample in (0, 3, 6):
        part = slice(sample, sample + 1)
        alone = results("cpu", spec, laid(x[part], layout), weight, bias, upstream[part])
        assert torch.equal(alone["y"], whole["y"][part])
        assert torch.equal(alone["dx"], whole["dx"][part])


@pytest.mark.parametrize("layout", ["contiguous", "last"])
@pytest.mark.parametrize("groups", [2, None])
@pytest.mark.parametrize("scale", [1e-18, 2.0**41, 1e25, 1e37])
def test_large_and_small_values_as_eager(scale: float, groups: int | None, layout: str) -> None:
    x, weight, bias, upstream = _given((2, 4, 9, 11))
    x = laid(x * scale, layout)
    found, eager, truth = as_eager(_spec(groups, 4), x, weight, bias, upstream)
    for name, value in found.items():
        assert value.isfinite().all(), name
        size = truth[name].abs().max().item()
        far = (eager[name].double() - truth[name]).abs().max().item()
        assert (value.double() - truth[name]).abs().max().item() <= 2 * far + 1e-6 * size, name


@pytest.mark.parametrize("layout", ["contiguous", "last"])
@pytest.mark.parametrize("value", [0.0, 3.3, 1e4, 3e38])
def test_constant_rows(value: float, layout: str) -> None:
    x = laid(torch.full((2, 6, 5, 7), value), layout)
    weight, bias = torch.randn(6), torch.randn(6)
    found = results("cpu", group_spec(3, 1e-5, 4), x, weight, bias, torch.randn(2, 6, 5, 7))
    assert torch.allclose(found["y"], bias[:, None, None].expand(2, 6, 5, 7), rtol=0, atol=1e-6)
    assert all(each.isfinite().all() for each in found.values())


@pytest.mark.parametrize("layout", ["contiguous", "last"])
def test_an_outlier_where_the_pivot_is_taken(layout: str) -> None:
    x, weight, bias, upstream = _given((2, 4, 16, 16))
    x[0, 0, 0, 0], x[1, 2, 0, 0] = 3e6, -1e7
    found, eager, truth = as_eager(group_spec(2, 1e-5, 4), laid(x, layout), weight, bias, upstream)
    assert worse(found, eager, truth) == []


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layout", ["contiguous", "last"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_group(dtype: torch.dtype, layout: str, bad: float) -> None:
    x, weight, bias, _ = _given((2, 4, 7, 9), dtype)
    clean = kernels.forward(group_spec(2, 1e-5, 4), laid(x, layout), weight, bias, kernel="cpu")
    x[1, 3, 2, 2] = bad
    y = kernels.forward(group_spec(2, 1e-5, 4), laid(x, layout), weight, bias, kernel="cpu")
    assert y[1, 2:].isnan().all()
    assert torch.equal(y[0], clean[0])
    assert torch.allclose(y[1, :2], clean[1, :2])


@pytest.mark.parametrize("shape", [(2, 6, 5, 4), (2, 6, 5, 4, 3)])
def test_channels_last_stays(shape: tuple[int, ...]) -> None:
    x, weight, bias, upstream = _given(shape)
    x = laid(x, "last")
    found = results("cpu", group_spec(2, 1e-5, len(shape)), x, weight, bias, upstream)
    assert found["y"].stride() == x.stride() == found["dx"].stride()


@pytest.mark.parametrize("groups", [2, None])
def test_derivatives_of_any_order(groups: int | None) -> None:
    x, weight, bias, _ = _given((2, 4, 3, 2), torch.float64)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    spec = replace(_spec(groups, 4), weight_offset=1.0)

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return kernels.forward(spec, x, weight, bias, kernel="cpu")

    assert torch.autograd.gradcheck(norm, leaves)
    assert torch.autograd.gradgradcheck(norm, leaves)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    x, weight, bias, upstream = _given((2, 4, 5, 6))
    spec, whole = group_spec(2, 1e-5, 4), results("cpu", group_spec(2, 1e-5, 4), x, weight, bias, upstream)
    for name, index in (("dx", 0), ("dweight", 1), ("dbias", 2)):
        leaves = [each.detach() for each in (x, weight, bias)]
        leaves[index].requires_grad_()
        kernels.forward(spec, *leaves, kernel="cpu").backward(upstream)
        assert torch.equal(leaves[index].grad, whole[name])  # type: ignore[arg-type]


def test_an_incoming_gradient_is_not_written_to() -> None:
    x, weight, bias, upstream = _given((2, 4, 5, 6))
    kept = upstream.clone()
    results("cpu", group_spec(2, 1e-5, 4), x, weight, bias, upstream)
    assert torch.equal(kept, upstream)


@pytest.mark.parametrize("groups", [2, None])
def test_the_moments_are_those_of_eager(groups: int | None) -> None:
    x, weight, bias, _ = _given((3, 4, 6, 7))
    spec = _spec(groups, 4)
    y, found = kernels.forward_and_moments(spec, x, weight.requires_grad_(), bias, kernel="cpu")
    wanted_y, wanted = kernels.forward_and_moments(spec, x, weight, bias, kernel="eager")
    torch.testing.assert_close(y, wanted_y)
    assert found.mean is not None
    assert wanted.mean is not None
    torch.testing.assert_close(found.mean, wanted.mean)
    torch.testing.assert_close(found.statistic, wanted.statistic)
    assert found.elements == wanted.elements


def test_running_statistics_of_instance_norm() -> None:
    x, weight, bias, _ = _given((3, 4, 6, 7))
    running = torch.zeros(4), torch.ones(4)
    same = torch.zeros(4), torch.ones(4)
    nf.instance_norm(x, *running, weight, bias)
    torch.nn.functional.instance_norm(x, *same, weight, bias)
    torch.testing.assert_close(running, same)


def test_what_is_left_to_eager_says_why() -> None:
    x, weight, bias, _ = _given((2, 4, 5, 6))
    spec = group_spec(2, 1e-5, 4)
    mask = torch.ones(2, 1, 5, 6, dtype=torch.bool)
    found = kernels.forward_and_moments(spec, x)[1]
    assert "padding" in kernels.refusals(spec, x, weight, bias, mask)["cpu"]
    assert "given" in kernels.refusals(spec, x, weight, bias, given=found)["cpu"]
    assert "one number a channel" in kernels.refusals(spec, x, weight[:2], bias)["cpu"]
    assert "one dtype" in kernels.refusals(spec, x.half(), weight, bias.half())["cpu"]
    for change in ({"eps": 0.0}, {"form": "torch"}, {"biased": False}, {"weight": "scalar"}, {"out_dtype": "float32"}):
        assert "cpu" in kernels.refusals(replace(spec, **change), x, weight, bias), change


# dynamic shapes under AOT take most of a minute and ask nothing that these do not
opcheck = partial(torch.library.opcheck, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_the_operators_keep_the_rules_of_the_dispatcher() -> None:
    x, weight, bias, upstream = _given((2, 4, 5, 6))
    ops = torch.ops.normwise
    for layout in ("contiguous", "last"):
        args = (laid(x, layout), weight, bias, 2, 0, 1e-5, 0.0)
        opcheck(ops.norm_groups.default, args)
        opcheck(ops.norm_groups_saving.default, (*args, True))
        stats = ops.norm_groups_saving(*args, False)[1]
        opcheck(ops.norm_groups_backward.default, (upstream, args[0], stats, weight, 2, 0, 0.0, 7))


def test_compiled_by_torch() -> None:
    x, weight, bias, _ = _given((2, 4, 5, 6))
    norm = torch.compile(lambda x: nf.group_norm(x, 2, weight, bias), fullgraph=True, backend="aot_eager")
    assert torch.equal(norm(x), nf.group_norm(x, 2, weight, bias))
    x.requires_grad_()
    (found,), (wanted,) = (torch.autograd.grad(y.pow(3).sum(), x) for y in (norm(x), nf.group_norm(x, 2, weight, bias)))
    torch.testing.assert_close(found, wanted)


def test_moments_compiled_by_torch() -> None:
    x, weight, bias, _ = _given((2, 4, 5, 6))
    x.requires_grad_()
    norm = partial(kernels.forward_and_moments, group_spec(2, 1e-5, 4))
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    (y, found), (same, wanted) = (each(x, weight, bias) for each in (compiled, norm))
    assert torch.equal(y, same)
    assert found.mean is not None
    assert wanted.mean is not None
    assert torch.equal(found.mean, wanted.mean)
    assert torch.equal(found.statistic, wanted.statistic)
    assert not found.mean.requires_grad
    (found,), (wanted,) = (torch.autograd.grad(each.pow(3).sum(), x) for each in (y, same))
    torch.testing.assert_close(found, wanted)
