"""Values: the forward pass against the definition, in every dtype and where it is hard."""

from __future__ import annotations

import itertools
import math
import warnings

import torch

from normwise import kernels
from normwise.spec.definition import eps_of
from normwise.testing.case import Case, random
from normwise.testing.report import Measured

__all__ = [
    "constant_rows",
    "far_from_zero",
    "forward",
    "large_rows",
    "near_eps",
    "output_dtype",
    "units",
    "zero_rows",
]

_LARGE = {torch.float32: (1e19, 3e38), torch.bfloat16: (1e19, 3e38), torch.float16: (300.0, 6e4)}
_FAR = 1e3  # standard deviations: E[x^2] - E[x]^2 loses 6 of float32's 7 digits there, two passes lose 3


def units(case: Case, dtype: torch.dtype) -> float:
    """Return how many units in the last place a result may be off.

    Half precision with statistics in float32: normalized value, 1 + weight, product and sum are rounded, half a
    unit each, makes 2; twice that, because a unit near a power of two is half of one beside it. Statistics in half
    precision add six roundings of half a unit (mean, difference, square, mean, eps, root). Wider dtypes: 8 for
    about as many roundings, and log2(n) / 2 for each of two pairwise sums of n elements.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return 4.0 if case.spec.stats_dtype else 10.0
    return 8.0 + math.log2(max(case.elements, 2))


def _error(case: Case, x: torch.Tensor, *, digits: float = 1.0) -> Measured:
    """Measure the forward pass in units in the last place of the largest number that is added up."""
    layer = case.layer(x.dtype)
    y = case.call(layer, x).detach()
    truth = case.truth(x, case.parameters(layer))
    off = ((y.double() - truth.y).abs() / truth.scale).nan_to_num(math.inf, math.inf)
    value = float(off.max()) / torch.finfo(x.dtype).eps
    return Measured(value, units(case, x.dtype) * digits, "units in the last place")


def forward(case: Case, dtype: torch.dtype) -> Measured:
    """Rows of sizes over three decades give what the definition gives in float64."""
    sizes = 10.0 ** torch.linspace(-1.5, 1.5, case.shape[0]).reshape(-1, *[1] * (len(case.shape) - 1))
    return _error(case, (case.input(torch.float64) * sizes).to(dtype))


def near_eps(case: Case) -> Measured | str:
    """Where eps decides, it has the value and the place that the spec says."""
    eps = eps_of(case.spec, torch.float32)
    if eps == 0:
        return "the spec has no eps"
    return _error(case, case.input() * (math.sqrt(eps) if case.spec.eps_inside else eps))


def far_from_zero(case: Case) -> Measured | str:
    """An offset of 1000 standard deviations costs the three digits it must, not six."""
    if not case.spec.center:
        return "the spec does not centre"
    return _error(case, random(case.shape, 8, torch.float32) + _FAR, digits=_FAR)


def large_rows(case: Case, dtype: torch.dtype) -> Measured:
    """Large finite rows give finite results, not zeros: their squares overflow, they do not."""
    worst = Measured(0.0, units(case, dtype))
    for size in _LARGE[dtype]:
        x = (case.input(torch.float64) / case.input(torch.float64).abs().max() * size).to(dtype)
        found = _error(case, x)
        if not found.value <= worst.value:
            worst = Measured(found.value, found.limit, f"{found.about}, rows of {size:g}")
    return worst


def _not_finite(case: Case, x: torch.Tensor) -> Measured:
    layer = case.layer(x.dtype)
    found = case.run(layer, x, random(tuple(x.shape), 9))
    lost = {name: int((~each.isfinite()).sum()) for name, each in found.items()}
    told = ", ".join(f"{count} in {name}" for name, count in lost.items() if count)
    return Measured(float(sum(lost.values())), 0.0, told or "numbers that are not finite")


def constant_rows(case: Case, dtype: torch.dtype) -> Measured | str:
    """Constant rows have finite outputs and gradients."""
    if dtype is torch.float16 and case.spec.stats_dtype is None:
        return "1 / eps is beyond the range of float16, which the spec asks for"
    values = torch.tensor([1.0, -3.0, 1e4, 1e-3, 0.1, 7.0])[: case.shape[0]].repeat(case.shape[0])[: case.shape[0]]
    shape = [-1] + [1] * (len(case.shape) - 1)
    same = torch.full(case.shape, 3.0) if -len(case.shape) in case.spec.axes else values.reshape(shape)
    return _not_finite(case, same.expand(case.shape).clone().to(dtype))


def zero_rows(case: Case) -> Measured:
    """A row of zeros gives the shift, and finite gradients."""
    x = torch.zeros(case.shape)
    found = _not_finite(case, x)
    layer = case.layer()
    y, truth = case.call(layer, x).detach(), case.truth(x, case.parameters(layer))
    if found.value or not truth.y.isfinite().all():  # without eps the definition divides 0 by 0
        return found
    return Measured(float((y.double() - truth.y).abs().max()), float(torch.finfo(torch.float32).eps), "off the shift")


def output_dtype(case: Case) -> Measured | str:
    """The dtype of the output is the one the spec says, for inputs and parameters of one dtype and of two."""
    wrong, tried = [], 0
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for of_x, own in itertools.product(dtypes, dtypes):
        layer, x = case.layer(own), case.input(of_x)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's RMSNorm says that two dtypes are slow
                found = case.call(layer, x).dtype
        except (RuntimeError, TypeError, ValueError):  # a layer need not take two dtypes
            if of_x is own:
                raise
            continue
        held = case.parameters(layer)
        expected = kernels.forward(case.spec, x, held.get("weight"), held.get("bias")).dtype
        tried += 1
        if found is not expected:
            wrong.append(f"{of_x} with {own} parameters gives {found}, not {expected}".replace("torch.", ""))
    return Measured(float(len(wrong)), 0.0, "; ".join(wrong) or f"wrong of {tried} pairs")
