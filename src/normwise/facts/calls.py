"""One execution of one norm, and what every way of finding norms shares."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from normwise.facts.affine import Affine
from normwise.facts.flow import Flow
from normwise.facts.records import Evidence
from normwise.graph import Op, ValueKind
from normwise.spec import Gate, Modulation, NormSpec

__all__ = ["AGREES", "NormCall", "agree", "parameter_of", "random_input", "with_affine"]

# Float64 against float64: rounding alone, with room for badly conditioned variances
AGREES = 1e-6
_SEED = 20261129


@dataclass(slots=True)
class NormCall:
    """One execution of one norm."""

    op: Op  # the op that divides
    input: int
    core: int  # normalized, before gain and shift
    output: int
    spec: NormSpec | None
    call: int  # id of the module call that holds it
    native: bool
    evidence: Evidence
    members: frozenset[int] = frozenset()  # op ids from the input to the output
    weight: int | None = None  # value ids of the parameters
    bias: int | None = None
    running_mean: int | None = None
    running_var: int | None = None
    uses_batch: bool = True
    note: str | None = None
    statistic_value: int = -1  # whose elements were reduced
    guarded_value: int = -1  # the sum with eps
    eps_outside: bool = False
    count: int = 0  # elements under one statistic
    inner_values: frozenset[int] = field(default_factory=frozenset)  # full-size values between input and output


def with_affine(spec: NormSpec, affine: Affine) -> NormSpec:
    """Return a core's spec with the gain, shift, gate and cast that follow it."""
    weight = affine.weight_kind if affine.weight is not None else spec.weight
    return replace(
        spec,
        factor=spec.factor * affine.factor,
        weight=weight,
        weight_offset=affine.weight_offset,
        bias=spec.bias or affine.bias is not None,
        groups=affine.groups if affine.groups else spec.groups,
        modulation=affine.modulation if affine.modulation is not Modulation.NONE else spec.modulation,
        gate=affine.gate if affine.gate is not Gate.NONE else spec.gate,
        cast=affine.cast,
    )


def parameter_of(flow: Flow, value: int | None) -> int | None:
    """Return the parameter or buffer that a gain or shift was made from."""
    seen = 0
    while value is not None and flow.graph.values[value].kind is ValueKind.OP and seen < 12:
        op = flow.graph.producer(value)
        assert op is not None
        learned = [i for i in op.inputs if flow.learned[i]]
        value, seen = (learned[0] if learned else None), seen + 1
    if value is not None and flow.graph.values[value].kind in (ValueKind.PARAM, ValueKind.BUFFER):
        return value
    return None


def random_input(shape: tuple[int, ...], eps: float | None, *, offset: float = 0.5, scale: float = 1.0) -> torch.Tensor:
    """Return float64 data; with ``eps`` at the size where eps matters as much as the variance."""
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * scale + offset
    return x * math.sqrt(eps) if eps else x


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two float64 results are the same up to rounding."""
    if a.shape != b.shape:
        return False
    bound = float(b.abs().max()) if b.numel() else 0.0
    return bool(((a - b).abs() <= AGREES * (b.abs() + bound + 1e-30)).all())
