"""Calls that the compiled kernels of rows take, one for each kind of root, rounding and operand."""

from __future__ import annotations

from dataclasses import replace

import torch

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


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameters(
    spec: NormSpec, shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return gain and shift for inputs of this shape, None where the spec has none."""
    own = () if spec.weight is Weight.SCALAR else tuple(shape[axis] for axis in sorted(spec.axes))
    weight = None if spec.weight is Weight.NONE else numbers(*own, seed=1, dtype=dtype)
    return weight, numbers(*own, seed=2, dtype=dtype) if spec.bias and weight is not None else None
