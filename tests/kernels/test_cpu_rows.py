"""What the compiled kernels of rows promise: eager's bits, rows that are hard, gradients summed with care."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from normwise import kernels
from normwise.functional.hidden import LAYER, RMS
from normwise.kernels._ops import ops
from normwise.spec import Form, NormSpec, reference
from tests.kernels.cpu_cases import HALF, SPECS, each_spec, needs_library, numbers, of_spec, parameters, taken

pytestmark = needs_library

DTYPES = (torch.float32, torch.float64, *HALF)
# those of whole blocks of 128 bytes are measured in groups of rows, up to 1 or 2 KiB a row
WIDTHS = (2, 3, 5, 7, 8, 11, 15, 16, 19, 31, 32, 33, 64, 96, 128, 256, 257, 384, 512, 640, 768, 1024)
# torch takes square roots from MKL, which rounds some of them the other way: these specs divide by one
BY_ROOT = {"outside", "scale"}
CENTRED = {name: spec for name, spec in SPECS.items() if spec.center}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in SPECS if name not in BY_ROOT])
def test_bits_are_those_of_the_eager_kernel(name: str, dtype: torch.dtype) -> None:
    if kernels.cpu.instructions() == "baseline":
        pytest.skip("sums with fused products need AVX2")
    spec = SPECS[name]
    for width in WIDTHS:
        x, own = numbers(64, 2, width, dtype=dtype), parameters(spec, (2, width), dtype)
        if taken(spec, x, *own):
            found, right = of_spec(spec)(x, *own), kernels.eager.forward(spec, x, *own)
            assert torch.equal(found, right), width


def test_short_rows_of_layer_norm_have_torchs_bits() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for width in range(2, 40):
            x = numbers(500, width, seed=width, dtype=dtype)
            found = kernels.cpu.forward(LAYER, x)
            assert torch.equal(found, F.layer_norm(x, (width,), eps=1e-5)), (dtype, width)


@each_spec
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_results_below_the_normal_numbers_are_kept(spec: NormSpec, dtype: torch.dtype) -> None:
    """The instruction that rounds to bfloat16 makes 0 of them, so rows with a 0 are written in another way."""
    width = 256
    x, (weight, bias) = numbers(64, width, dtype=dtype), parameters(spec, (64, width), dtype)
    if len(spec.axes) > 1:
        return
    x[3, ::2] = 0.0
    x[5, ::3] *= 2.0**-130 if dtype is torch.bfloat16 else 2.0**-20
    x[9], x[17] = 0.0, 2.0**-24
    tiny = 2.0**-125 if dtype is torch.bfloat16 else 2.0**-16
    for gain in (weight, None if weight is None else weight * tiny):
        for shift in (bias, None if bias is None else bias * tiny):
            found, right = of_spec(spec)(x, gain, shift), kernels.eager.forward(spec, x, gain, shift)
            if spec.form is Form.TORCH or not (spec.eps_clamp or not spec.eps_inside):
                assert torch.equal(found, right)
            assert torch.equal(found == 0, right == 0)


@each_spec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_in_a_group_is_what_it_is_alone(spec: NormSpec, dtype: torch.dtype) -> None:
    if len(spec.axes) > 1:
        return
    for width in (32, 96, 128, 256, 512, 1024):
        x, (weight, bias) = numbers(19, width, seed=width, dtype=dtype), parameters(spec, (19, width), dtype)
        x[4] *= 3e4 if dtype is torch.float16 else 2e38  # its squares overflow
        x[7, 5], x[12, 3] = float("inf"), float("nan")
        together = of_spec(spec)(x, weight, bias)
        alone = torch.cat([of_spec(spec)(x[row : row + 1], weight, bias) for row in range(19)])
        assert torch.equal(together.nan_to_num(7.0), alone.nan_to_num(7.0)), width


def test_a_quotient_by_a_root_is_left_to_eager() -> None:
    why = kernels.cpu.refusal(NormSpec(form=Form.DIVISION), torch.ones(2, 4), None, None, None)
    assert "square root" in str(why)


# -- hard rows ----------------------------------------------------------------------------------------

HARD = {
    "largest": numbers(6, 40).clamp(-1, 1) * 3.3e38,
    "one side": numbers(6, 40).abs().clamp_max(1) * 3.3e38,
    "large": numbers(6, 40) * 1e19,
    "tiny": numbers(6, 40) * 1e-20,
    "offset": numbers(6, 40) + 1e4,
    "constant": torch.full((6, 40), 3.1, dtype=torch.float64),
    "zeros": torch.zeros(6, 40, dtype=torch.float64),
}


@each_spec
@pytest.mark.parametrize("kind", HARD)
def test_gradients_of_hard_rows_are_right_and_finite(spec: NormSpec, kind: str) -> None:
    """Rows whose deviations from the mean overflow among them: ``backward_far_row``."""
    if len(spec.axes) > 1:
        return
    x = HARD[kind].float()
    own = tuple(None if each is None else each.float() for each in parameters(spec, (6, 40)))
    eps = torch.finfo(torch.float32).eps if spec.eps is None else spec.eps
    upstream = numbers(6, 40, seed=7)
    exact = [None if each is None else each.double() for each in own]
    results = []
    for run, tensors in ((of_spec(spec), (x, *own)), (definition(spec, eps), (x.double(), *exact))):
        leaves = [None if each is None else each.detach().requires_grad_() for each in tensors]
        y = run(*leaves)
        given = [each for each in leaves if each is not None]
        results.append([y.detach(), *torch.autograd.grad(y, given, upstream.to(y.dtype))])
    for found, right in zip(*results, strict=True):
        assert found.isfinite().all()
        if kind not in ("constant", "zeros") and not (kind == "offset" and spec.center):
            scale = float(right.abs().max())
            if scale > 1e-37:  # smaller ones are not normal numbers in float32
                torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=4e-6 * scale)


def definition(spec: NormSpec, eps: float) -> Callable[..., torch.Tensor]:
    return lambda x, weight, bias: reference(replace(spec, eps=eps), x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", CENTRED.values(), ids=CENTRED)
def test_far_rows_do_not_change_their_neighbours(spec: NormSpec, dtype: torch.dtype) -> None:
    if len(spec.axes) > 1:
        return
    x, dy = numbers(70, 48, dtype=dtype), numbers(70, 48, seed=1, dtype=dtype)
    weight = numbers(48, seed=2, dtype=dtype)
    code, ordinary = 2 if spec.form is Form.TORCH else 1, [row for row in range(70) if row != 33]
    far = x.clone()
    far[33] = (far[33].sign() * 3e38).to(dtype)
    gradients = []
    for each in (x, far):
        _, stats = ops.norm_rows_saving.default(each, weight, None, 48, code, 1e-5, 0.0)
        gradients.append(ops.norm_rows_backward.default(dy, dy, each, stats, weight, 48, code, 1e-5, 0.0, 7))
    (dx, _, dbias), (far_dx, far_dweight, far_dbias) = gradients
    assert torch.equal(far_dx[ordinary], dx[ordinary])
    assert torch.equal(far_dbias, dbias)
    assert far_dx.isfinite().all()
    assert far_dweight.isfinite().all()


@pytest.mark.parametrize("width", [1, 2])
def test_equal_upstream_gradients_of_constant_rows_cancel(width: int) -> None:
    x, dy = torch.full((5, width), 3.0), torch.full((5, width), 1.1)
    weight = torch.full((width,), 0.7)
    _, stats = ops.norm_rows_saving.default(x, weight, None, width, 1, 1e-12, 0.0)
    assert stats[1].min() > 1e5
    assert ops.norm_rows_backward.default(dy, None, x, stats, weight, width, 1, 1e-12, 0.0, 1)[0].eq(0).all()


# -- sums over rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 31, 33, 64, 183, 1000, 5000])
def test_gradients_of_gains_add_up_in_levels(rows: int) -> None:
    """One after the other, 1,000 rows would lose six times what torch's cascade loses."""
    x, dy = numbers(rows, 64, dtype=torch.float32), numbers(rows, 64, seed=1, dtype=torch.float32) + 0.5
    weight = numbers(64, seed=2, dtype=torch.float32)
    _, stats = ops.norm_rows_saving.default(x, weight, None, 64, 0, 1e-6, 0.0)
    found = ops.norm_rows_backward.default(dy, None, x, stats, weight, 64, 0, 1e-6, 0.0, 7)[1:]
    hat = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    for ours, terms in zip(found, (dy.double() * hat, dy.double()), strict=True):
        wrong = (ours.double() - terms.sum(0)).abs().mean()
        torchs = (terms.float().sum(0).double() - terms.sum(0)).abs().mean()
        assert wrong <= 2.5 * torchs + 2e-7


def test_statistics_of_another_layout_are_read_as_they_are() -> None:
    x, weight = numbers(4, 3, 8), numbers(8, seed=1)
    for code in (0, 1):
        y, stats = ops.norm_rows_saving.default(x, weight, None, 8, code, 1e-5, 0.0)
        assert stats.shape == (1 + code, 4, 3)
        right = ops.norm_rows_backward.default(y, None, x, stats, weight, 8, code, 1e-5, 0.0, 7)
        gaps = torch.full((*stats.shape, 2), float("nan"), dtype=stats.dtype)
        gaps[..., 0] = stats
        found = ops.norm_rows_backward.default(y, None, x, gaps[..., 0], weight, 8, code, 1e-5, 0.0, 7)
        assert all(torch.equal(ours, other) for ours, other in zip(found, right, strict=True))
        with pytest.raises(RuntimeError, match="stats must be those"):
            ops.norm_rows_backward.default(y, None, x, stats[..., :2], weight, 8, code, 1e-5, 0.0, 7)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_sum_of_two_halves_may_be_wide(dtype: torch.dtype) -> None:
    x, residual = numbers(3, 40, dtype=dtype), numbers(3, 40, seed=1, dtype=dtype)
    for wide in (False, True):
        found = kernels.cpu.forward_added(RMS, x, residual, wide=wide)
        right = kernels.eager.forward_added(RMS, x, residual, wide=wide)
        assert all(torch.equal(ours, other) for ours, other in zip(found, right, strict=True))
        assert found[1].dtype is (torch.float32 if wide else dtype)
