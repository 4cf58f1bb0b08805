"""Norms over a batch in compiled code, against float64 in plain torch: values, gradients, masks, layouts, threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from normwise import kernels
from normwise.functional import batch_norm
from normwise.functional.batch import BATCH, batch_spec
from normwise.kernels import Moments
from normwise.layers import BatchNorm
from normwise.spec import NormSpec
from normwise.testing.manners import _Poison
from tests.kernels.cpu_cases import needs_library
from tests.nearness import worse
from tests.strategies import seeds

cpu = kernels.cpu
pytestmark = needs_library

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Case(NamedTuple):
    """A call: tensors in one dtype, and what to do with them."""

    spec: NormSpec
    channel: int
    x: torch.Tensor
    dy: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    given: Moments | None

    def in_float64(self) -> Case:
        """Return the same numbers in float64, for plain torch."""
        known = self.given and Moments(_double(self.given.mean), self.given.statistic.double(), 0)
        weight, bias = (None if each is None else each.double() for each in (self.weight, self.bias))
        return self._replace(x=self.x.double(), dy=self.dy.double(), weight=weight, bias=bias, given=known)

    def run(self, kernel: str) -> dict[str, torch.Tensor]:
        """Return output, gradients and moments."""
        inputs = {"dx": self.x, "dweight": self.weight, "dbias": self.bias}
        leaves = {name: each.detach().requires_grad_() for name, each in inputs.items() if each is not None}
        y, found = kernels.forward_and_moments(
            self.spec,
            leaves["dx"],
            leaves.get("dweight"),
            leaves.get("dbias"),
            self.mask,
            given=self.given,
            kernel=kernel,
        )
        grads = torch.autograd.grad(y, list(leaves.values()), self.dy)
        assert found.mean is not None
        moments = {"mean": found.mean.detach(), "variance": found.statistic.detach()}
        return {"y": y.detach(), **dict(zip(leaves, grads, strict=True)), **moments}


def _double(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.double()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "batch_inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "gaps": lambda x: torch.stack((x, x), -1)[..., 0],
    "misaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}


def make(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    channel: int = 1,
    layout: str = "contiguous",
    mask: float | None = None,
    wide: bool = False,
    known: bool = False,
    affine: bool = True,
    offset: float = 0.0,
    seed: int = 0,
) -> Case:
    """Return a case; ``mask`` is the share of real elements, the others hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)

    x, dy, channels = LAYOUTS[layout](random(*shape) * 2 + offset), random(*shape), shape[channel]
    along = [1] * len(shape)
    along[channel] = channels
    real = None
    if mask is not None:
        sizes = [1 if axis == channel else size for axis, size in enumerate(shape)]
        real = torch.rand(sizes, generator=generator) < mask
        x, dy = torch.where(real, x, math.nan), torch.where(real, dy, math.nan)
    sums = torch.float64 if dtype is torch.float64 else torch.float32
    held = sums if wide else dtype
    weight, bias = (random(channels, dtype=held), random(channels, dtype=held)) if affine else (None, None)
    given = Moments(random(*along, dtype=sums), random(*along, dtype=sums).square() + 0.1, 0) if known else None
    return Case(batch_spec(BATCH, len(shape), channel), channel, x, dy, weight, bias, real, given)


def check(case: Case) -> dict[str, torch.Tensor]:
    """Compare with float64, allowing what plain torch is off by, and return what compiled code found."""
    found, plain, truth = case.run("cpu"), case.run("eager"), case.in_float64().run("eager")
    assert not worse(found, plain, truth)
    assert found["y"].stride() == plain["y"].stride()
    if case.mask is not None:
        padding = ~case.mask.expand(case.x.shape)
        assert not found["y"][padding].any()
        assert not found["dx"][padding].any()
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return whether two results are the same bits, NaN included."""
    return all(torch.equal(a[name].nan_to_num(nan=7.0), b[name].nan_to_num(nan=7.0)) for name in a)


@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    inner=st.integers(1, 150),
    channel=st.integers(0, 4),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from([*LAYOUTS]),
    mask=st.sampled_from([None, 0.0, 0.7, 1.0]),
    wide=st.booleans(),
    known=st.booleans(),
    affine=st.booleans(),
    seed=seeds,
)
def test_any_shape_is_as_near_to_float64_as_plain_torch(
    shape: list[int], inner: int, channel: int, seed: int, **options: Any
) -> None:
    sizes = (*shape[:-1], inner)
    check(make(sizes, channel=channel % len(sizes), seed=seed, **options))


SHAPES = {
    "planes": ((6, 5, 70, 90), 1),  # two chunks a plane
    "spans": ((2, 2, 70_001), 1),  # a plane cut into pieces
    "small planes": ((16, 40, 7, 7), 1),
    "columns": ((3000, 70), 1),  # several blocks of rows
    "strips": ((50, 1100), 1),  # more channels than are measured together
    "sequence": ((8, 200, 24), 2),
}


@pytest.mark.parametrize("mask", [None, 0.6])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_large_batches(name: str, dtype: torch.dtype, mask: float | None) -> None:
    shape, channel = SHAPES[name]
    check(make(shape, dtype, channel=channel, mask=mask, wide=True, offset=3.0))


@pytest.mark.parametrize("name", SHAPES)
def test_results_do_not_depend_on_threads(name: str) -> None:
    shape, channel = SHAPES[name]
    case = make(shape, channel=channel, mask=0.6)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4, 8):
            torch.set_num_threads(threads)
            results.append(case.run("cpu"))
    finally:
        torch.set_num_threads(before)
    assert all(same(results[0], each) for each in results[1:])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("mask", [None, 0.6])
def test_every_number_that_is_returned_was_written(name: str, mask: float | None) -> None:
    shape, channel = SHAPES[name]
    case = make(shape, torch.bfloat16, channel=channel, mask=mask)
    expected = case.run("cpu")
    with _Poison():
        found = case.run("cpu")
    assert same(expected, found)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("offset", [1e4, -3e5])
def test_an_offset_costs_no_more_digits_than_in_plain_torch(offset: float, channels_last: bool) -> None:
    check(make((40, 6, 13, 11), layout="channels_last" if channels_last else "contiguous", offset=offset))


def test_a_batch_that_begins_with_zeros_keeps_its_digits() -> None:
    case = make((4000, 20), offset=1e4)
    case.x[:100] = 0  # what comes first is far from the mean of the rest
    check(case)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e30), (torch.float32, 3e38), (torch.bfloat16, 1e25)])
def test_numbers_whose_squares_overflow(dtype: torch.dtype, scale: float, layout: str) -> None:
    case = make((4, 3, 6, 5), dtype, layout=layout)
    with torch.no_grad():
        case.x.clamp_(-1, 1)
        case.x[:, 1] *= scale
    found, truth = case.run("cpu"), case.in_float64().run("eager")
    rounding = torch.finfo(dtype).eps
    for name in ("y", "dweight", "dbias"):  # sums of 120 numbers of about 1, each rounded by half of eps at most
        torch.testing.assert_close(found[name].double(), truth[name], rtol=8 * rounding, atol=60 * rounding)
    assert found["dx"].isfinite().all()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_in_its_channel(bad: float, layout: str) -> None:
    case = make((4, 3, 6, 5), layout=layout)
    expected = case.run("cpu")
    case.x[1, 1, 2, 3] = bad
    found = case.run("cpu")
    for name in ("y", "dx"):
        assert found[name][:, 1].isnan().all()
        assert torch.equal(found[name][:, ::2], expected[name][:, ::2])
    assert found["mean"].flatten().isnan().tolist() == [False, True, False]


def test_a_batch_of_nothing() -> None:
    for shape in ((0, 3, 4), (0, 3), (2, 3, 0)):
        case = make(shape)
        found, plain = case.run("cpu"), case.run("eager")
        assert found["y"].shape == shape
        assert found["mean"].isnan().all()
        assert plain["mean"].isnan().all()
        assert not found["dweight"].any()
        assert not found["dbias"].any()


def test_gradients_that_are_expanded_or_of_another_layout() -> None:
    case = make((3, 4, 5, 6))
    expected = case.run("cpu")
    assert same(case._replace(dy=LAYOUTS["channels_last"](case.dy)).run("cpu"), expected)
    ones = case._replace(dy=torch.ones(()).expand(case.x.shape))
    assert ones.run("cpu")["dx"].abs().max() < 1e-6  # exactly 0 in exact arithmetic
    assert torch.equal(ones.run("cpu")["dbias"], torch.full((4,), 90.0))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("mask", [None, 0.7])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_first_and_second_derivatives(layout: str, mask: float | None, known: bool) -> None:
    case = make((3, 2, 4), torch.float64, layout=layout, mask=mask, known=known)
    assert case.weight is not None
    assert case.bias is not None
    inputs = tuple(each.nan_to_num().requires_grad_() for each in (case.x, case.weight, case.bias))

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return kernels.forward(case.spec, x, weight, bias, case.mask, given=case.given, kernel="cpu")

    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)


def test_second_derivatives_do_not_see_padding() -> None:
    case = make((3, 2, 4), torch.float64, mask=0.6)
    x = case.x.detach().requires_grad_()
    y = kernels.forward(case.spec, x, case.weight, case.bias, case.mask, kernel="cpu")
    (dx,) = torch.autograd.grad(y, x, case.dy, create_graph=True)
    (second,) = torch.autograd.grad(dx.square().sum(), x)
    assert second.isfinite().all()


def test_only_what_is_needed_is_computed() -> None:
    case = make((3, 4, 5))
    expected = case.run("cpu")
    weight = case.weight
    assert weight is not None
    y = kernels.forward(case.spec, case.x, weight.requires_grad_(), case.bias, kernel="cpu")
    assert torch.equal(torch.autograd.grad(y, weight, case.dy)[0], expected["dweight"])
    y = kernels.forward(case.spec, case.x.requires_grad_(), None, None, kernel="cpu")
    assert torch.autograd.grad(y, case.x, case.dy)[0].shape == case.x.shape


def test_moments_are_those_of_plain_torch_and_differentiable() -> None:
    case = make((6, 5, 7), mask=0.6, offset=10.0)
    for mask in (None, case.mask):
        x = case.x.nan_to_num()
        found, plain = (kernels.moments(case.spec, x, mask, kernel=name) for name in ("cpu", "eager"))
        assert found.mean is not None
        assert plain.mean is not None
        torch.testing.assert_close(found.mean, plain.mean)
        torch.testing.assert_close(found.statistic, plain.statistic)
        assert torch.as_tensor(found.elements).equal(torch.as_tensor(plain.elements))
    x = case.x.nan_to_num().requires_grad_()
    assert kernels.moments(case.spec, x, kernel="cpu").statistic.requires_grad


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "eps": ({"eps": 0.0}, "eps above 0"),
    "eps outside": ({"eps_inside": False}, "eps above 0"),
    "unbiased": ({"biased": False}, "biased variance"),
    "not centred": ({"center": False}, "biased variance"),
    "factor": ({"factor": 2.0}, "factors"),
    "form": ({"form": "folded"}, "form='folded'"),
    "cast": ({"cast": "before_weight"}, "cast='before_weight'"),
    "sums": ({"stats_dtype": None}, "sums in float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_specs_that_are_refused(name: str) -> None:
    fields, words = REFUSED[name]
    plan = cpu.plan_of(replace(batch_spec(BATCH, 3, 1), **fields))
    assert isinstance(plan, str)
    assert words in plan


def test_calls_that_are_refused() -> None:
    case = make((2, 3, 4), known=True)
    spec, x, known = case.spec, case.x, case.given
    assert known is not None
    assert known.mean is not None
    each_channel = torch.ones(2, 3, 4, dtype=torch.bool)

    def why(x: torch.Tensor, weight: Any = None, bias: Any = None, mask: Any = None, **operands: Any) -> str:
        return cpu.refusal(spec, x, weight, bias, mask, **operands) or "taken"

    assert why(x) == "taken"
    assert "one mask for all channels" in why(x, mask=each_channel)
    assert "one mask for all channels" in why(x, mask=torch.ones(2, 1, 3, dtype=torch.bool))
    assert "bool mask" in why(x, mask=torch.ones(2, 1, 4))
    assert "3 axes" in why(x[0])
    assert "not torch.complex64" in why(x.to(torch.complex64))
    assert "weight in the input's dtype" in why(x, weight=torch.ones(3, dtype=torch.float64))
    assert "one number a channel" in why(x, weight=torch.ones(4))
    assert "one dtype" in why(x.bfloat16(), weight=torch.ones(3), bias=torch.ones(3, dtype=torch.bfloat16))
    assert "gradients of given" in why(x, given=known._replace(mean=known.mean.clone().requires_grad_()))
    assert "given statistics in float32" in why(x, given=known._replace(statistic=known.statistic.double()))
    assert "no gate" in why(x, gate=x)


def test_bad_operands_raise_in_the_operators_too() -> None:
    ops, x = torch.ops.normwise, torch.randn(2, 3, 4)
    with pytest.raises(RuntimeError, match="no axis 3"):
        ops.batch_norm(x, None, None, None, 3, 1e-5, 0.0)
    with pytest.raises(RuntimeError, match="mask must be bool"):
        ops.batch_norm(x, None, None, torch.ones(2, 3, 4, dtype=torch.bool), 1, 1e-5, 0.0)
    with pytest.raises(RuntimeError, match="must broadcast"):
        ops.batch_norm(x, None, None, torch.ones(2, 1, 3, dtype=torch.bool), 1, 1e-5, 0.0)
    with pytest.raises(RuntimeError, match="weight must hold"):
        ops.batch_norm(x, torch.ones(4), None, None, 1, 1e-5, 0.0)
    with pytest.raises(RuntimeError, match="one number a channel"):
        ops.batch_norm_given(x, torch.ones(2), torch.ones(3), None, None, None, 1, 1e-5, 0.0)
    with pytest.raises(RuntimeError, match="another batch"):
        ops.batch_norm_backward(x, x, torch.ones(5, 2), None, None, 1, 0.0, False, 7)
    with pytest.raises(RuntimeError, match="shape of x"):
        ops.batch_norm_backward(x[:1], x, torch.ones(5, 3), None, None, 1, 0.0, False, 7)


@pytest.mark.parametrize("mask", [None, 0.7])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gaps"])
def test_the_operators_keep_to_their_schemas(layout: str, mask: float | None) -> None:
    case = make((2, 3, 4, 5), layout=layout, mask=mask, known=True)
    ops, known = torch.ops.normwise, case.given
    assert known is not None
    x, norm, tests = (
        case.x.nan_to_num(),
        (case.weight, case.bias, case.mask, 1, 1e-5, 0.0),
        ("test_schema", "test_faketensor"),
    )
    _, stats = ops.batch_norm(x, *norm)
    for name, args in {
        "batch_norm": (x, *norm),
        "batch_norm_given": (x, known.mean, known.statistic, *norm),
        "batch_norm_backward": (x, x, stats, case.weight, case.mask, 1, 0.0, False, 7),
        "batch_moments": (x, case.mask, 1),
    }.items():
        torch.library.opcheck(getattr(ops, name).default, args, test_utils=tests)


@pytest.mark.parametrize("training", [False, True])
def test_compiled_graphs_hold_the_operator_and_its_gradients(training: bool) -> None:
    torch._dynamo.reset()
    norm = BatchNorm(4).train(training)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x = make((6, 4, 5)).x
    results = []
    for call in (norm, compiled):
        norm.reset_running_stats()
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        grads = torch.autograd.grad(y, [leaf, *norm.parameters()], x.cos())
        results.append((y.detach(), *grads, *(each.clone() for each in norm.buffers())))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_statistics_move_as_torchs_do(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = BatchNorm(5, dtype=dtype), torch.nn.BatchNorm2d(5, dtype=dtype)
    batches = [torch.randn(4, 5, 6, 7, generator=generator, dtype=dtype) + 3 for _ in range(3)]
    for x in batches:
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    torch.testing.assert_close(ours.eval()(batches[0]), theirs.eval()(batches[0]))


def test_tensors_of_running_statistics_and_numbers_move_them_alike() -> None:
    x, results = make((4, 3, 5)).x, []
    for momentum in (0.3, torch.tensor(0.3)):
        mean, var = torch.ones(3), torch.ones(3)
        batch_norm(x, mean, var, training=True, momentum=momentum)
        results.append((mean, var))
    torch.testing.assert_close(*results)
