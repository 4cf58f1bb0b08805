"""What ``test_triton`` runs in another process, where Triton interprets its programs on CPU tensors.

Triton decides that when it is imported, so nothing here may import it before ``start`` was called. Every new tensor
is filled with NaN first: what a program does not write shows.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, NamedTuple

import torch

from normwise.kernels import eager
from normwise.spec import PROMOTED, Cast, NormSpec, Statistic, Weight, reference

RMS, LAYER, ROUND, PROMOTE, OFFSET_IN_WEIGHT_DTYPE = 0, 1, 4, 8, 16
X, WEIGHT, BIAS = 1, 2, 4
F32 = torch.finfo(torch.float32).eps
_new_empty = torch.Tensor.new_empty


def start() -> None:
    """Make this process interpret Triton programs, and poison what is allocated."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    torch.Tensor.new_empty = lambda self, *size, **kwargs: _new_empty(self, *size, **kwargs).fill_(float("nan"))
    rows().MERGE = rows().MERGE._replace(block=1024)  # fewer programs: each costs milliseconds here


def rows() -> Any:
    from normwise.kernels import _triton_rows

    return _triton_rows


class Case(NamedTuple):
    """One norm to compare with its definition in float64."""

    size: int
    kind: int = RMS
    n: int = 5
    dtype: torch.dtype = torch.float32
    weight: torch.dtype | None = torch.float32
    bias: torch.dtype | None = None
    residual: torch.dtype | None = None
    offset: float = 0.0
    code: int = 0
    wide: bool = False

    @property
    def spec(self) -> NormSpec:
        return NormSpec(
            center=self.kind != RMS,
            statistic=Statistic.MEAN_SQUARE if self.kind == RMS else Statistic.VARIANCE,
            eps=1e-5,
            weight=Weight.NONE if self.weight is None else Weight.VECTOR,
            weight_offset=self.offset,
            bias=self.bias is not None,
        )

    @property
    def plan(self) -> tuple[int, int, float, float]:
        return self.size, self.kind | self.code, 1e-5, self.offset


def randn(*shape: int, seed: int, dtype: torch.dtype | None = torch.float64) -> Any:
    """Return normal numbers that ``dtype`` can hold; None for None."""
    if dtype is None:
        return None
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check(case: Case, given: torch.Tensor | None = None) -> None:
    """Compare forward and backward with the definition and autograd through it, in float64.

    Three things separate them. Results are rounded to their dtype: by up to one eps, not half of one, because the
    interpreter cuts bfloat16 off where a GPU rounds. float32 arithmetic errs by some eps of the largest number added
    (16 of them: sums here are trees, of depth 16 at most). xhat rounded early errs by one eps of its own dtype.
    """
    x = (randn(case.n, case.size, seed=0) * 2 + 0.5).to(case.dtype) if given is None else given
    residual = randn(*x.shape, seed=1, dtype=case.residual)
    weight, bias = randn(case.size, seed=2, dtype=case.weight), randn(case.size, seed=3, dtype=case.bias)
    promoted = case.code & PROMOTE and residual is None
    out = torch.promote_types(case.dtype, case.weight or case.dtype) if promoted else case.dtype
    dy, dsum, total = randn(*x.shape, seed=4, dtype=out), None, x
    if residual is None:
        y = rows().norm_rows(x, weight, bias, *case.plan)
        again, stats = rows().norm_rows_saving(x, weight, bias, *case.plan)
        assert_same(y, again)
    else:
        y, total, stats = rows().add_norm_rows(x, residual, weight, bias, *case.plan, case.wide)
        assert total.dtype == (torch.float32 if case.wide else torch.promote_types(case.dtype, residual.dtype))
        assert_near(total, x.double() + residual.double(), F32 * (x.double().abs() + residual.double().abs()))
        dsum = randn(*x.shape, seed=5, dtype=total.dtype)
    assert y.dtype == out
    before = x.shape[:-1] if case.size > 1 else x.shape  # a row of one element takes no axis
    assert stats.shape == (2 if case.kind else 1, *before)
    incoming = {"dy": dy, "dsum": dsum, "x": total, "stats": stats, "weight": weight}
    kept = {name: value.clone() for name, value in incoming.items() if value is not None}
    dx, dweight, dbias = rows().norm_rows_backward(dy, dsum, total, stats, weight, *case.plan, X | WEIGHT | BIAS)
    for name, value in kept.items():
        assert torch.equal(incoming[name], value), f"{name} was written to"

    leaves = [None if each is None else each.double().requires_grad_() for each in (total, weight, bias)]
    expected = reference(case.spec, *leaves)  # type: ignore[arg-type]
    by_leaf = torch.autograd.grad(expected, [each for each in leaves if each is not None], dy.double())
    early = torch.finfo(total.dtype).eps if case.code & ROUND else 0.0
    h, gain = total.double(), 1.0 if weight is None else case.offset + weight.double()
    centered = h - h.mean(-1, keepdim=True) if case.kind else h
    rstd = (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    xhat, g = centered * rstd, gain * dy.double()
    peak = h.abs().amax(-1, keepdim=True) * rstd if case.kind else 0.0
    noise = 16 * F32 * (xhat.abs().amax(-1, keepdim=True) + peak)  # of xhat; cancellation in h - mean adds to it
    gain = torch.as_tensor(gain).abs()
    assert_near(y, expected, gain * (noise + early * xhat.abs()) + early * expected.abs())
    more = 0 if dsum is None else dsum.double()
    assert_near(dx, by_leaf[0] + more, rstd * g.abs().amax(-1, keepdim=True) * (noise + 16 * F32) * (1 + xhat.abs()))
    if weight is not None:
        assert_near(dweight, by_leaf[1], (dy.double().abs() * (noise + early * xhat.abs())).sum(0))
    if weight is not None or bias is not None:
        assert_near(dbias, dy.double().sum(0), 16 * F32 * dy.double().abs().sum(0))


def assert_near(got: torch.Tensor, expected: torch.Tensor, slack: torch.Tensor | float = 0.0) -> None:
    """Compare up to one rounding to the dtype of ``got`` and an absolute error."""
    kind, expected = torch.finfo(got.dtype), expected.double()
    allowed = kind.eps * expected.abs() + kind.smallest_normal + slack
    wrong = ~((got.double() - expected).abs() <= allowed)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        worst = ((got.double() - expected).abs() / allowed).max().item()
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {at}: {got[at].item()} for {expected[at].item()}, "
            f"at worst {worst:.3g} times what rounding explains"
        )


def assert_same(*tensors: torch.Tensor) -> None:
    """Compare bits."""
    for a, b in itertools.pairwise(tensors):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def backward(case: Case, dy: torch.Tensor, x: torch.Tensor, needs: int = 7) -> list[torch.Tensor]:
    """Return y, statistics and gradients for gains and shifts that depend on the case alone."""
    weight, bias = randn(case.size, seed=2, dtype=case.weight), randn(case.size, seed=3, dtype=case.bias)
    y, stats = rows().norm_rows_saving(x, weight, bias, *case.plan)
    return [y, stats, *rows().norm_rows_backward(dy, None, x, stats, weight, *case.plan, needs)]


def check_large(case: Case, size: float) -> None:
    """Rows whose squares overflow float32 come out as if they had been divided by ``size`` first."""
    x = (randn(case.n, case.size, seed=0).clamp(-1, 1) * size).to(case.dtype)
    x[0, 0], x[0, -1] = size, -size  # their difference is beyond float32
    check(case, x)


def check_layouts(case: Case) -> None:
    """Strided rows, transposed input, and gradients that are expanded are read as they lie."""
    padded = randn(case.n, case.size + 3, seed=6, dtype=case.dtype)
    upside = randn(case.size, case.n, seed=7, dtype=case.dtype).T
    expanded = randn(1, 1, seed=8, dtype=case.dtype).expand(case.n, case.size)
    for x, dy in (
        (padded[:, 2:-1], upside),
        (upside, padded[:, 1:-2]),
        (padded[::2, :-3], padded[1::2, 3:].repeat(2, 1)[: (case.n + 1) // 2]),
        (padded[:, 1:-2], expanded),
        (padded[:1].expand(2 * case.n, -1)[:, 3:], padded[1:2].expand(2 * case.n, -1)[:, :-3]),
    ):
        for got, expected in zip(backward(case, dy, x), backward(case, dy.contiguous(), x.contiguous()), strict=True):
            assert_same(got, expected)


def check_far(case: Case) -> None:
    """Offsets beyond 2^31 elements: three rows in memory that is reserved, and never touched between them."""
    apart = 2**30 + 16
    memory = torch.empty(2 * apart + case.size, dtype=case.dtype)
    x = memory.as_strided((3, case.size), (apart, 1))
    assert 2 * x.stride(0) > 2**31
    near = randn(3, case.size, seed=0, dtype=case.dtype)
    x.copy_(near)
    for got, expected in zip(backward(case, x, x), backward(case, near, near), strict=True):
        assert_same(got, expected)
    weight = randn(case.size, seed=2, dtype=case.weight)
    far, close = (rows().add_norm_rows(each, each, weight, None, *case.plan, False) for each in (x, near))
    for got, expected in zip(far, close, strict=True):
        assert_same(got, expected)
    dsum = rows().norm_rows_backward(near, x, near, close[2], weight, *case.plan, X)[0]
    assert_same(dsum, rows().norm_rows_backward(near, near, near, close[2], weight, *case.plan, X)[0])


def check_empty(case: Case) -> None:
    """Batches without rows: outputs without rows, gradients of gain and shift 0."""
    x = torch.empty(0, 3, case.size, dtype=case.dtype)
    y, stats, dx, dweight, dbias = backward(case, x, x)
    assert y.shape == dx.shape == x.shape
    assert stats.shape == (2 if case.kind else 1, 0, 3)
    assert torch.equal(dweight, torch.zeros(case.size, dtype=case.weight))
    assert torch.equal(dbias, torch.zeros(case.size, dtype=case.weight))
    for each in rows().add_norm_rows(x, x, None, None, *case.plan, False):
        assert each.numel() == 0


def check_shapes(case: Case) -> None:
    """Leading axes are rows, several trailing ones may be one row."""
    x = randn(2, case.n, 2, case.size // 2, seed=0, dtype=case.dtype)
    flat = x.reshape(2 * case.n, case.size)
    for got, expected in zip(backward(case, x, x), backward(case, flat, flat), strict=True):
        assert_same(got.reshape(expected.shape), expected)
    assert backward(case, x, x)[0].shape == backward(case, x, x)[2].shape == x.shape


def check_independence(case: Case) -> None:
    """The same call returns the same bits, and so does every row by itself."""
    x, dy = (randn(case.n, case.size, seed=seed, dtype=case.dtype) for seed in (0, 4))
    together = backward(case, dy, x)
    for got, expected in zip(backward(case, dy, x), together, strict=True):
        assert_same(got, expected)
    for row in range(0, case.n, max(1, case.n // 4)):
        y, stats, dx, _, _ = backward(case, dy[row : row + 1], x[row : row + 1])
        assert_same(y, together[0][row : row + 1])
        assert_same(stats, together[1][:, row : row + 1])
        assert_same(dx, together[2][row : row + 1])


def check_needs(case: Case) -> None:
    """What is not asked for is None; what is asked for does not depend on what else is."""
    x, dy = (randn(case.n, case.size, seed=seed, dtype=case.dtype) for seed in (0, 4))
    _, _, *everything = backward(case, dy, x)
    for needs in range(8):
        _, _, *grads = backward(case, dy, x, needs)
        for bit, got, expected in zip((X, WEIGHT, BIAS), grads, everything, strict=True):
            if not needs & bit:
                assert got is None
            elif bit == X or needs & X or case.size > rows().BACKWARD.widest:
                assert_same(got, expected)
            else:  # other tiles: the same numbers in another order
                assert_near(got, expected, 16 * F32 * (dy.abs().double() * 4).sum(0))


def check_rounding(size: int, weight_dtype: torch.dtype, cast: str, offset: float, promote: bool) -> None:
    """Results are rounded where eager rounds; float16, because the interpreter does not round bfloat16.

    float32 arithmetic in another order moves one xhat in thousands across a rounding boundary, and that result by
    a unit in the last place. The other order of casts moves every fourth, so that it would be seen.
    """
    spec = NormSpec(cast=Cast(cast), weight_offset=offset, out_dtype=PROMOTED if promote else None)
    x, dy = (randn(16, size, seed=seed, dtype=torch.float16) for seed in (0, 4))
    weight = randn(size, seed=2, dtype=weight_dtype)
    code = (ROUND if spec.cast is Cast.BEFORE_WEIGHT else 0) | (PROMOTE if promote else 0)
    y, stats = rows().norm_rows_saving(x, weight, None, size, code, 1e-6, offset)
    expected = eager.forward(spec, x, weight)
    assert y.dtype == expected.dtype
    assert (y == expected).double().mean() > (0.99 if y.dtype is torch.float16 else 0.3)
    other = eager.forward(NormSpec(weight_offset=offset), x, weight)
    if spec.cast is Cast.BEFORE_WEIGHT:
        assert (y == other).double().mean() < 0.9
        # the gradient of the gain is that of a product with the rounded xhat
        ones = torch.ones(size)
        xhat = rows().norm_rows(x, ones, None, size, ROUND, 1e-6, 0.0).double()
        dweight = rows().norm_rows_backward(dy, None, x, stats, ones, size, ROUND, 1e-6, 0.0, WEIGHT)[1]
        assert_near(dweight, (dy.double() * xhat).sum(0), 4 * F32 * (dy.double() * xhat).abs().sum(0))


def check_offset_in_weight_dtype() -> None:
    """1 + 15.8125 is 16.75 in bfloat16, 16.8125 in float32: forward and backward take the one that the code says."""
    x, weight = torch.ones(1, 4), torch.full((4,), 15.8125, dtype=torch.bfloat16)
    for code, gain in ((0, 16.8125), (OFFSET_IN_WEIGHT_DTYPE, 16.75)):
        y, stats = rows().norm_rows_saving(x, weight, None, 4, code, 0.0, 1.0)
        assert torch.equal(y, torch.full((1, 4), gain))
        dy = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
        dx = rows().norm_rows_backward(dy, None, x, stats, weight, 4, code, 0.0, 1.0, X)[0]
        assert torch.equal(dx, gain * torch.tensor([[0.75, -0.25, -0.25, -0.25]]))


def check_not_finite(case: Case) -> None:
    """NaN and infinity spoil their own row and no other."""
    x, dy = (randn(4, case.size, seed=seed, dtype=case.dtype) for seed in (0, 4))
    clean = backward(case, dy, x)
    spoiled = x.clone()
    spoiled[1, 0], spoiled[3, -1] = float("nan"), float("inf")
    y, stats, dx, *_ = backward(case, dy, spoiled)
    for got, expected in ((y, clean[0]), (dx, clean[2]), (stats.T, clean[1].T)):
        assert_same(got[::2], expected[::2])
    assert y[1].isnan().all()
    assert y[3, -1].isnan()
    assert dx[1].isnan().all()


def check_constant_rows(case: Case) -> None:
    """Rows of one number: 0 after centring, +-1 without, and 0 for zeros; gradients vanish, those of zeros do not."""
    x = torch.tensor([1.0, -300.0, 2.0**40, 0.0])[:, None].repeat(1, case.size)
    y, _, dx, dweight, _ = backward(case._replace(weight=None), torch.ones_like(x), x)
    assert_near(y, torch.zeros_like(x) if case.kind else x.sign(), 1e-5)
    assert_near(dx[:3], torch.zeros_like(x)[:3], 2e-5)  # eps beside 1 is 1e-5
    assert_near(dx[3], torch.full_like(x[3], 0.0 if case.kind else 1e-5**-0.5), 1e-5)
    assert dx.isfinite().all()
    assert dweight.isfinite().all()
