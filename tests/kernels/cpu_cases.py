"""Calls that the compiled kernels of rows take, one for each kind of root, rounding and operand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from normwise import kernels
from normwise.functional.hidden import LAYER, RMS
from normwise.spec import PROMOTED, Cast, Form, NormSpec, Statistic, Weight

SCALE = NormSpec(
    statistic=Statistic.L2, eps=1e-5, eps_inside=False, eps_clamp=True, weight=Weight.SCALAR, cast=Cast.AFTER_WEIGHT
)
SPECS = {
    "rms": RMS,
    "llama": replace(RMS, eps=1e-6, cast=Cast.BEFORE_WEIGHT, out_dtype=PROMOTED),
    "gemma": replace(RMS, eps=1e-6, weight_offset=1.0),
    "without weight": replace(RMS, weight=Weight.NONE),
    "outside": replace(RMS, eps=1e-6, eps_inside=False),
    "layer": replace(LAYER, form=Form.RECIPROCAL),
    "torch layer": LAYER,
    "over two axes": replace(LAYER, axes=(-2, -1)),
    "scale": SCALE,
    "l2": replace(SCALE, eps_clamp=False, eps_inside=True, weight=Weight.NONE),
}

HALF = (torch.bfloat16, torch.float16)
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
needs_library = pytest.mark.skipif(kernels.cpu.unavailable() is not None, reason=str(kernels.cpu.unavailable()))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameters(
    spec: NormSpec, shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return gain and shift for inputs of this shape, None where the spec has none."""
    own = () if spec.weight is Weight.SCALAR else tuple(shape[axis] for axis in sorted(spec.axes))
    weight = None if spec.weight is Weight.NONE else numbers(*own, seed=1, dtype=dtype)
    return weight, numbers(*own, seed=2, dtype=dtype) if spec.bias and weight is not None else None


def of_spec(spec: NormSpec) -> Callable[..., torch.Tensor]:
    return lambda x, weight, bias: kernels.cpu.forward(spec, x, weight, bias)


def taken(spec: NormSpec, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    return kernels.cpu.refusal(spec, x, weight, bias, None) is None
