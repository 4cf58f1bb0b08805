"""The CUDA kernel: Triton programs that read and write memory once, for RMSNorm and LayerNorm.

CUDA builds of torch bring Triton, so there is nothing to build. Statistics and sums are float32; gradients of gain
and shift are summed without atomics, in an order that depends on the shape alone, so the same call returns the same
bits every time (not those of torch's own CUDA kernels, which add up in other orders). Rows of up to 16,384 elements
are held in registers, 8,192 in the backward pass; wider ones are swept two or three times. On a CPU the programs are
tested in Triton's interpreter, and compiled ahead for A100 and H100. They were never run on a GPU, nor timed.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch

from normwise.kernels import cpu
from normwise.kernels._ops import LIBRARY, Code
from normwise.kernels._plans import RowPlan
from normwise.spec import NormSpec, Weight

__all__ = [
    "RANK",
    "forward",
    "forward_added",
    "forward_and_moments",
    "moments",
    "refusal",
    "refusal_of_code",
    "unavailable",
]

RANK = 10

_OTHER_ROOT = int(Code.EPS_OUTSIDE | Code.EPS_CLAMP | Code.DIVIDE)


@cache
def unavailable() -> str | None:
    """Return why this kernel cannot run here, or None."""
    if find_spec("triton") is None:
        return "triton is not installed; CUDA builds of torch bring it"
    if not torch.cuda.device_count():  # is_available would start CUDA, and a process that did cannot be forked
        return "torch sees no GPU"
    return None


def refusal(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    **operands: Any,
) -> str | None:
    """Return why this call is not taken, or None."""
    if x.device.type != "cuda":
        return "it runs on a GPU"
    plan = cpu.plan_of(spec)
    if isinstance(plan, str):
        return plan
    if not isinstance(plan, RowPlan):
        return "it takes norms of rows, such as LayerNorm and RMSNorm"
    if spec.weight is Weight.SCALAR:
        return "it takes a gain for each element, not a single number"
    return refusal_of_code(plan.code, x.dtype) or plan.refusal(x, weight, bias, mask, **operands)


def refusal_of_code(code: int, dtype: torch.dtype) -> str | None:
    """Return why there is no program for this ``_ops.Code``, or None."""
    if dtype is torch.float64:
        return "it computes in float32, not float64"
    if Code.kind(code) == Code.L2:
        return "it takes mean squares and variances, not sums of squares"
    if code & _OTHER_ROOT:
        return "it multiplies by 1 / sqrt(s + eps); an eps elsewhere and divisions are in the eager kernel only"
    return None


# Plans call the dispatcher's operators, which know the device
forward = cpu.forward
forward_added = cpu.forward_added
forward_and_moments = cpu.forward_and_moments
moments = cpu.moments


def _launch(name: str, *args: Any) -> Any:
    from normwise.kernels import _triton_rows  # needs triton, which not every machine has

    return getattr(_triton_rows, name)(*args)


for _name in ("norm_rows", "norm_rows_saving", "norm_rows_backward", "add_norm_rows"):
    LIBRARY.impl(_name, partial(_launch, _name), "CUDA")
