"""The definition of every norm, held to torch in float64, to hand formulas and to the invariances it must have."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from normwise.spec import Cast, Gate, Kind, Modulation, NormSpec, Scope, Statistic, Weight, reference
from tests.strategies import float64_tensors, hidden_specs

LAYER = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True)
RMS = NormSpec(eps=1e-6)
PROPERTY = settings(deadline=None, derandomize=True, max_examples=50)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def over(scope: Scope, *axes: int, groups: int | None = None) -> NormSpec:
    return NormSpec(
        scope=scope, axes=axes, center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True, groups=groups
    )


X, W, B = randn(2, 5, 6) * 3 + 1, randn(6, seed=1), randn(6, seed=2)
IMAGES, WC, BC = randn(3, 4, 5, 7) * 2 - 1, randn(4, seed=3), randn(4, seed=4)


@pytest.mark.parametrize(
    ("spec", "x", "w", "b", "torch_says"),
    [
        (LAYER, X, W, B, lambda: F.layer_norm(X, (6,), W, B, 1e-5)),
        (
            over(Scope.HIDDEN, -2, -1),
            X,
            X[0] + 1,
            X[1],
            lambda: F.layer_norm(X, (5, 6), X[0] + 1, X[1], 1e-5),
        ),
        (RMS, X, W, None, lambda: F.rms_norm(X, (6,), W, 1e-6)),
        (NormSpec(eps=None), X, W, None, lambda: F.rms_norm(X, (6,), W, None)),
        (over(Scope.GROUP, -3, -2, -1, groups=2), IMAGES, WC, BC, lambda: F.group_norm(IMAGES, 2, WC, BC, 1e-5)),
        (over(Scope.GROUP, -1, groups=3), X[0], W, B, lambda: F.group_norm(X[0], 3, W, B, 1e-5)),
        (over(Scope.INSTANCE, -2, -1), IMAGES, WC, BC, lambda: F.instance_norm(IMAGES, weight=WC, bias=BC, eps=1e-5)),
        (
            over(Scope.BATCH, -4, -2, -1),
            IMAGES,
            WC,
            BC,
            lambda: F.batch_norm(IMAGES, None, None, WC, BC, training=True, eps=1e-5),
        ),
        (
            over(Scope.BATCH, -2),
            X[0],
            W,
            B,
            lambda: F.batch_norm(X[0], None, None, W, B, training=True, eps=1e-5),
        ),
        (
            NormSpec(statistic=Statistic.L2, eps=1e-2, eps_inside=False, eps_clamp=True, weight=Weight.NONE),
            X * 1e-3,
            None,
            None,
            lambda: F.normalize(X * 1e-3, dim=-1, eps=1e-2),
        ),
    ],
    ids=["layer", "layer-2d", "rms", "rms-eps-none", "group", "group-2d", "instance", "batch", "batch-2d", "l2-clamp"],
)
def test_is_what_torch_computes(
    spec: NormSpec,
    x: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    torch_says: Callable[[], torch.Tensor],
) -> None:
    torch.testing.assert_close(reference(spec, x, w, b), torch_says(), rtol=1e-12, atol=1e-12)


def test_batch_norm_over_the_leading_axes_of_channels_last_input() -> None:
    spec = over(Scope.BATCH, -3, -2)
    expected = F.batch_norm(X.flatten(0, 1), None, None, W, B, training=True, eps=1e-5).view_as(X)
    torch.testing.assert_close(reference(spec, X, W, B), expected, rtol=1e-12, atol=1e-12)


def test_hidden_weight_follows_an_inner_axis() -> None:
    spec = over(Scope.HIDDEN, -3)  # ConvNeXt's LayerNorm on [N, C, H, W]
    expected = F.layer_norm(IMAGES.movedim(1, -1), (4,), WC, BC, 1e-5).movedim(-1, 1)
    torch.testing.assert_close(reference(spec, IMAGES, WC, BC), expected, rtol=1e-12, atol=1e-12)


def test_grouped_rms_norm_splits_the_hidden_axis() -> None:
    expected = F.rms_norm(X.unflatten(-1, (2, 3)), (3,), None, 1e-6).flatten(-2) * W
    spec = NormSpec(scope=Scope.GROUP, axes=(-1,), groups=2)
    torch.testing.assert_close(reference(spec, X, W), expected, rtol=1e-12, atol=1e-12)


def test_eps_outside_the_root_adds_to_the_standard_deviation() -> None:
    spec = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=0.5, eps_inside=False, biased=False)
    expected = (X - X.mean(-1, keepdim=True)) / (X.std(-1, keepdim=True) + 0.5) * W
    torch.testing.assert_close(reference(spec, X, W), expected, rtol=1e-12, atol=1e-12)


def test_unit_offset_factor_and_l2() -> None:
    spec = NormSpec(statistic=Statistic.L2, eps=0.1, factor=6**0.5, weight_offset=1.0)
    expected = (1 + W) * 6**0.5 * X / (X.pow(2).sum(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(reference(spec, X, W), expected, rtol=1e-12, atol=1e-12)


def test_the_cast_decides_where_half_precision_rounds() -> None:
    x, w = X.to(torch.bfloat16), W.to(torch.bfloat16)
    xhat = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    before = reference(NormSpec(cast=Cast.BEFORE_WEIGHT), x, w)
    after = reference(NormSpec(cast=Cast.AFTER_WEIGHT), x, w)
    torch.testing.assert_close(before, w * xhat.to(torch.bfloat16))
    torch.testing.assert_close(after, (w.float() * xhat).to(torch.bfloat16))
    assert not torch.equal(before, after)


def test_statistics_in_the_input_dtype_overflow_in_float16_and_do_not_in_float32() -> None:
    x = torch.tensor([300.0, 1.0, 2.0, 3.0], dtype=torch.float16)
    assert reference(NormSpec(stats_dtype=None, weight=Weight.NONE), x).eq(0).all()
    assert reference(NormSpec(weight=Weight.NONE), x)[0] == pytest.approx(2.0, abs=1e-3)


def test_output_dtype_is_the_input_dtype_unless_the_spec_says_otherwise() -> None:
    x = X.to(torch.float16)
    assert reference(RMS, x, W.float()).dtype is torch.float16
    assert reference(NormSpec(out_dtype="float32"), x, W.float()).dtype is torch.float32


def test_is_differentiable_to_second_order() -> None:
    x = randn(2, 3, 4).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda v: reference(LAYER, v), (x,))


@pytest.mark.parametrize(
    ("spec", "given", "message"),
    [
        (NormSpec(gate=Gate.AFTER), {}, "no gate was given to a spec with gate='after'"),
        (RMS, {"gate": X}, r"a gate of shape \(2, 5, 6\) was given to a spec with gate='none'"),
        (NormSpec(modulation=Modulation.SCALE), {}, "takes scale, given: nothing"),
        (NormSpec(modulation=Modulation.SCALE_SHIFT), {"scale": W}, "takes scale and shift, given: scale"),
        (RMS, {"scale": W, "shift": W}, "takes neither scale nor shift, given: scale, shift"),
        (NormSpec(statistic=Statistic.OTHER), {}, "'other'"),
        (NormSpec(weight=Weight.NONE), {"weight": W}, r"weight of shape \(6,\).*none"),
        (RMS, {"bias": B}, r"bias of shape \(6,\) .* bias=False; drop it"),
    ],
)
def test_refuses_what_it_does_not_define(spec: NormSpec, given: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference(spec, X, **given)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axes": ()}, r"axes=\(\) must be negative"),
        ({"axes": (1,)}, r"axes=\(1,\) must be negative"),
        ({"axes": (-1, -1)}, "names an axis twice"),
        ({"eps": -1e-6}, "eps=-1e-06 must be a finite number, 0 or more"),
        ({"eps": float("nan")}, "eps=nan must be a finite number"),
        ({"scope": Scope.GROUP, "groups": 0}, "groups=0 must be 1 or more"),
        ({"scope": Scope.BATCH, "groups": 2}, "groups=2 splits channels, but scope='batch'; use scope='group'"),
        ({"biased": False}, "biased=False is about a variance, but statistic='mean_square'"),
        ({"partial": 0.0}, "partial=0.0 is a fraction"),
        ({"partial": 0.5, "axes": (-2, -1)}, r"partial=0.5 is a fraction .* of one axis; given axes=\(-2, -1\)"),
        ({"partial": 0.5, "center": True}, "center=True"),
        ({"statistic": Statistic.COMPLETED, "center": True}, "statistic='completed' is for one axis, not centred"),
        ({"weight": Weight.NONE, "cast": Cast.TO_WEIGHT}, "cast='to_weight', .* need a gain, but weight='none'"),
        ({"weight": Weight.NONE, "weight_on_input": True}, "weight_on_input=True need a gain"),
        ({"momentum": 0.1}, "momentum=0.1 moves running statistics, but running=False"),
        ({"gate_activation": "tanh"}, "gate_activation='tanh' is neither 'silu' nor 'sigmoid'"),
        ({"stats_dtype": "int8"}, "stats_dtype='int8', out_dtype=None are not among"),
        ({"out_dtype": "float31"}, "stats_dtype='float32', out_dtype='float31' are not among"),
        ({"cast": "after"}, "cast='after' is none of before_weight, after_weight"),
    ],
)
def test_refuses_combinations_that_no_norm_has_and_names_the_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"no norm is like this: .*{message}"):
        NormSpec(**fields)


def test_plain_strings_are_taken_for_the_words_they_spell() -> None:
    spec = NormSpec(center=True, statistic="variance", eps=1e-5, bias=True)  # type: ignore[arg-type]
    assert spec.statistic is Statistic.VARIANCE
    assert (spec, spec.kind) == (LAYER, Kind.LAYER)
    words = {name: kind for name, kind in get_type_hints(NormSpec).items() if isinstance(kind, type)}
    enums = {name: kind for name, kind in words.items() if issubclass(kind, StrEnum)}
    plain = NormSpec(**{name: str(getattr(NormSpec(), name)) for name in enums})  # type: ignore[arg-type]
    assert {name: type(getattr(plain, name)) for name in enums} == enums


def test_masked_elements_count_for_nothing_and_come_out_as_zero() -> None:
    spec, mask = over(Scope.BATCH, -3, -1), torch.tensor([[True, True, False], [True, False, False]])
    x = randn(2, 4, 3)
    kept = torch.cat([x[0, :, :2], x[1, :, :1]], dim=1)  # [C, real positions]
    expected = (kept - kept.mean(1, keepdim=True)) / (kept.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    poisoned = x.masked_fill(~mask[:, None], float("nan"))
    y = reference(spec, poisoned, mask=mask[:, None])
    torch.testing.assert_close(torch.cat([y[0, :, :2], y[1, :, :1]], dim=1), expected, rtol=1e-12, atol=1e-12)
    assert float(y[~mask[:, None].expand_as(y)].abs().max()) == 0


@pytest.mark.parametrize(
    ("spec", "operands", "expected"),
    [
        (NormSpec(gate=Gate.AFTER), {"gate": X + 1}, lambda: F.rms_norm(X, (6,), None, 1e-6) * F.silu(X + 1)),
        (NormSpec(gate=Gate.BEFORE), {"gate": X + 1}, lambda: F.rms_norm(X * F.silu(X + 1), (6,), None, 1e-6)),
        (
            NormSpec(gate=Gate.AFTER, gate_activation="sigmoid"),
            {"gate": X},
            lambda: F.rms_norm(X, (6,), None, 1e-6) * torch.sigmoid(X),
        ),
        (
            NormSpec(modulation=Modulation.SCALE_SHIFT),
            {"scale": W, "shift": B},
            lambda: F.rms_norm(X, (6,), None, 1e-6) * (1 + W) + B,
        ),
        (NormSpec(weight_on_input=True), {"weight": W}, lambda: F.rms_norm(W * X, (6,), None, 1e-6)),
        (
            NormSpec(partial=0.5),
            {"weight": W},
            lambda: W * X / (X[..., :3].square().mean(-1, keepdim=True) + 1e-6).sqrt(),
        ),
        (
            NormSpec(statistic=Statistic.COMPLETED),
            {},
            lambda: F.rms_norm(torch.cat([X, -X.sum(-1, keepdim=True)], dim=-1), (7,), None, 1e-6)[..., :6],
        ),
    ],
    ids=["gate-after", "gate-before", "sigmoid", "modulated", "weight-on-input", "partial", "completed"],
)
def test_each_operand_enters_where_the_spec_says(
    spec: NormSpec, operands: dict[str, torch.Tensor], expected: Callable[[], torch.Tensor]
) -> None:
    torch.testing.assert_close(reference(spec, X, **operands), expected(), rtol=1e-12, atol=1e-12)


def test_takes_statistics_that_are_given_instead_of_those_of_the_input() -> None:
    spec, mean, var = over(Scope.BATCH, -4, -2, -1), randn(4, seed=5), randn(4, seed=6).square()
    given = {"mean": mean[:, None, None], "statistic": var[:, None, None]}
    expected = F.batch_norm(IMAGES, mean, var, WC, BC, training=False, eps=1e-5)
    torch.testing.assert_close(reference(spec, IMAGES, WC, BC, **given), expected, rtol=1e-12, atol=1e-12)


@PROPERTY
@given(x=float64_tensors(), spec=hidden_specs(eps=0.0), scale=st.sampled_from([1e-3, 0.7, 12.0, 1e4]))
def test_ignores_the_scale_of_its_input_when_eps_is_zero(x: torch.Tensor, spec: NormSpec, scale: float) -> None:
    torch.testing.assert_close(reference(spec, x * scale), reference(spec, x), rtol=1e-6, atol=1e-9)


@PROPERTY
@given(x=float64_tensors(min_hidden=3), spec=hidden_specs(), shift=st.sampled_from([-3.0, 0.5, 40.0]))
def test_ignores_a_shift_exactly_when_it_centers(x: torch.Tensor, spec: NormSpec, shift: float) -> None:
    y, moved = reference(spec, x), reference(spec, x + shift * x.std().item())
    assert torch.allclose(y, moved, rtol=1e-6, atol=1e-6) == spec.center


@PROPERTY
@given(x=float64_tensors(), spec=hidden_specs())
def test_a_row_does_not_see_its_neighbours(x: torch.Tensor, spec: NormSpec) -> None:
    rows = x.reshape(-1, x.shape[-1])
    alone = torch.stack([reference(spec, row) for row in rows]).reshape(x.shape)
    torch.testing.assert_close(reference(spec, x), alone, rtol=1e-12, atol=1e-12)


def test_a_batch_norm_does_see_its_neighbours() -> None:
    spec = over(Scope.BATCH, -4, -2, -1)
    assert not torch.allclose(reference(spec, IMAGES)[:2], reference(spec, IMAGES[:2]))


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (LAYER, Kind.LAYER),
        (RMS, Kind.RMS),
        (NormSpec(statistic=Statistic.L2), Kind.SCALE),
        (over(Scope.GROUP, -1, groups=2), Kind.GROUP),
        (over(Scope.INSTANCE, -1), Kind.INSTANCE),
        (over(Scope.BATCH, -2), Kind.BATCH),
        (NormSpec(statistic=Statistic.OTHER), Kind.OTHER),
    ],
)
def test_kind_is_the_short_name_of_the_field(spec: NormSpec, kind: Kind) -> None:
    assert spec.kind is kind


def test_importing_the_spec_does_not_load_torch() -> None:
    code = "import sys, normwise.spec as s; s.NormSpec(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
