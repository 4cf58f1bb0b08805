"""The CPU kernel: compiled C++ that reads and writes memory once.

It is built from ``csrc/`` where torch and a compiler are at hand, against the stable ABI of LibTorch, and runs in
torch's own thread pool. One binary holds code for plain x86-64, for AVX2, for AVX-512 and for AVX-512 that rounds to
bfloat16, and takes the best at run time; ``NORMWISE_ISA=avx512``, ``avx2`` or ``baseline`` rules the better ones out.
Rows are added up in the order of torch's own kernels, so results are those of the eager kernel to the bit; gradients
of gain and shift are summed in float32 over blocks of rows that depend on the shape alone, so they are the same for
any number of threads.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from normwise.kernels import eager
from normwise.kernels._batch import BatchPlan, batch_plan
from normwise.kernels._channel import channel_plan
from normwise.kernels._gated import gated_plan
from normwise.kernels._group import group_plan
from normwise.kernels._plans import Plan, RowPlan, row_plan
from normwise.kernels.eager import Moments
from normwise.spec import NormSpec

__all__ = [
    "FAMILIES",
    "RANK",
    "forward",
    "forward_added",
    "forward_and_moments",
    "instructions",
    "moments",
    "plan_of",
    "refusal",
    "unavailable",
]

RANK = 10


@cache
def unavailable() -> str | None:
    """Return why this kernel cannot run here, or None; loads the compiled library."""
    path = _library()
    if path is None:
        return "it was not compiled when normwise was installed; in a clone, run: pip install --no-build-isolation -e ."
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"its library does not load: {str(error).splitlines()[0]}"
    return None


def _library() -> Path | None:
    return next(iter(sorted(Path(__file__).parent.glob("_cpu*.so"))), None)


@cache
def instructions() -> str:
    """Return which instruction set was chosen: baseline, avx2, avx512, or avx512bf16 (it rounds to bfloat16)."""
    name = ctypes.CDLL(str(_library())).normwise_instructions
    name.restype = ctypes.c_char_p
    return name().decode()


# One function a family of norms: its plan for a spec, a reason, or None where the spec is not of the family.
FAMILIES = (gated_plan, row_plan, batch_plan, group_plan, channel_plan)
_PLANS: dict[int, tuple[NormSpec, Plan | str]] = {}


def plan_of(spec: NormSpec) -> Plan | str:
    """Return the plan of ``spec``, the same object each time, or why there is none."""
    if torch.compiler.is_compiling():  # a compiled graph would be bound to what is in the table
        return _plan_of(spec)
    known = _PLANS.get(id(spec))  # a hash of all the fields takes longer than normalizing a short row
    if known is not None and known[0] is spec:
        return known[1]
    if len(_PLANS) >= 4096:
        _PLANS.clear()
    _PLANS[id(spec)] = (spec, _plan_of(spec))
    return _PLANS[id(spec)][1]


def _plan_of(spec: NormSpec) -> Plan | str:
    plans = [plan for plan in (family(spec) for family in FAMILIES) if plan is not None]
    return plans[0] if plans else f"no compiled kernel takes statistics over {spec.scope} axes {list(spec.axes)}"


def refusal(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    **operands: Any,
) -> str | None:
    """Return why this call is not taken, or None."""
    if x.device.type != "cpu":
        return "it runs on a CPU"
    plan = plan_of(spec)
    return plan if isinstance(plan, str) else plan.refusal(x, weight, bias, mask, **operands)


def forward(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    **operands: Any,
) -> torch.Tensor:
    """Compute what ``spec`` says; arguments as in ``eager.forward``, which ``refusal`` must have let pass."""
    return _taken(spec).forward(x, weight, bias, mask, **operands)


def forward_and_moments(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    **operands: Any,
) -> tuple[torch.Tensor, Moments | None]:
    """Compute what ``spec`` says, and return the moments too."""
    return _taken(spec).forward_and_moments(x, weight, bias, mask, **operands)


def forward_added(
    spec: NormSpec,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x + residual and the sum; as ``eager.forward_added``, in one pass over memory."""
    plan = _taken(spec)
    assert isinstance(plan, RowPlan)
    return plan.forward_added(x, residual, weight, bias, wide)


def _taken(spec: NormSpec) -> Plan:
    plan = plan_of(spec)
    assert not isinstance(plan, str)
    return plan


def moments(spec: NormSpec, x: torch.Tensor, mask: torch.Tensor | None = None) -> Moments:
    """Measure mean, statistic and number of elements; as ``eager.moments``, differentiable too."""
    plan = _taken(spec)
    return plan.moments(x, mask) if isinstance(plan, BatchPlan) else eager.moments(spec, x, mask)
