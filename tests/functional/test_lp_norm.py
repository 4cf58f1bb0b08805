"""``lp_norm`` where the samples of torch and ONNX do not go: large, tiny and zero vectors, and bad arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from normwise.functional import l2_norm, lp_norm

POWERS = (0.5, 1.0, 1.2, 2.0, 3.0, 8.0, math.inf)


def exact(x: torch.Tensor, p: float) -> torch.Tensor:
    wide = x.double() / x.double().abs().max()
    return (wide / torch.linalg.vector_norm(wide, p)).to(x.dtype)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("size", [3e38, 1e19, 1.0, 1e-19, 1e-37])
def test_a_vector_of_any_size_is_divided_by_its_norm(p: float, size: float) -> None:
    x = torch.tensor([1.0, -0.5, 0.25]) * size
    torch.testing.assert_close(lp_norm(x, p, eps=0.0), exact(x, p), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("p", POWERS)
def test_zeros_stay_zeros_and_their_gradient_is_that_of_dividing_by_eps(p: float) -> None:
    x = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    y = lp_norm(x, p, eps=0.5)
    assert torch.equal(y, torch.zeros_like(y))
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


# Forward-mode AD compiles torch's own decompositions on first use, with a call that torch says it will drop.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("p", [1.2, 2.0, 3.0])
def test_derivatives_agree_with_finite_differences(p: float) -> None:
    x = torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=torch.float64, requires_grad=True)
    for dim in (-1, (0, 1)):
        assert torch.autograd.gradcheck(lambda x, dim=dim: lp_norm(x, p, dim), x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda x, dim=dim: lp_norm(x, p, dim), x)


def test_p_2_is_l2_norm_to_the_bit_and_no_vector_gives_no_vector() -> None:
    x = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
    assert torch.equal(lp_norm(x), l2_norm(x))
    assert lp_norm(torch.empty(0, 4), 1).shape == (0, 4)


def test_half_precision_is_rounded_once_whatever_autocast_says() -> None:
    x = torch.linspace(-2.0, 3.0, 12, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lp_norm(x, 1), exact(x, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 0}, "given p = 0 and eps = 1e-12; pass a p above 0"),
        ({"p": math.nan}, "given p = nan"),
        ({"eps": -1.0}, "eps = -1.0"),
        ({"p": 1, "dim": 2}, r"dim=\[2\], given an input of 2 axes, shape \[2, 2\]; pass axes that it has"),
        ({"p": 1, "dim": ()}, r"dim=\[\]"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lp_norm(torch.ones(2, 2), **arguments)


def test_whole_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"lp_norm\(\) needs a floating point input, given torch.int64"):
        lp_norm(torch.ones(2, dtype=torch.long), 1)
