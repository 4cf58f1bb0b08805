"""Random calls of the compiled kernels, judged by the definition in float64.

``python tests/kernels/fuzz.py --seconds 60`` runs for a while, also with the sanitizers of ``make sanitize``; the
test beside it runs a short round with fresh memory poisoned. Widths go from 1 to 70,000, rows are strided, pointers
start at any element, and the number of threads changes: with it nothing else may.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, replace

import torch

from normwise import kernels
from normwise.spec import Cast, Form, NormSpec, Statistic, Weight, reference

RMS = NormSpec(cast=Cast.AFTER_WEIGHT)
LAYER = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True)
SCALE = NormSpec(
    statistic=Statistic.L2, eps=1e-5, eps_inside=False, eps_clamp=True, weight=Weight.SCALAR, cast=Cast.AFTER_WEIGHT
)
SPECS = {
    "rms": RMS,
    "llama": replace(RMS, cast=Cast.BEFORE_WEIGHT, out_dtype="promoted"),
    "gemma": replace(RMS, weight_offset=1.0),
    "outside": replace(RMS, eps_inside=False),
    "layer": LAYER,
    "torch-layer": replace(LAYER, form=Form.TORCH),
    "scale": SCALE,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Roundings of the output dtype, and units of the sums: a row is added up in at least 16 sums and in levels, so that
# the error of a statistic does not grow with its width; found here: at most 13 units forward and 34 backward.
ROUNDINGS = 2


@dataclass(frozen=True)
class Call:
    """One call: a spec, tensors, and what was drawn, for the message."""

    name: str
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    dy: torch.Tensor
    residual: torch.Tensor | None

    def __str__(self) -> str:
        return (
            f"{self.name} x{list(self.x.shape)} {self.x.dtype} strides {self.x.stride()} offset "
            f"{self.x.storage_offset()} weight {None if self.weight is None else self.weight.dtype}"
        )


def strided(draw: random.Random, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of random numbers with gaps between them, starting at an odd element."""
    gap, start = draw.choice([0, 0, 1, 3, 17]), draw.choice([0, 1, 3, 5])
    memory = torch.full((rows * (width + gap) + start + 8,), float("nan"), dtype=dtype)
    x = memory.as_strided((rows, width), (width + gap, 1), start)
    return x.copy_(torch.randn(rows, width, generator=_generator(draw), dtype=torch.float64) * 2 + 0.5)


def _generator(draw: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(draw.randrange(2**31))


def drawn(draw: random.Random, elements: int) -> Call:
    """Return a random call on at most about ``elements`` numbers."""
    width = draw.choice([draw.randint(1, 40), draw.randint(1, 1500), 2 ** draw.randint(0, 13), draw.randint(1, 70_000)])
    rows = draw.randint(0, max(1, min(300, elements // width)))
    name, dtype = draw.choice(list(SPECS)), draw.choice(DTYPES)
    x, spec = strided(draw, rows, width, dtype), SPECS[name]
    held = draw.choice([dtype, torch.float32]) if dtype in (torch.bfloat16, torch.float16) else dtype
    shape = () if spec.weight is Weight.SCALAR else (width,)
    weight = torch.randn(shape, generator=_generator(draw), dtype=torch.float64).to(held)
    bias = torch.randn(shape, generator=_generator(draw), dtype=torch.float64).to(held) if spec.bias else None
    if bias is None and draw.random() < 0.2 and spec.weight is not Weight.SCALAR:
        weight = None
    promoted = spec.out_dtype == "promoted" and weight is not None
    out = torch.promote_types(dtype, held) if promoted else dtype
    residual = None
    if draw.random() < 0.3 and spec.weight is not Weight.SCALAR:
        wide = dtype in (torch.bfloat16, torch.float16) and draw.random() < 0.5
        residual, out = strided(draw, rows, width, torch.float32 if wide else dtype), dtype
    return Call(name, x, weight, bias, strided(draw, rows, width, out), residual)


def check(call: Call) -> str | None:
    """Return what is wrong with the kernel's answer, or None; also None where the kernel refuses the call."""
    spec = SPECS[call.name]
    if kernels.cpu.refusal(spec, call.x, call.weight, call.bias, None, residual=call.residual) is not None:
        return None
    kept = {name: each.clone() for name, each in vars(call).items() if isinstance(each, torch.Tensor)}
    answers, before_us = [], torch.get_num_threads()
    try:
        for threads in (1, 3, 8):
            torch.set_num_threads(threads)
            answers.append(_run(call, spec))
    finally:
        torch.set_num_threads(before_us)
    for name, before in kept.items():
        if not torch.equal(getattr(call, name), before):
            return f"{name} was written to"
    for name, value in answers[0].items():
        for other in answers[1:]:
            if not torch.equal(value, other[name]):
                return f"{name} changes with the number of threads"
    return _compared(call, spec, answers[0])


def _run(call: Call, spec: NormSpec) -> dict[str, torch.Tensor]:
    x, weight, bias, residual = (
        None if each is None else each.detach().requires_grad_()
        for each in (call.x, call.weight, call.bias, call.residual)
    )
    assert x is not None
    if residual is None:
        y = kernels.forward(spec, x, weight, bias, kernel="cpu")
        outputs, upstream = [y], [call.dy]
    else:
        y, summed = kernels.forward_added(spec, x, residual, weight, bias, kernel="cpu")
        outputs, upstream = [y, summed], [call.dy, torch.full_like(summed, 0.25)]
    inputs = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    inputs = {name: each for name, each in inputs.items() if each is not None}
    grads = torch.autograd.grad(outputs, list(inputs.values()), upstream)
    return {"y": y.detach(), **{f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}}


def _compared(call: Call, spec: NormSpec, answer: dict[str, torch.Tensor]) -> str | None:
    dtype = call.x.dtype
    summed = call.x if call.residual is None else call.x.to(call.residual.dtype) + call.residual
    wide = summed.detach().double().requires_grad_()
    held = {
        name: each.detach().double().requires_grad_()
        for name, each in (("weight", call.weight), ("bias", call.bias))
        if each is not None
    }
    exact = replace(spec, cast=Cast.NONE, out_dtype=None)
    y = reference(exact, wide, held.get("weight"), held.get("bias"))
    grads = torch.autograd.grad(y, [wide, *held.values()], call.dy.double())
    truth = {"y": y.detach(), **{f"d{name}": grad for name, grad in zip(["x", *held], grads, strict=True)}}
    if call.residual is not None:
        truth["dx"] = truth["dx"] + 0.25
        truth["dresidual"] = truth["dx"]
    sums = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    for name, wanted in truth.items():
        got = answer[name]
        if not bool(got.isfinite().all()):
            return f"{name} has numbers that are not finite"
        unit = max(torch.finfo(got.dtype).eps, torch.finfo(dtype).eps if name == "y" else 0.0)
        if name == "y":  # rounded at most twice, beside the error of the statistic
            scale = wanted.abs() + _shift(held, wanted)
        elif name in ("dx", "dresidual"):  # three terms of the size of the largest of a row cancel
            scale = wanted.abs() + _size_of_terms(spec, wide, held, call.dy)
        else:  # a sum over rows, each term with the error of a quotient
            scale = wanted.abs() + call.dy.double().abs().sum(0).max() if wanted.numel() else wanted
        allowed = (ROUNDINGS * unit + 48 * sums) * scale + 1e-30
        off = (got.double() - wanted).abs()
        if bool((off > allowed).any()):
            worst = int((off / allowed).flatten().argmax())
            return f"{name} is {off.flatten()[worst]:.3g} off, {float((off / allowed).max()):.2f} of what is allowed"
    return None


def _shift(held: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    gain = held["weight"].detach().abs().max() if "weight" in held and held["weight"].numel() else torch.ones(())
    return gain + 1 + (held["bias"].detach().abs() if "bias" in held else torch.zeros((), dtype=y.dtype))


def _size_of_terms(spec: NormSpec, x: torch.Tensor, held: dict[str, torch.Tensor], dy: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    centred = x - x.mean(-1, keepdim=True) if spec.center else x
    length = centred.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-3)
    if spec.statistic is Statistic.L2:
        length = length * x.shape[-1] ** 0.5
    gain = held["weight"].detach() + spec.weight_offset if "weight" in held else torch.ones((), dtype=x.dtype)
    g = (dy.double() * gain).abs().amax(-1, keepdim=True)
    return g / length * (1 + centred.abs() / centred.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-3))


def main(arguments: list[str]) -> int:
    """Draw calls until the time is up; print what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elements", type=int, default=60_000)
    options = parser.parse_args(arguments)
    why = kernels.cpu.unavailable()
    if why is not None:
        print(f"the compiled kernel does not run here: {why}")
        return 2
    draw, end, calls, failed = random.Random(options.seed), time.monotonic() + options.seconds, 0, 0
    while time.monotonic() < end:
        call = drawn(draw, options.elements)
        wrong = check(call)
        calls += 1
        if wrong is not None:
            failed += 1
            print(f"{call}: {wrong}", flush=True)
    print(f"{calls} calls on {kernels.cpu.instructions()}, {failed} wrong, seed {options.seed}")
    return 1 if failed or not calls else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
