"""Judges a call of the compiled kernels: the same bits whatever the threads, inputs untouched, errors within bounds.

The truth is the definition in float64. What it may be missed by follows from how the sums of a norm are rounded. With
hat = c / root the normalized value and m, v the mean and variance that c and root come from, in units of the sums:

* m is off by the size of what it is a mean of, |m| + root; c by that too, so that hat is off by
  |hat| for the rounding of root, and by k (1 + |hat|) with k = |m| / root + 1 where a mean is taken off;
* y by the error of hat times the gain, and by the shift;
* dx = (g - mean(g) - hat mean(g hat)) / root with g = dy * gain by the size of each of its terms, times 1 + k for root;
* dweight by the error of hat times |dy|, dbias by |dy|, summed over what they are sums of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from normwise import kernels
from normwise.spec import Cast, Gate, NormSpec, Scope, Statistic, definition, reference
from tests.kernels.fuzz_calls import Call
from tests.kernels.group_cases import Results, bits, threads

__all__ = ["check", "refusal"]

# Units of the sums: numbers are added up in many sums and in levels, so that the error of a statistic hardly grows with
# their number. Found here in a thousand calls of each family: at most 8 units.
UNITS = 16
# Only groups with channels last add up to 256 numbers one after the other (csrc/group_table.h): their differences from
# a few elements, which may be two deviations off. Found here: 23 units of the mean, 100 of the variance.
UNITS_OF_GROUPS, UNITS_OF_VARIANCE = 64, 256


def refusal(call: Call) -> str | None:
    """Return why the compiled kernels do not take the call, or None."""
    x, weight, bias, operands = _arguments(call, call.inputs)
    return kernels.cpu.refusal(call.spec, x, weight, bias, call.mask, **operands)


def check(call: Call) -> str | None:
    """Return what is wrong with the answer to a call that is taken, or None."""
    memory = {name: _bytes(each) for name, each in call.tensors().items()}
    kept = {name: each.clone() for name, each in memory.items()}
    answers: list[Results] = []
    for count in (1, 2) if call.large else (1, 3, 8):
        with threads(count):
            answers.append(_run(call))
    for name, before in kept.items():
        if not torch.equal(memory[name], before):
            return f"{name} was written to"
    with threads(1):  # on more than the machine has free, small operations of torch wait for each other
        for answer in answers[1:]:
            for name, one, other in zip(answer, bits(answers[0]), bits(answer), strict=True):
                if not torch.equal(one, other):
                    return f"{name} changes with the number of threads"
        moments, others = _without_gradients(call, answers[0])
        return _compared(call, answers[0] | moments) or next((f"{each} is another one" for each in others), None)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return all the memory that ``x`` is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def _arguments(
    call: Call, inputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, dict[str, object]]:
    operands: dict[str, object] = {name: inputs[name] for name in ("gate", "residual") if name in inputs}
    if call.given is not None:
        operands["given"] = call.given
    return inputs["x"], inputs.get("weight"), inputs.get("bias"), operands


def _dsum(summed: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sum with a residual: quarters, which no dtype rounds, others in each row."""
    return ((torch.arange(summed.numel()) % 7 - 3) / 4).reshape(summed.shape).to(summed.dtype)


def _outputs(call: Call, inputs: dict[str, torch.Tensor]) -> Results:
    x, weight, bias, operands = _arguments(call, inputs)
    if "residual" in inputs:
        y, summed = kernels.forward_added(call.spec, x, inputs["residual"], weight, bias, wide=call.wide, kernel="cpu")
        return {"y": y, "sum": summed}
    return {"y": kernels.forward(call.spec, x, weight, bias, call.mask, kernel="cpu", **operands)}


def _run(call: Call) -> Results:
    """Return the outputs and the gradients of all inputs."""
    leaves = {name: each.detach().requires_grad_() for name, each in call.inputs.items()}
    outputs = _outputs(call, leaves)
    upstream = [call.dy, *(_dsum(each) for name, each in outputs.items() if name == "sum")]
    grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), upstream)
    gradients = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: each.detach() for name, each in outputs.items()} | gradients


@torch.no_grad()
def _without_gradients(call: Call, answer: Results) -> tuple[Results, list[str]]:
    """Return the moments, where a norm gives them, and which outputs are other ones than beside gradients."""
    outputs = _outputs(call, call.inputs).items()
    another = [
        f"{name} where no gradient is asked for" for name, each in outputs if not torch.equal(each, answer[name])
    ]
    if call.spec.scope is Scope.HIDDEN or call.given is not None:
        return {}, another
    x, weight, bias, _ = _arguments(call, call.inputs)
    y, found = kernels.forward_and_moments(call.spec, x, weight, bias, call.mask, kernel="cpu")
    assert found.mean is not None
    if not torch.equal(y, answer["y"]):
        another.append("y where moments are asked for")
    return {"mean": found.mean, "variance": found.statistic}, another


class _Parts(NamedTuple):
    """A norm in float64, in the shape that it is taken in: ``axes`` are reduced."""

    mean: torch.Tensor
    statistic: torch.Tensor
    root: torch.Tensor
    hat: torch.Tensor
    off: torch.Tensor  # how far hat may be off, in units of the sums
    spread: torch.Tensor  # k
    elements: torch.Tensor


def _split(spec: NormSpec, x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(min(spec.axes), (spec.groups, -1)) if spec.groups else x


def _parts(call: Call, spec: NormSpec, h: torch.Tensor) -> _Parts:
    real = torch.ones((), dtype=torch.float64) if call.mask is None else call.mask.double()
    h, axes = _split(spec, h), spec.axes
    elements = real.expand(h.shape).sum(axes, keepdim=True).clamp_min(1)
    mean, given = h.sum(axes, keepdim=True) / elements, call.given
    statistic = definition._statistic(spec, h, mean, real, elements)
    spread = torch.zeros_like(mean)
    if given is not None:
        assert given.mean is not None
        mean, statistic = given.mean.double(), given.statistic.double()
    root = definition._root(spec, statistic)
    if spec.center and given is None:
        spread = mean.abs() / root + 1
    hat = ((h - mean) * real if spec.center else h) / root
    return _Parts(mean, statistic, root, hat, hat.abs() + spread * (1 + hat.abs()), spread, elements)


def _exact(call: Call) -> NormSpec:
    """Return the spec without roundings, and with the eps of the sums of the call."""
    eps = definition.eps_of(call.spec, _sums(call))
    return replace(call.spec, cast=Cast.NONE, out_dtype=None, eps=eps)


def _sums(call: Call) -> torch.dtype:
    return torch.float64 if call.x.dtype is torch.float64 else torch.float32


def _compared(call: Call, answer: Results) -> str | None:
    sums = torch.finfo(_sums(call)).eps
    for name, wanted, units in _truth(call):
        got = answer[name]
        rounded = torch.finfo(got.dtype).eps * wanted.abs()  # twice what a single rounding may be off
        if name == "y":  # also rounded before and after the gain, and before the gate
            rounded = 2 * torch.maximum(rounded, torch.finfo(call.x.dtype).eps * wanted.abs())
        if got.shape != wanted.shape:
            return f"{name} has shape {list(got.shape)} instead of {list(wanted.shape)}"
        largest = torch.finfo(got.dtype).max
        if not bool((got.isfinite() | (wanted.abs() >= largest)).all()):
            return f"{name} has numbers that are not finite"
        allowed = rounded + sums * units + _least(got.dtype)
        off = (got.double().clamp(-largest, largest) - wanted.clamp(-largest, largest)).abs()
        if not bool((off <= allowed).all()):
            share = (off / allowed).nan_to_num(nan=torch.inf)
            worst = int(share.argmax())
            return f"{name} is {off.flatten()[worst]:.3g} off, {share.max():.2f} of what is allowed"
    return None


def _least(dtype: torch.dtype) -> float:
    """Return how far apart the smallest numbers of ``dtype`` lie."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _truth(call: Call) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name of each result, what it is in float64, and how far it may be off, in roundings of the sums."""
    spec, given = _exact(call), call.given
    units = UNITS_OF_GROUPS if spec.scope in (Scope.GROUP, Scope.INSTANCE) else UNITS
    wide = {name: each.detach().double() for name, each in call.inputs.items()}
    if "residual" in wide:
        residual = call.inputs["residual"].float() if call.wide else call.inputs["residual"]
        wide["x"] = (call.x.to(residual.dtype) + residual).detach().double()
        del wide["residual"]
    leaves = {name: each.requires_grad_() for name, each in wide.items()}
    known = None if given is None or given.mean is None else given.mean.double()
    y = reference(
        spec,
        leaves["x"],
        leaves.get("weight"),
        leaves.get("bias"),
        call.mask,
        gate=leaves.get("gate"),
        mean=known,
        statistic=None if given is None else given.statistic.double(),
    )
    grads = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), call.dy.double()), strict=True))
    with torch.no_grad():
        sizes, parts = _sizes(call, spec, wide)
        yield "y", y, units * sizes["y"]
        if "residual" in call.inputs:
            yield "sum", wide["x"], torch.zeros_like(wide["x"])
            dsum = _dsum(wide["x"])
            grads["x"] = grads["residual"] = grads["x"] + dsum
            sizes["x"] = sizes["residual"] = sizes["x"] + dsum.abs()
        for name, grad in grads.items():
            yield f"d{name}", grad, units * sizes[name]
        if spec.scope is not Scope.HIDDEN and given is None and y.numel():
            mean, deviation = parts.mean.abs(), parts.statistic.sqrt()
            yield "mean", parts.mean, units * (mean + deviation)
            yield "variance", parts.statistic, UNITS_OF_VARIANCE * deviation * (mean + deviation)


def _sizes(call: Call, spec: NormSpec, wide: dict[str, torch.Tensor]) -> tuple[Results, _Parts]:
    """Return for y and for each gradient the size of its terms, which the errors of the sums go with, and the norm."""
    x, dy, weight, bias = wide["x"], call.dy.double().abs(), wide.get("weight"), wide.get("bias")
    if call.mask is not None:
        x, dy = x.masked_fill(~call.mask, 0.0), dy.masked_fill(~call.mask, 0.0)
    one = torch.ones((), dtype=torch.float64)
    gate = wide.get("gate")
    act, slope = (one, one) if gate is None else _gate(call, spec, gate)
    before, after = (act, one) if spec.gate is Gate.BEFORE else (one, act)
    gain = one if weight is None else (definition.along(spec, weight, x.ndim) + spec.weight_offset).abs()
    parts = _parts(call, spec, x * definition.activation(spec)(gate) if gate is not None and before is act else x)
    off = parts.off.reshape(x.shape)
    least = _least(call.x.dtype) / torch.finfo(_sums(call)).eps
    if call.spec.cast in (
        Cast.BEFORE_WEIGHT,
        Cast.TO_WEIGHT,
    ):  # hat is rounded to the dtype of x, where the smallest numbers lie apart
        off = off + least
    shift = least * (gate is not None) if bias is None else definition.along(spec, bias, x.ndim).abs()
    found = {"y": (gain * off + shift) * after}  # and the product with the gain is, before the gate
    terms = _terms(spec, parts, _split(spec, dy * gain * after), call.given is not None).reshape(x.shape)
    found["x"] = terms * before
    if gate is not None:
        found["gate"] = slope * (terms * x.abs() if before is act else dy * gain * off)
    for name, parameter, each in (("weight", weight, dy * after * off), ("bias", bias, dy)):
        if parameter is not None:
            shape = definition.along(spec, parameter, x.ndim).shape
            found[name] = each.sum_to_size(shape).reshape(parameter.shape)
    return found, parts


def _gate(call: Call, spec: NormSpec, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return |act(z)|, and the size of the terms that its slope is made of."""
    s, off = z.sigmoid(), z.neg().sigmoid()
    slope = s * off if spec.gate_activation == "sigmoid" else s + z.abs() * s * off
    slope = slope + s * torch.finfo(torch.float64).eps / torch.finfo(_sums(call)).eps  # torch's slope has 1 - s
    return definition.activation(spec)(z).abs(), slope


def _terms(spec: NormSpec, parts: _Parts, g: torch.Tensor, given: bool) -> torch.Tensor:
    """Return the size of the terms of the gradient of what is normalized; ``g`` is what comes in, without its sign."""
    if given:
        return g / parts.root
    hat, axes = parts.hat.abs(), spec.axes
    if not spec.eps_inside:  # of sqrt(s) + eps the derivative has a quotient by sqrt(s)
        hat = hat * parts.root / parts.statistic.sqrt().clamp_min(1e-30)
    off = hat + parts.spread * (1 + hat)
    count = torch.ones_like(parts.root) if spec.statistic is Statistic.L2 else parts.elements
    along = (g * off).sum(axes, keepdim=True) / count
    level = g.sum(axes, keepdim=True) / count if spec.center else torch.zeros_like(along)
    return (g + level + (hat + off) * along) * (1 + parts.spread) / parts.root
