"""Whether an injected fault does anything: outputs, gradients and buffers beside those of the healthy twin."""

from __future__ import annotations

import torch

from bench.faults.case import Case, Fault, Observed
from bench.faults.settings import loss_of
from normwise.graph.capture import tensors_in

__all__ = ["FLOORS", "difference", "floor", "observe"]

# Relative to the root mean square. Models in float32 are run in float64, but norms that cast to float32 round at 6e-8 a
# number, and a norm that was written anew does not: 1e-5 is a hundred times that, and a hundredth of what matters.
# Half precision: four spacings of the numbers.
FLOORS = {
    torch.float32: 1e-5,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
}


def observe(fault: Fault, case: Case) -> Observed:
    """Return what shows whether the fault is alive."""
    return (fault.observe or behaviour)(case)


def floor(fault: Fault) -> float:
    """Return the relative difference above which a fault is alive."""
    if fault.bits:
        return 0.0
    return FLOORS[torch.float32] if fault.observe is not None and not fault.rows else FLOORS[fault.dtype]


def behaviour(case: Case) -> Observed:
    """Return outputs in the model's own mode, gradients, buffers behind the call, and the dtype of what comes out."""
    twin = case.copied()
    if case.dtype == torch.float32:
        twin.model.double()
        twin.args = tuple(_double(v) for v in twin.args)
        twin.kwargs = {n: _double(v) for n, v in twin.kwargs.items()}
    output = twin.call()
    seen = {f"output {i}": t.detach() for i, t in enumerate(tensors_in(output)) if t.is_floating_point()}
    try:
        loss_of(output).backward()
    except RuntimeError as error:
        seen["no gradient"] = torch.tensor(float(len(str(error))))
    seen |= {f"gradient {n}": p.grad for n, p in twin.model.named_parameters() if p.grad is not None}
    return seen | {f"buffer {n}": b.detach().clone() for n, b in twin.model.named_buffers() if b.is_floating_point()}


def _double(value: object) -> object:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def difference(healthy: Observed, faulty: Observed) -> float:
    """Return the largest difference of any tensor relative to its root mean square; infinite where one is not finite.

    What only one of the two has counts where it is a tensor that the other computes too (an output, a gradient): a
    parameter that lost its gradient is a difference.
    """
    worst = 0.0
    for name in healthy.keys() | faulty.keys():
        a, b = healthy.get(name), faulty.get(name)
        if a is None or b is None:
            present = a if b is None else b
            if name.startswith(("gradient", "no gradient")) and present is not None and bool((present != 0).any()):
                worst = float("inf")
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        x, y = a.double(), b.double()
        if not torch.equal(x.isfinite(), y.isfinite()):
            return float("inf")
        apart = torch.where(x.isfinite(), x - y, 0.0).abs()
        size = float(torch.where(x.isfinite(), x, 0.0).square().mean().sqrt()) if x.numel() else 0.0
        size = max(size, float(torch.where(y.isfinite(), y, 0.0).square().mean().sqrt()) if y.numel() else 0.0)
        if apart.numel() and size > _NOTHING:
            worst = max(worst, float(apart.max()) / size)
    return worst


_NOTHING = 1e-12  # tensors of nothing but rounding: shifts whose gradient a batch norm cancels
