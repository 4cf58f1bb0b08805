"""Compares two modules on every layout, mode and dtype that the first one takes."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Sameness", "compare", "layouts"]

# (input, parameters)
_PAIRS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
)
# Units of the dtype, of the largest number of a tensor: what orders of summation and of products differ by
_ALLOWED = 16.0
_ALLOWED_HALF = 4.0
_GRADIENTS = 1e-4  # relative, in float32: sums over rows
_USUAL_GRADIENT = 0.1  # smaller ones are what is left of a difference: of a norm over two numbers, say
_SIZES = (3, 5, 2, 4, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sameness:
    """How one module equals another, wherever the first takes its input.

    Args:
        exact: dtypes on which all outputs are equal to the bit.
        near: those on which some differ in their last places.
        strict: the second refuses what the first refuses.
    """

    exact: tuple[str, ...]
    near: tuple[str, ...]
    strict: bool

    def __str__(self) -> str:
        if not self.near:
            return f"equal to the bit in {_listed(self.exact)}"
        beside = f"; equal to the bit in {_listed(self.exact)}" if self.exact else ""
        return f"equal within rounding in {_listed(self.near)}{beside}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def layouts(tail: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield shapes that norms over ``tail``, or with as many channels, may take; and two of another size."""
    a, b, c, d = [size for size in _SIZES if size not in tail][:4]
    yield from (tail, (a, *tail), (a, b, *tail), (c, a, b, *tail))
    if len(tail) == 1:
        yield from ((a, *tail, b), (a, *tail, b, c), (a, *tail, b, c, d), (c, a, b, d, *tail))
    other = tuple(size + 1 for size in tail)
    yield from ((a, b, *other), (c, a, b, *other))


def compare(
    old: nn.Module, new: nn.Module, shapes: Sequence[tuple[int, ...]], *, gated: bool, mixed: bool = True
) -> Sameness | str:
    """Return how the new module equals the old one, or where it does not.

    Outputs, buffers after a call, and in float32 gradients are compared, in training and in evaluation.

    Args:
        old: in float32, with ordinary numbers in it; its copies are called.
        new: with the same numbers.
        shapes: of inputs; those that the old module refuses, or warns of, are left out.
        gated: both take a gate.
        mixed: inputs of other dtypes than the parameters are compared as well.
    """
    taken, strict = _taken(old, new, [_input(shape, gated) for shape in shapes])
    moving = any(buffer.is_floating_point() for buffer in old.buffers())
    exact: dict[str, bool] = {}
    for (dtype, parameters), training in itertools.product(_PAIRS, (False, True)):
        single = dtype is parameters is torch.float32
        if (dtype is not parameters and not mixed) or (training and not moving and not single):
            continue
        pair = [copy.deepcopy(module).to(parameters).train(training) for module in (old, new)]
        for x in taken:
            first, second = (_called(module, x.to(dtype)) for module in pair)
            if first is None:
                continue
            name = _name(dtype, parameters)
            where = f"an input of shape {list(x.shape[1:])} in {name}, in {'training' if training else 'evaluation'}"
            if second is None:
                return f"refuses {where}, which the module takes"
            if not _near(first, second, _tolerance(dtype, parameters, first[0].dtype)):
                return f"differs on {where}"
            exact[name] = exact.get(name, True) and torch.equal(first[0], second[0])
            if single and not _same_gradients(pair[0], pair[1], x):
                return f"has other gradients on {where}"
    if not exact:
        return "was not compared: the module takes no shape that was tried"
    near = tuple(name for name, equal in exact.items() if not equal)
    return Sameness(exact=tuple(name for name in exact if name not in near), near=near, strict=strict)


def _input(shape: tuple[int, ...], gated: bool) -> torch.Tensor:
    """Return an input, and a gate behind it, as one tensor."""
    return torch.randn((1 + gated, *shape), generator=torch.Generator().manual_seed(1)) * 2 + 0.5


def _taken(old: nn.Module, new: nn.Module, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """Return the inputs that the old module takes, and whether the new one refuses the others."""
    taken, strict = [], True
    for x in inputs:
        if any(_called(copy.deepcopy(old).train(mode), x) is not None for mode in (False, True)):
            taken.append(x)
        else:
            strict = strict and _called(copy.deepcopy(new).eval(), x) is None
    return taken, strict


def _name(dtype: torch.dtype, parameters: torch.dtype) -> str:
    first, second = (str(each).removeprefix("torch.") for each in (dtype, parameters))
    return first if first == second else f"{first} with {second} parameters"


def _called(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the output and the floating buffers after it; None where the input is refused."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        try:
            y = module(*x)
        except Exception:  # the user's code may refuse this input in any way
            return None
    if not isinstance(y, torch.Tensor) or y.shape != x.shape[1:]:
        return None
    held = dict(sorted(module.named_buffers())).values()
    return [y, *(buffer.clone() for buffer in held if buffer.is_floating_point())]


def _near(first: list[torch.Tensor], second: list[torch.Tensor], tolerance: float) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and _close(a, b, tolerance)
        for a, b in zip(first, second, strict=True)
    )


def _tolerance(*dtypes: torch.dtype) -> float:
    """Return the rounding of the narrowest dtype that takes part."""
    unit = max(torch.finfo(dtype).eps for dtype in dtypes)
    return (_ALLOWED if unit == torch.finfo(torch.float32).eps else _ALLOWED_HALF) * unit


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float, least: float = 0.0) -> bool:
    a, b = a.double(), b.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    scale = a.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(least)
    return bool(((a - b).nan_to_num(0.0).abs() <= tolerance * scale).all())


def _same_gradients(old: nn.Module, new: nn.Module, x: torch.Tensor) -> bool:
    pair = [_gradients(copy.deepcopy(module), x) for module in (old, new)]
    return all(
        (a is None) == (b is None) and (a is None or b is None or _close(a, b, _GRADIENTS, _USUAL_GRADIENT))
        for a, b in zip(*pair, strict=True)
    )


def _gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the gradients of the input and of the parameters."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        y = module(*x)
        wanted = [x, *dict(sorted(module.named_parameters())).values()]
        direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
        return list(torch.autograd.grad((y * direction).sum(), wanted, allow_unused=True))
