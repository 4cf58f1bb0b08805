"""What every norm is by nature: blind to scale and shift, to its neighbours and to their order, and idempotent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from normwise import layers
from tests.layers.layer_cases import CASES, outputs, randomized
from tests.strategies import seeds

H = 8
CENTERED = {
    "LayerNorm": lambda eps: layers.LayerNorm(H, eps, dtype=torch.float64),
    "GroupNorm": lambda eps: layers.GroupNorm(2, H, eps, dtype=torch.float64),
    "InstanceNorm1d": lambda eps: layers.InstanceNorm1d(5, eps, dtype=torch.float64),
    "BatchNorm": lambda eps: layers.BatchNorm(H, eps, channel_dim=-1, dtype=torch.float64),
}
NORMS: dict[str, Callable[[float], nn.Module]] = {
    **CENTERED,
    "RMSNorm": lambda eps: layers.RMSNorm(H, eps, dtype=torch.float64),
    "CenteredRMSNorm": lambda eps: layers.CenteredRMSNorm(H, eps),
    "PartialRMSNorm": lambda eps: layers.PartialRMSNorm(H, 0.5, eps, dtype=torch.float64),
    "ScaleNorm": lambda eps: layers.ScaleNorm(H, eps, dtype=torch.float64),
    "L2Norm": lambda eps: layers.L2Norm(eps=eps),
    "ChannelLayerNorm": lambda eps: layers.ChannelLayerNorm(5, eps, dtype=torch.float64),
}
every_norm = pytest.mark.parametrize("name", NORMS)


def drawn(seed: int, name: str) -> torch.Tensor:
    shape = (3, H, 4) if name == "GroupNorm" else (3, 5, H)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.3


@every_norm
@given(seed=seeds, exponent=st.integers(-300, 300))
def test_ignores_the_scale_of_its_input_to_the_bit_without_eps(name: str, seed: int, exponent: int) -> None:
    norm, x = NORMS[name](0.0), drawn(seed, name)
    assert torch.equal(norm(x * 2.0**exponent), norm(x))


@every_norm
@given(seed=seeds, shift=st.sampled_from([-3.0, 0.5, 40.0]))
def test_ignores_a_shift_exactly_when_it_centers(name: str, seed: int, shift: float) -> None:
    norm, x = NORMS[name](1e-6), drawn(seed, name)
    assert torch.allclose(norm(x + shift), norm(x), rtol=1e-9, atol=1e-9) == (name in CENTERED or "Layer" in name)


@pytest.mark.parametrize("name", [name for name in NORMS if name != "PartialRMSNorm"])
@given(seed=seeds)
def test_normalizing_twice_is_normalizing_once(name: str, seed: int) -> None:
    norm, x = NORMS[name](1e-14), drawn(seed, name)
    torch.testing.assert_close(norm(norm(x)), norm(x), rtol=1e-9, atol=1e-9)


@every_norm
@given(seed=seeds)
def test_the_order_of_samples_does_not_matter(name: str, seed: int) -> None:
    norm, x = NORMS[name](1e-6), drawn(seed, name)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(norm(x[order]), norm(x)[order], rtol=1e-12, atol=1e-12)


# Statistics over the hidden axes: a row is what it is, whatever stands beside it.
ALONE = [name for name, case in CASES.items() if case.inputs(1)[0].shape[-1] == 6 and not case.two_modes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in ALONE if not name.startswith("Ada")])  # matrix products do depend
def test_a_row_is_the_same_to_the_bit_in_any_batch(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    module = randomized(case.make(dtype))
    inputs, operands = [each.to(dtype) for each in case.inputs(17)], case.operands(17)
    together = outputs(module(*inputs, **operands))
    for index in (0, 8, 16):
        one = slice(index, index + 1)
        alone = outputs(module(*(each[one] for each in inputs), **{key: each[one] for key, each in operands.items()}))
        for y, row in zip(together, alone, strict=True):
            # torch's sigmoid rounds otherwise in the last few elements of a buffer than in whole vectors
            tolerance = 2.0**-22 if name.startswith("Gated") and dtype is torch.float32 else 0.0
            torch.testing.assert_close(y[one], row, rtol=tolerance, atol=tolerance / 4)
