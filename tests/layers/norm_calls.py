"""How the norm classes of transformers are built with random parameters and called, and our call beside theirs."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from normwise.kernels import Moments, eager
from normwise.spec import reference
from tests.layers.transformers_norms import HEADS, WIDTH, Norm

__all__ = ["CALLS", "Call", "Compute", "build", "class_of", "operands", "run_ours", "run_theirs"]

Compute = Callable[..., torch.Tensor]  # the forward of a kernel, kernels.forward for the best, or reference


class Call(NamedTuple):
    """The shape of the input, what else is passed, their call and ours."""

    shape: tuple[int, ...]
    ours: Callable[[Compute, Norm, Any, dict[str, torch.Tensor]], torch.Tensor]
    more: dict[str, tuple[int, ...]] = {}  # noqa: RUF012 - never changed
    theirs: Callable[[Any, dict[str, torch.Tensor]], Any] | None = None


def class_of(name: str) -> type[nn.Module]:
    """Import ``folder.Class``; what transformers warns about on import is its own affair."""
    folder, _, own = name.partition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = importlib.import_module(f"transformers.models.{folder}")
        files = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name.startswith("modeling_")]
        modules = [importlib.import_module(f"{package.__name__}.{file}") for file in files]
    return next(getattr(module, own) for module in modules if hasattr(module, own))


def build(norm: Norm, name: str, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """Return the class with random parameters, around 1 what multiplies, variances above 0."""
    module = class_of(name)(*norm.args, **dict(norm.kwargs))
    with torch.no_grad():
        for own, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                around = 1.0 if tensor.ndim < 2 and own.endswith(("weight", "gamma")) else 0.0
                tensor.copy_(noise.abs() + 0.5 if own.endswith("var") else around + 0.5 * noise)
    return module.to(dtype)


def operands(norm: Norm, dtype: torch.dtype, weight_dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Return x, rows of sizes over three decades with a mean, and what else the class is called with."""
    call = CALLS[norm.call]
    rows = [size if axis == 0 else 1 for axis, size in enumerate(call.shape)]
    scale = 10.0 ** (3 * torch.rand(rows, generator=generator) - 2)
    given = {"x": (scale * (torch.randn(call.shape, generator=generator) + 0.5)).to(dtype)}
    for name, shape in call.more.items():
        if name == "mask":
            lengths = torch.randint(1, shape[-1] + 1, (shape[0], 1, 1), generator=generator)
            given[name] = (torch.arange(shape[-1]) < lengths).to(dtype)
        else:
            own = weight_dtype if name == "condition" else dtype
            given[name] = torch.randn(shape, generator=generator).to(own)
    return given


def run_theirs(norm: Norm, module: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what the class returns; the first tensor where it returns several."""
    theirs = CALLS[norm.call].theirs
    y = module(*given.values()) if theirs is None else theirs(module, given)
    return y[0] if isinstance(y, tuple) else y


def run_ours(
    norm: Norm, module: nn.Module, given: dict[str, torch.Tensor], compute: Compute = eager.forward
) -> torch.Tensor:
    """Return what the spec computes with the parameters of the class."""
    return CALLS[norm.call].ours(compute, norm, module, given)


def _affine(norm: Norm, module: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    weight = getattr(module, "weight", getattr(module, "gamma", None))
    return (None if norm.spec.weight == "none" else weight), getattr(module, "bias", None)


def _plain(compute: Compute, norm: Norm, module: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return compute(norm.spec, given["x"], *_affine(norm, module))


def _moved(axis: int) -> Callable[[Compute, Norm, Any, dict[str, torch.Tensor]], torch.Tensor]:
    """Return the call of a class that moves the channels to the end and back, as ours does around the kernel."""
    return lambda compute, norm, module, given: compute(
        norm.spec, given["x"].movedim(axis, -1), *_affine(norm, module)
    ).movedim(-1, axis)


def _gated(compute: Compute, norm: Norm, module: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return compute(norm.spec, given["x"], module.weight, gate=given["gate"])


def _head_by_head(compute: Compute, norm: Norm, module: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    heads = zip(module.norms, given["x"].split(1, dim=1), strict=True)
    return torch.cat([compute(norm.spec, x, own.weight) for own, x in heads], dim=1)


def _heads_joined(compute: Compute, norm: Norm, module: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return compute(norm.spec, given["x"], module.weight.view(HEADS, WIDTH)).flatten(-2)


def _embedded(compute: Compute, norm: Norm, module: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return compute(norm.spec, given["x"], module.scale.weight[2:3], module.shift.weight[2:3])


def _modulated(compute: Compute, norm: Norm, module: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    parts = module.linear(module.silu(given["condition"])).unsqueeze(1).chunk(module.linear.out_features // WIDTH, -1)
    shift, scale = parts[:2] if len(parts) == 6 else parts[::-1]
    return compute(norm.spec, given["x"], scale=scale, shift=shift)


def _fixed(compute: Compute, norm: Norm, module: Any, x: torch.Tensor, ndim: int, axis: int) -> torch.Tensor:
    shape = [-1 if each == axis else 1 for each in range(-ndim, 0)]
    mean, variance = module.running_mean.view(shape), module.running_var.view(shape)
    told = {"mean": mean, "statistic": variance} if compute is reference else {"given": Moments(mean, variance, 1)}
    return compute(norm.spec, x, module.weight, module.bias, **told)


def _frozen(compute: Compute, norm: Norm, module: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return _fixed(compute, norm, module, given["x"], 4, -3)


def _batch(compute: Compute, norm: Norm, module: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    own, x = module.batchnorm, given["x"]
    return torch.cat([compute(norm.spec, x, own.weight, own.bias), _fixed(compute, norm, own, x, 3, -1)])


def _their_batch(module: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    module.batchnorm.momentum = 0.0
    return torch.cat([module.train()(given["x"]), module.eval()(given["x"])])


def _masked(compute: Compute, norm: Norm, module: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return compute(norm.spec, given["x"], module.weight, module.bias, given["mask"].bool())


def _their_masked(module: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(given["x"], given["mask"].expand(given["x"].shape))


def _qk(compute: Compute, norm: Norm, module: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([compute(norm.spec, given["x"]), compute(norm.spec, given["key"], module.temp.view(HEADS, 1))])


_ROWS, _IMAGE, _HEADED = (61, 3, WIDTH), (5, WIDTH, 5, 7), (61, 3, HEADS, WIDTH)

CALLS = {
    "plain": Call(_ROWS, _plain),
    "wrapped": Call(_ROWS, lambda compute, norm, module, given: _plain(compute, norm, module.norm, given)),
    "gated": Call(_ROWS, _gated, {"gate": _ROWS}),
    "heads": Call(_HEADED, _plain),
    "heads_joined": Call(_HEADED, _heads_joined),
    "head_by_head": Call((61, HEADS, 3, WIDTH), _head_by_head),
    "image": Call(_IMAGE, _moved(1)),
    "sequence": Call((61, WIDTH, 3), _moved(1)),
    "channels": Call(_IMAGE, _plain),
    "embedded": Call(_ROWS, _embedded, theirs=lambda module, given: module(given["x"], torch.tensor([2]))),
    "modulated": Call(_ROWS, _modulated, {"condition": (_ROWS[0], WIDTH)}),
    "frozen": Call(_IMAGE, _frozen),
    "batch": Call(_ROWS, _batch, theirs=_their_batch),
    "grouped": Call(_IMAGE, _plain),
    "grouped_sequence": Call((5, WIDTH, 17), _plain),
    "masked": Call((5, WIDTH, 17), _masked, {"mask": (5, 1, 17)}, _their_masked),
    "qk": Call(_HEADED, _qk, {"key": _HEADED}, lambda module, given: torch.cat(module(given["x"], given["key"]))),
}
