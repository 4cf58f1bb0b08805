"""Manners: what a layer leaves alone, and what it promises beside its values."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from normwise.testing.case import Case, random
from normwise.testing.report import Measured

__all__ = [
    "compiles",
    "copies",
    "deterministic",
    "input_unchanged",
    "retained_graph",
    "shared_gradient",
    "state_dict",
    "unwritten_output",
    "upstream_gradient_unchanged",
]


def _differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> Measured:
    lost = {name: int(((a[name] != b[name]) & ~(a[name].isnan() & b[name].isnan())).sum()) for name in a}
    told = ", ".join(f"{count} in {name}" for name, count in lost.items() if count)
    return Measured(float(sum(lost.values())), 0.0, told or "differing numbers")


def input_unchanged(case: Case) -> Measured:
    """Neither forward nor backward writes into the input."""
    x, upstream = case.input(), random(case.shape, 20, torch.float32)
    before = x.clone()
    case.run(case.layer(), x, upstream)
    with torch.no_grad():
        case.call(case.layer(), x)
    return Measured(float((x != before).sum()), 0.0, "changed numbers")


def upstream_gradient_unchanged(case: Case) -> Measured:
    """The backward pass does not write into the gradient it is given: hooks and callers keep it."""
    x, upstream = case.input().requires_grad_(), random(case.shape, 21, torch.float32)
    kept: list[torch.Tensor] = []
    y = case.call(case.layer(), x)
    y.register_hook(kept.append)
    given = upstream.to(y.dtype, copy=True)
    y.backward(given)
    changed = sum(int((each != upstream.to(y.dtype)).sum()) for each in (given, *kept))
    return Measured(float(changed), 0.0, "changed numbers")


def shared_gradient(case: Case) -> Measured:
    """Beside a residual connection, whose gradient is the same tensor, both gradients are right."""
    x, upstream = case.input().requires_grad_(), random(case.shape, 22, torch.float32)
    layer, skip = case.layer(), random(case.shape, 23, torch.float32).requires_grad_()
    y = case.call(layer, x)
    found = torch.autograd.grad(y + skip, [x, skip], upstream.to(y.dtype, copy=True))
    alone = case.run(layer, x, upstream)
    return _differing({"x": found[0], "residual": found[1]}, {"x": alone["x"], "residual": upstream.to(y.dtype)})


def retained_graph(case: Case) -> Measured:
    """A second backward pass through a retained graph gives the first one's gradients."""
    layer, x = case.layer(), case.input().requires_grad_()
    inputs = {"x": x, **case.parameters(layer)}
    y = case.call(layer, x)
    upstream = random(case.shape, 24).to(y.dtype)
    first, second = (
        torch.autograd.grad(y, list(inputs.values()), upstream.clone(), retain_graph=True) for _ in range(2)
    )
    return _differing(dict(zip(inputs, first, strict=True)), dict(zip(inputs, second, strict=True)))


def deterministic(case: Case) -> Measured:
    """Two runs give the same bits, forward and backward."""
    x, upstream = case.input(), random(case.shape, 25, torch.float32)
    first, second = (case.run(case.layer(), x, upstream) for _ in range(2))
    return _differing(first, second)


def copies(case: Case) -> Measured | str:
    """A deep copy and a pickled one compute the same."""
    layer = case.layer()
    if not isinstance(layer, nn.Module):
        return "the layer is no nn.Module"
    made = [copy.deepcopy(layer)]
    if "<locals>" not in type(layer).__qualname__:  # a class inside a function has no name to pickle
        made.append(pickle.loads(pickle.dumps(layer)))
    return _same_as(case, layer, made)


def state_dict(case: Case) -> Measured | str:
    """A fresh layer that loads the saved state computes the same."""
    layer = case.layer()
    if not isinstance(layer, nn.Module):
        return "the layer is no nn.Module"
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = case.layer()
    for parameter in fresh.parameters():
        parameter.data.zero_()
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    return _same_as(case, layer, [fresh])


def _same_as(case: Case, layer: nn.Module, made: list[Any]) -> Measured:
    x, upstream = case.input(), random(case.shape, 26, torch.float32)
    expected = case.run(layer, x, upstream)
    worst = Measured(0.0, 0.0, "differing numbers")
    for each in made:
        found = _differing(expected, case.run(each, x, upstream))
        worst = found if found.value > worst.value else worst
    return worst


class _Poison(TorchDispatchMode):
    """Fills with NaN what ``torch.empty`` and its relatives return."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "empty" in func.overloadpacket.__name__ and isinstance(made, torch.Tensor) and made.is_floating_point():
            made.fill_(float("nan"))
        return made


def unwritten_output(case: Case) -> Measured:
    """No number is returned that nobody wrote: with memory full of NaN the results are the same."""
    x, upstream = case.input(), random(case.shape, 27, torch.float32)
    expected, layer = case.run(case.layer(), x, upstream), case.layer()
    with _Poison():
        found = case.run(layer, x, upstream)
    return _differing(expected, found)


def compiles(case: Case) -> Measured:
    """``torch.compile`` makes one graph of it, which computes the same to some units in the last place."""
    layer, x = case.layer(), case.input()
    expected = case.call(layer, x).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, on its first use
        compiled = torch.compile(lambda x: case.call(layer, x), fullgraph=True)(x).detach()
    off = (compiled.double() - expected.double()).abs() / case.truth(x, case.parameters(layer)).scale
    return Measured(float(off.max()) / torch.finfo(torch.float32).eps, 16.0, "units in the last place")
