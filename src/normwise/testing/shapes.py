"""Shapes: other memory layouts, nothing, one element, other rows in the batch, padding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from normwise.spec import Scope
from normwise.testing.case import Case, random
from normwise.testing.report import Measured
from normwise.testing.values import units

__all__ = ["batch_invariance", "empty_batch", "layouts", "one_element_rows", "padding"]

_MANY = 67  # rows: no multiple of a vector or of a block


def _strided(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``x`` in other layouts of memory."""
    wide = torch.stack([x, torch.full_like(x, 9.0)], dim=-1)
    yield "every second element", wide[..., 0]
    yield "transposed", x.transpose(0, -1).contiguous().transpose(0, -1)
    yield "expanded", x[:1].expand(x.shape)
    if x.ndim == 4:
        yield "channels_last", x.contiguous(memory_format=torch.channels_last)
    if x.ndim == 5:
        yield "channels_last_3d", x.contiguous(memory_format=torch.channels_last_3d)


def layouts(case: Case) -> Measured:
    """Inputs and upstream gradients in any layout of memory give what contiguous ones give."""
    limit, eps = 2 * units(case, torch.float32), torch.finfo(torch.float32).eps
    worst = Measured(0.0, limit, "units in the last place")
    upstream = random(case.shape, 30, torch.float32)
    for told, x in _strided(case.input()):
        layer = case.layer()
        truth = case.truth(x, case.parameters(layer), upstream)
        for given in (upstream, upstream.transpose(0, -1).contiguous().transpose(0, -1)):
            found = case.run(layer, x, given)
            y_off = float(((found["y"].double() - truth.y).abs() / truth.scale).max())
            x_off = float((found["x"].double() - truth.grads["x"]).abs().max() / truth.grads["x"].abs().max())
            if not max(y_off, x_off) / eps <= worst.value:
                worst = Measured(max(y_off, x_off) / eps, limit, f"units in the last place, {told}")
    return worst


def empty_batch(case: Case) -> Measured | str:
    """A batch of no rows gives no rows, and gradients of zero."""
    if case.spec.scope is Scope.BATCH:
        return "statistics of a batch need one"
    layer, x = case.layer(), case.input(rows=0)
    found = case.run(layer, x, torch.zeros(x.shape))
    wrong = int(found["y"].shape != x.shape) + sum(int((each != 0).sum()) for each in found.values())
    return Measured(float(wrong), 0.0, "numbers that are not zero, or another shape")


def one_element_rows(case: Case) -> Measured | str:
    """Rows of a single element: a centred norm returns the shift, and its gain has no gradient."""
    if not case.sized:
        return "the factory takes no size"
    if case.spec.axes != (-1,) or case.spec.groups or not case.spec.biased:
        return "no row of the last axis can have one element"
    layer = case.layer(size=1)
    x = torch.tensor([[-2.0], [0.5], [3.0]])
    upstream = torch.tensor([[1.0], [-0.25], [2.0]])
    found, truth = case.run(layer, x, upstream), case.truth(x, case.parameters(layer), upstream)
    expected = {"y": truth.y, **truth.grads}
    off = {name: float((found[name].double() - each).abs().max()) for name, each in expected.items()}
    worst = max(off, key=lambda name: off[name])
    return Measured(off[worst], 8 * torch.finfo(torch.float32).eps * 3, f"off by, in {worst}")


def batch_invariance(case: Case, dtype: torch.dtype) -> Measured | str:
    """The bits of a row, and of its gradient, do not depend on the other rows or on how many there are."""
    if case.spec.scope is Scope.BATCH:
        return "statistics of a batch depend on it"
    layer, x = case.layer(dtype), case.input(dtype, rows=_MANY)
    upstream = random(tuple(x.shape), 31).to(dtype)
    whole = case.run(layer, x, upstream)
    differing = 0
    for rows in (slice(0, 1), slice(5, 12), slice(_MANY - 1, _MANY), slice(0, _MANY - 1)):
        part = case.run(layer, x[rows], upstream[rows])
        differing += sum(int((part[name] != whole[name][rows]).sum()) for name in ("y", "x"))
    other = x.clone()
    other[1:] = random(tuple(other[1:].shape), 32).to(dtype) * 100
    differing += int((case.run(layer, other, upstream)["y"][0] != whole["y"][0]).sum())
    return Measured(float(differing), 0.0, "differing numbers")


def padding(case: Case) -> Measured | str:
    """With a mask, results at real positions do not depend on what or how much padding there is."""
    if not case.masked:
        return "the layer takes no mask"
    x = case.input()
    time = 0 if x.ndim == 2 else x.ndim - 1
    results = []
    for fill, length in ((0.0, 3), (math.nan, 3), (1e30, 7)):
        shape = list(x.shape)
        shape[time] = length
        padded = torch.cat([x, torch.full(shape, fill)], dim=time)
        real = torch.arange(padded.shape[time]) < x.shape[time]
        mask = real.reshape([-1 if axis == time else 1 for axis in range(x.ndim)])
        y = case.call(case.layer(), padded, mask=mask).detach()
        results.append(y.narrow(time, 0, x.shape[time]))
    layer = case.layer()
    truth = case.truth(x, case.parameters(layer))
    off = max(float(((each.double() - truth.y).abs() / truth.scale).nan_to_num(math.inf).max()) for each in results)
    return Measured(off / torch.finfo(torch.float32).eps, units(case, torch.float32), "units in the last place")
