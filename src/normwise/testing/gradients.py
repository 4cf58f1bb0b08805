"""Gradients: first and second ones against the definition, and sums over many rows."""

from __future__ import annotations

import math

import torch

from normwise.spec.definition import along
from normwise.testing.case import Case, random
from normwise.testing.report import Measured
from normwise.testing.values import units

__all__ = [
    "input_gradient",
    "many_rows",
    "parameter_gradients",
    "residual_gradient",
    "second_derivative",
    "threads",
]

# torch's CPU LayerNorm adds 1 to a bfloat16 number up to 256 and then stands still: 16,384 rows give 256 or 512.
_MANY = 16_384
_SECOND = 1e-9  # of float64's 16 digits two derivatives and as many cancellations leave ten


def input_gradient(case: Case, dtype: torch.dtype) -> Measured:
    """The gradient of the input, in units in the last place of its largest number.

    Twice the roundings of the forward pass: the gradient passes through the product and the cast again.
    """
    layer, x, upstream = case.layer(dtype), case.input(dtype), random(case.shape, 10).to(dtype)
    found, truth = case.run(layer, x, upstream), case.truth(x, case.parameters(layer), upstream)
    off = (found["x"].double() - truth.grads["x"]).abs().max() / truth.grads["x"].abs().max().clamp_min(1e-30)
    return Measured(float(off) / torch.finfo(dtype).eps, 2 * units(case, dtype), "units in the last place")


def _summed(case: Case, dtype: torch.dtype, rows: int | None, *, one_sign: bool) -> Measured | str:
    """Measure gradients of gain and shift, in units in the last place of the sum of absolute values they add up.

    Terms and result are rounded, and terms that are rounded in half precision err in both directions: 2 units in
    half precision (5 where statistics are in half precision). In wider dtypes the terms err as in the forward pass,
    and n of them added one after the other by about sqrt(n) half units: more than a pairwise sum, and not wrong.
    """
    layer, x = case.layer(dtype), case.input(dtype, rows=rows)
    held = case.parameters(layer)
    if not held:
        return "the layer has no parameters"
    half = dtype in (torch.float16, torch.bfloat16)
    limit = units(case, dtype) / 2 if half else units(case, dtype) + math.sqrt(x.numel() / case.elements)
    neutral = {name: torch.full_like(each, 1 - case.spec.weight_offset) for name, each in held.items()}
    normalized = case.truth(x, {name: each for name, each in neutral.items() if name == "weight"}).y
    worst = Measured(0.0, limit)
    for name, own in held.items():
        derivative = normalized if name == "weight" else torch.ones_like(normalized)
        # with the sign of the derivative all terms of the sum are positive
        upstream = (derivative.sign() if one_sign else random(tuple(x.shape), 11)).to(dtype)
        positive = _summed_like(case, own, (upstream.double() * derivative).abs())
        over = float(positive.max() / _MANY).__ceil__()  # a scalar gain adds up more than float16 can hold
        upstream, positive = (each / 2 ** (over - 1).bit_length() for each in (upstream, positive))
        found, true = case.run(layer, x, upstream)[name], case.truth(x, held, upstream).grads[name]
        off = (found.double() - true).abs() / positive.clamp_min(1e-30)
        at, value = int(off.argmax()), float(off.max()) / torch.finfo(dtype).eps
        if not value <= worst.value:
            told = f"units of the sum; {name} {found.flatten()[at]:.6g}, right {true.flatten()[at]:.6g}"
            worst = Measured(value, limit, told)
    return worst


def _summed_like(case: Case, parameter: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Return sums of ``terms`` over all that a parameter is repeated along."""
    own = torch.zeros_like(parameter, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(along(case.spec, own, terms.ndim).expand(terms.shape), own, terms)[0]


def parameter_gradients(case: Case, dtype: torch.dtype) -> Measured | str:
    """The gradients of gain and shift for random upstream gradients."""
    return _summed(case, dtype, None, one_sign=False)


def many_rows(case: Case, dtype: torch.dtype) -> Measured | str:
    """Sums over 16,384 rows arrive: ones add up to 16,384."""
    positions = math.prod(case.shape[1:]) // max(case.shape[1:])
    return _summed(case, dtype, _MANY // positions, one_sign=True)


def threads(case: Case, dtype: torch.dtype) -> Measured | str:
    """Gradients of gain and shift have the same bits on one, two and four threads."""
    if not case.parameters(case.layer(dtype)):
        return "the layer has no parameters"
    x = case.input(dtype, rows=4096)
    upstream = random(tuple(x.shape), 12).to(dtype)
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            results.append(case.run(case.layer(dtype), x, upstream))
    finally:
        torch.set_num_threads(before)
    differing = {
        name: int((results[0][name] != each[name]).sum())
        for each in results[1:]
        for name in results[0]
        if not torch.equal(results[0][name], each[name])
    }
    return Measured(float(sum(differing.values())), 0.0, f"differing numbers {differing or ''}".strip())


def second_derivative(case: Case) -> Measured | str:
    """The second derivative is right, or asking for it is an error: never zero or absent without a word."""
    layer, upstream, toward = case.layer(torch.float64), random(case.shape, 13), random(case.shape, 14)
    x = case.input(torch.float64).requires_grad_()
    held = case.parameters(layer)
    (first,) = torch.autograd.grad(case.call(layer, x).double(), x, upstream, create_graph=True)
    if not first.requires_grad:
        return Measured(math.inf, 0.0, "the gradient is detached: a penalty on it would be lost")
    try:
        found = torch.autograd.grad(first, [x, *held.values()], toward, allow_unused=True)
    except RuntimeError as error:
        return f"refused: {str(error).splitlines()[0]}"
    worst = Measured(0.0, _SECOND, "relative")
    for name, mine, true in zip(["x", *held], found, case.second(x, held, upstream, toward), strict=True):
        mine = torch.zeros_like(true) if mine is None else mine
        off = float((mine - true).abs().max() / true.abs().max().clamp_min(1e-30))
        if not off <= worst.value:
            worst = Measured(off, _SECOND, f"relative; {name}")
    return worst


def residual_gradient(case: Case) -> Measured | str:
    """A norm that adds a residual hands its gradient on, from the output and from the sum."""
    if not case.residual:
        return "the layer adds no residual"
    layer = case.layer()
    x, residual = case.input().requires_grad_(), case.input(seed=15).requires_grad_()
    y, summed = layer(x, residual)
    to_y, to_sum = random(case.shape, 16, y.dtype), random(case.shape, 17, summed.dtype)
    found = torch.autograd.grad([y, summed], [x, residual], [to_y, to_sum])
    truth = case.truth((x + residual).detach(), case.parameters(layer), to_y)
    expected = truth.grads["x"] + to_sum.double()
    off = max(float((each.double() - expected).abs().max() / expected.abs().max()) for each in found)
    eps = torch.finfo(torch.float32).eps
    return Measured(off / eps, 2 * units(case, torch.float32), "units in the last place")
