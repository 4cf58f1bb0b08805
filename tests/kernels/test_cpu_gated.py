"""Gated RMSNorm in compiled code: values, gradients, independence of batch and threads, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normwise import kernels
from normwise.kernels import cpu, eager
from normwise.layers import FAMILIES
from normwise.spec import PROMOTED, Cast, Form, Gate, NormSpec, Statistic, Weight, reference
from normwise.spec.definition import activation
from tests.kernels.cpu_cases import needs_library
from tests.layers.norm_calls import build, operands, run_ours, run_theirs
from tests.layers.test_families import ulps
from tests.layers.transformers_norms import NORMS, Norm

pytestmark = needs_library

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
PAIRS = [(F32, F32), (F64, F64), (BF16, BF16), (F16, F16), (BF16, F32), (F16, F32)]
GATED = sorted(name for name, spec in FAMILIES.items() if spec.gate is not Gate.NONE)
SPECS = list({FAMILIES[name]: FAMILIES[name] for name in GATED})
OWN = [norm for norm in NORMS if norm.call == "gated"]
FIRST, LAST = FAMILIES["mamba2-gated"], FAMILIES["qwen3-next-gated"]
# In float32 the mean of up to a thousand squares, an exponential, a quotient and three products are rounded.
VALUES = {F32: 4e-6, F64: 4e-14, BF16: 2.0**-6, F16: 2.0**-9}

each_pair = pytest.mark.parametrize(("dtype", "held"), PAIRS, ids=str)
each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.gate}-{spec.cast}-{spec.gate_activation}")
each_order = pytest.mark.parametrize("spec", [FIRST, LAST], ids=["before", "after"])
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def draw(shape: tuple[int, ...], dtype: torch.dtype, held: torch.dtype, seed: int = 0) -> Given:
    """Return x, z and a gain; z is wide enough that both ends of the activation are met."""
    generator = torch.Generator().manual_seed(seed)
    x, z = (scale * torch.randn(shape, generator=generator, dtype=F64) for scale in (2.0, 6.0))
    weight = 1 + torch.randn(shape[-1:], generator=generator, dtype=F64) / 4
    return x.to(dtype), z.to(dtype), weight.to(held)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def compiled(spec: NormSpec, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return kernels.forward(spec, x, weight, gate=z, kernel="cpu")


def gradients(spec: NormSpec, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    own = leaves(x, z, weight)
    y = compiled(spec, *own)
    return [y, *torch.autograd.grad(y, own, torch.cos(torch.arange(y.numel())).reshape(y.shape).to(y.dtype))]


def nearly(found: torch.Tensor, true: torch.Tensor, tolerance: float) -> bool:
    return bool((found.double() - true).abs().max() <= tolerance * true.abs().max().clamp_min(1e-30))


def sizes(
    spec: NormSpec, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, upstream: torch.Tensor
) -> list[torch.Tensor]:
    """Return how large the terms are whose differences and sums the gradients of x, z and weight are."""
    act = activation(spec)(z)
    (slope,) = torch.autograd.grad(act.sum(), z)
    first = spec.gate is Gate.BEFORE
    h = x * act if first else x
    rstd = reference(NormSpec(groups=spec.groups, eps=spec.eps, weight=Weight.NONE), h) / h
    d = upstream if first else upstream * act
    through = d * weight * rstd
    terms = (
        through * (act if first else 1.0),
        (through * x if first else upstream * weight * rstd * x) * slope,
        (d * rstd * h).abs().sum(0),
    )
    return [each.detach().abs().max() for each in terms]


# -- values and gradients ---------------------------------------------------------------------------


@each_spec
@each_pair
@given(rows=st.integers(1, 4), groups=st.integers(1, 4), each=st.integers(1, 300), seed=st.integers(0, 9))
def test_values_and_gradients_are_those_of_float64(
    spec: NormSpec, dtype: torch.dtype, held: torch.dtype, rows: int, groups: int, each: int, seed: int
) -> None:
    spec = replace(spec, groups=groups)
    own = draw((rows, groups * each), dtype, held, seed)
    wide = leaves(*(t.double() for t in own))
    y, *grads = gradients(spec, *own)
    true = reference(spec, wide[0], wide[2], gate=wide[1])
    upstream = torch.cos(torch.arange(true.numel())).reshape(true.shape).to(y.dtype).double()
    assert y.dtype is eager.forward(spec, own[0], own[2], gate=own[1]).dtype
    assert nearly(y, true, VALUES[dtype])
    true_grads = torch.autograd.grad(true, wide, upstream)
    allowed = sizes(spec, wide[0], wide[1], wide[2], upstream)
    for name, grad, wanted, size in zip("xzw", grads, true_grads, allowed, strict=True):
        assert (grad.double() - wanted).abs().max() <= 4 * VALUES[dtype] * size, name


@each_spec
@each_pair
@pytest.mark.parametrize("width", [1, 5, 64, 172, 1024, 4100])
def test_values_are_within_an_ulp_of_eager(spec: NormSpec, dtype: torch.dtype, held: torch.dtype, width: int) -> None:
    x, z, weight = draw((37, width), dtype, held)
    for gain in (weight, None):
        y, wanted = compiled(spec, x, z, gain), eager.forward(spec, x, gain, gate=z)
        assert y.dtype is wanted.dtype
        if y.dtype in (BF16, F16):
            assert ulps(y, wanted) <= 1
        elif dtype in (BF16, F16):  # xhat may be rounded the other way before a float32 gain
            assert nearly(y, wanted.double(), torch.finfo(dtype).eps)
        else:
            torch.testing.assert_close(y, wanted, rtol=16 * torch.finfo(dtype).eps, atol=1e-30)


@pytest.mark.parametrize("norm", OWN, ids=[norm.names[0] for norm in OWN])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_values_are_within_an_ulp_of_the_class(norm: Norm, dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    for name in norm.names:
        generator = torch.Generator().manual_seed(0)
        held = F32 if norm.weights == "float32" else dtype
        module = build(norm, name, held, generator)
        inputs = operands(norm, dtype, held, generator)
        ours, theirs = run_ours(norm, module, inputs), run_theirs(norm, module, inputs)
        assert ours.dtype is theirs.dtype
        assert nearly(ours, theirs.double(), 4e-6) if ours.dtype is F32 else ulps(ours, theirs) <= 1


def test_a_gain_of_one_number() -> None:
    spec = replace(LAST, weight=Weight.SCALAR)
    x, z, _ = draw((9, 48), F64, F64)
    _, *grads = gradients(spec, x, z, torch.tensor([1.5], dtype=F64))
    _, *wide = gradients(LAST, x, z, torch.full((48,), 1.5, dtype=F64))
    torch.testing.assert_close(grads, [*wide[:2], wide[2].sum().reshape(1)])


def test_rows_of_several_axes() -> None:
    spec = replace(LAST, axes=(-2, -1))
    x, z, _ = draw((3, 4, 24), F64, F64)
    weight = torch.rand(4, 24, dtype=F64)
    torch.testing.assert_close(compiled(spec, x, z, weight), reference(spec, x, weight, gate=z))


@each_order
def test_gains_with_an_offset(spec: NormSpec) -> None:
    spec = replace(spec, cast=Cast.AFTER_WEIGHT, out_dtype=None, weight_offset=1.0)
    x, z, weight = draw((5, 70), F32, F32)
    torch.testing.assert_close(compiled(spec, x, z, weight), eager.forward(spec, x, weight, gate=z))


# -- large numbers, infinities ------------------------------------------------------------------------


@each_order
@pytest.mark.parametrize(("dtype", "exponent"), [(F32, 100), (BF16, 100), (F64, 700)], ids=str)
def test_large_rows_come_out_as_in_eager(spec: NormSpec, dtype: torch.dtype, exponent: int) -> None:
    x, z, weight = draw((4, 96), F64, dtype)
    x[1:3] *= 2.0**exponent
    own = leaves(x.to(dtype), z.to(dtype), weight)
    wide = leaves(*(t.double() for t in own))
    y, true = compiled(spec, *own), eager.forward(spec, wide[0], wide[2], gate=wide[1])
    assert nearly(y, true, VALUES[dtype])
    dz, wanted = (torch.autograd.grad(t.sum(), each[1])[0] for t, each in ((y, own), (true, wide)))
    assert nearly(dz, wanted, 4 * VALUES[dtype])


@each_order
def test_rows_with_infinity_or_nan_are_nan_and_no_other(spec: NormSpec) -> None:
    x, z, weight = draw((4, 96), F32, F32)
    x[1, 5], x[3, 7] = float("inf"), float("nan")
    lost = compiled(spec, x, z, weight).isnan()
    assert lost.all(-1).tolist() == [False, True, False, True] == lost.any(-1).tolist()


def test_gates_far_from_zero() -> None:
    z = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, 1.0]])
    y = compiled(replace(LAST, gate_activation="sigmoid"), torch.ones_like(z), z, torch.ones(8))
    torch.testing.assert_close(y, torch.sigmoid(z), rtol=2e-6, atol=1e-37)
    torch.testing.assert_close(
        compiled(LAST, torch.ones_like(z), z), torch.nn.functional.silu(z), rtol=2e-6, atol=1e-35
    )


def test_slopes_keep_their_digits_far_from_zero() -> None:
    spec = replace(LAST, gate_activation="sigmoid", weight=Weight.NONE)
    z = torch.tensor([[-1e30, -200.0, -80.0, -20.0, 0.0, 12.0, 20.0, 80.0]]).requires_grad_()
    wide = z.detach().double().requires_grad_()
    y = compiled(spec, torch.ones(1, 8), z)
    (found,) = torch.autograd.grad(y.sum(), z)
    (wanted,) = torch.autograd.grad(torch.sigmoid(wide).sum(), wide)
    true = torch.where(wide.detach() > 15, torch.exp(-wide.detach()), wanted)  # in float64 too 1 - s loses its digits
    torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-37)


# -- the same bits, whatever surrounds a row --------------------------------------------------------------


@each_order
@each_pair
def test_any_number_of_threads_gives_the_same_bits(
    spec: NormSpec, dtype: torch.dtype, held: torch.dtype, threads: Callable[[int], None]
) -> None:
    own = draw((700, 520), dtype, held)
    threads(1)
    wanted = gradients(replace(spec, groups=4), *own)
    for count in range(2, 9):
        threads(count)
        assert all(map(torch.equal, gradients(replace(spec, groups=4), *own), wanted)), count


@each_order
@each_pair
@pytest.mark.parametrize("width", [7, 40, 172, 1024])
def test_rows_are_independent_of_the_batch(spec: NormSpec, dtype: torch.dtype, held: torch.dtype, width: int) -> None:
    x, z, weight = draw((33, width), dtype, held)
    y, dx, dz, _ = gradients(spec, x, z, weight)
    for row in range(33):
        own = leaves(x[row], z[row], weight)
        alone = compiled(spec, *own)
        upstream = torch.cos(torch.arange(y.numel())).reshape(y.shape)[row].to(y.dtype)
        assert torch.equal(alone, y[row])
        assert list(map(torch.equal, torch.autograd.grad(alone, own[:2], upstream), (dx[row], dz[row]))) == [True, True]


@each_order
@each_pair
def test_places_in_memory_do_not_matter(spec: NormSpec, dtype: torch.dtype, held: torch.dtype) -> None:
    x, z, weight = draw((6, 77), dtype, held)
    wanted = gradients(spec, x, z, weight)
    joined = torch.zeros(6, 3 * 77 + 1, dtype=dtype)  # slices of one projection, misaligned
    parts = joined[:, 1:78], joined[:, 78:155]
    for part, value in zip(parts, (x, z), strict=True):
        part.copy_(value)
    own = [part.detach().requires_grad_() for part in parts]
    gain = torch.cat([weight[:1], weight])[1:].requires_grad_()
    y = compiled(spec, own[0], own[1], gain)
    upstream = torch.cos(torch.arange(y.numel())).reshape(y.shape).to(y.dtype)
    found = [y, *torch.autograd.grad(y, (*own, gain), upstream)]
    assert all(map(torch.equal, found, wanted))
    turned = [t.t().contiguous().t() for t in (x, z)]  # rows that are not contiguous are copied
    assert torch.equal(compiled(spec, turned[0], turned[1], weight), wanted[0])


@each_order
def test_outputs_are_written_whole(spec: NormSpec) -> None:
    torch.use_deterministic_algorithms(True)  # torch then fills what it allocates with NaN
    try:
        for width in (1, 31, 33, 515):
            for found in gradients(spec, *draw((9, width), F32, F32)):
                assert found.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


# -- autograd -------------------------------------------------------------------------------------------


@each_order
@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_first_and_second_derivatives(spec: NormSpec, groups: int | None, activation: str) -> None:
    spec = replace(spec, groups=groups, gate_activation=activation)
    x, z, weight = draw((2, 6), F64, F64)
    own = leaves(x, z / 4, weight)
    assert torch.autograd.gradcheck(lambda *t: compiled(spec, *t), own)
    assert torch.autograd.gradgradcheck(lambda *t: compiled(spec, *t), own)
    assert torch.autograd.gradgradcheck(lambda x, z: compiled(spec, x, z), own[:2])


@each_order
def test_gradients_of_what_is_asked_for_only(spec: NormSpec) -> None:
    own = draw((4, 40), F32, F32)
    _, *wanted = gradients(spec, *own)
    for index in range(3):
        asked = [t.clone().requires_grad_(i == index) for i, t in enumerate(own)]
        y = compiled(spec, *asked)
        y.backward(torch.cos(torch.arange(y.numel())).reshape(y.shape))
        found = [t.grad for t in asked]
        assert [t is None for t in found] == [i != index for i in range(3)]
        assert torch.equal(torch.as_tensor(found[index]), wanted[index])


@each_order
def test_incoming_gradients_are_not_written_into(spec: NormSpec) -> None:
    own = leaves(*draw((4, 40), F32, F32))
    y = compiled(spec, *own)
    upstream = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    kept = upstream.clone()
    for _ in range(2):
        y.backward(upstream, retain_graph=True)
    assert torch.equal(upstream, kept)
    y.backward(torch.ones(1, 1).expand(4, 40))  # the gradient of a sum has no strides
    assert all(torch.as_tensor(t.grad).isfinite().all() for t in own)


@each_order
@each_pair
def test_an_empty_batch(spec: NormSpec, dtype: torch.dtype, held: torch.dtype) -> None:
    y, dx, dz, dweight = gradients(spec, *draw((0, 40), dtype, held))
    assert y.shape == dx.shape == dz.shape == (0, 40)
    assert torch.equal(dweight, torch.zeros(40, dtype=held))


@each_order
def test_compiled_as_a_whole(spec: NormSpec) -> None:
    own = draw((4, 40), F32, F32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kernels.forward(spec, x, weight, gate=z)

    y, *wanted = gradients(spec, *own)
    given_ = leaves(*own)
    found = run(given_[0], given_[1], given_[2])
    upstream = torch.cos(torch.arange(y.numel())).reshape(y.shape)
    assert torch.equal(found, y)
    assert all(map(torch.equal, torch.autograd.grad(found, given_, upstream), wanted))


# -- the operators ----------------------------------------------------------------------------------------


@each_order
@each_pair
def test_fake_kernels_tell_what_the_operators_return(spec: NormSpec, dtype: torch.dtype, held: torch.dtype) -> None:
    x, z, weight = draw((4, 40), dtype, held)
    plan = cpu.plan_of(spec)
    code = int(getattr(plan, "code"))  # noqa: B009
    _, rstd = torch.ops.normwise.gated_rows_saving(x, z, weight, 40, 2, code, 1e-6, 0.0)
    y = torch.ops.normwise.gated_rows(x, z, weight, 40, 2, code, 1e-6, 0.0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.normwise.gated_rows.default, (x, z, weight, 40, 2, code, 1e-6, 0.0), test_utils=checks
    )
    saving = torch.ops.normwise.gated_rows_saving.default
    torch.library.opcheck(saving, (x, z, weight, 40, 2, code, 1e-6, 0.0), test_utils=checks)
    backward = torch.ops.normwise.gated_rows_backward.default
    for gain, needed in ((weight, True), (weight, False), (None, True)):
        args = (y, x, z, rstd, gain, 40, 2, code, 0.0, needed)
        torch.library.opcheck(backward, args, test_utils=checks)


def test_the_operators_refuse_what_does_not_fit() -> None:
    x, z, weight = draw((4, 40), F32, F32)
    op = torch.ops.normwise.gated_rows
    for args, message in {
        (x, z[:, :20], weight, 40, 1): "z must have the shape of x",
        (x, z.double(), weight, 40, 1): "z must have the dtype of x",
        (x, z, weight, 40, 3): "3 groups do not divide 40",
        (x, z, weight, 40, 0): "0 groups do not divide 40",
        (x, z, weight[:7], 40, 1): "weight must hold 1 or 40",
        (x, z, weight, 0, 1): "no rows of 0",
    }.items():
        with pytest.raises(RuntimeError, match=message):
            op(*args, 0, 1e-6, 0.0)


# -- what is refused --------------------------------------------------------------------------------------

REFUSED = {
    "layer norm": (NormSpec(gate=Gate.AFTER, center=True, statistic=Statistic.VARIANCE), "mean squares"),
    "eps outside": (NormSpec(gate=Gate.AFTER, eps_inside=False), "eps inside the root"),
    "division": (NormSpec(gate=Gate.AFTER, form=Form.DIVISION), "quotient"),
    "folded": (NormSpec(gate=Gate.AFTER, form=Form.FOLDED), "form='folded'"),
    "eps 0": (NormSpec(gate=Gate.BEFORE, eps=0.0), "eps = 0"),
    "groups of several axes": (NormSpec(gate=Gate.BEFORE, axes=(-2, -1), groups=2), "groups of features of the last"),
    "part of a row": (NormSpec(gate=Gate.BEFORE, partial=0.5), "a part of a row"),
}


@pytest.mark.parametrize(("spec", "why"), REFUSED.values(), ids=REFUSED)
def test_specs_that_eager_serves(spec: NormSpec, why: str) -> None:
    x, z, weight = draw((4, 6, 40), F32, F32)
    assert why in kernels.refusals(spec, x, weight, gate=z)["cpu"]


def test_calls_that_eager_serves() -> None:
    x, z, weight = draw((4, 40), BF16, BF16)
    promoted = replace(LAST, out_dtype=PROMOTED)
    for spec, operands_, why in (
        (LAST, {"gate": z.float()}, "dtype of the input"),
        (LAST, {"gate": z[0]}, "shape and dtype"),
        (LAST, {"gate": None}, "needs its gate"),
        (LAST, {"gate": z, "mask": x > 0}, "no mask"),
        (LAST, {"gate": z, "bias": weight}, "no bias"),
        (LAST, {"gate": z, "residual": x}, "no residual"),
        (replace(LAST, groups=3), {"gate": z}, "divide the row"),
        (promoted, {"gate": z}, "stays in float32"),
        (replace(LAST, cast=Cast.RECIPROCAL), {"gate": z}, "a reciprocal in half precision"),
    ):
        assert why in kernels.refusals(spec, x, weight, **operands_)["cpu"]


def test_every_gated_family_is_taken() -> None:
    for name in GATED:
        for dtype, held in PAIRS:
            x, z, weight = draw((2, 8), dtype, held)
            assert "cpu" not in kernels.refusals(FAMILIES[name], x, weight, gate=z), (name, dtype, held)
