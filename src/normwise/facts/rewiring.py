"""Counterfactuals of placement: the same batch with residual adds, or the end of a stream, computed otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from normwise.errors import NotKnown
from normwise.facts import vocabulary as ops
from normwise.facts.chains import Residual
from normwise.facts.runs import Run
from normwise.graph import Instead
from normwise.graph.capture import tensors_in
from normwise.rendering import both
from normwise.spec import NormSpec, reference

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Rewire", "closed", "operands", "reference_output", "relative", "rewired", "rms"]

Rewire = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Makes a residual add's result from its skip and its branch."""


def operands(add: Residual) -> tuple[int, int]:
    """Return the value ids of an add's skip and branch.

    Raises:
        NotKnown: it is no sum of just these two.
    """
    skip = add.skip.values[0]
    others = [i for i in add.op.inputs if i != skip]
    if add.op.short not in ops.ADD or skip not in add.op.inputs or len(others) != 1 or add.absorbs:
        raise NotKnown(both("the add is no sum of skip and branch", "该加法不是跳连与分支之和"))
    return skip, others[0]


def _factors(add: Residual, skip: int) -> tuple[float, float]:
    """Return the factors of skip and branch: torch.add(x, y, alpha=a) scales its second operand."""
    alpha = add.op.kwargs.get("alpha", 1)
    alpha = float(alpha) if isinstance(alpha, (int, float)) else 1.0
    return (1.0, alpha) if add.op.inputs[0] == skip else (alpha, 1.0)


def rewired(
    facts: Facts,
    adds: Iterable[Residual],
    rewire: Rewire,
    wanted: Iterable[int] = (),
    *,
    skips: Mapping[int, int] | None = None,
) -> Run:
    """Run the example inputs with some residual adds computed otherwise.

    Args:
        facts: of the target.
        adds: those to change.
        rewire: makes their results.
        wanted: ids of further values to keep.
        skips: by index of the add, a value to take for its skip.

    Raises:
        NotKnown: an add is no plain sum, or the values are not at hand.
    """
    instead: dict[int, Instead] = {}
    needed = set(wanted)
    for add in adds:
        skip, branch = operands(add)
        factors = _factors(add, skip)
        skip = (skips or {}).get(add.index, skip)
        instead[add.out] = _made(skip, branch, factors, rewire)
        needed |= {skip, branch, add.out}
    return facts.runs.altered(instead, needed)


def _made(skip: int, branch: int, factors: tuple[float, float], rewire: Rewire) -> Instead:
    return lambda kept: rewire(factors[0] * kept[skip], factors[1] * kept[branch])


def closed(
    facts: Facts, end: int, spec: NormSpec, weight: torch.Tensor | None, bias: torch.Tensor | None = None
) -> Run:
    """Run the example inputs with a norm on the value at which a stream ends."""
    stream = facts.runs.base.of(end)

    def normed(kept: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return reference(spec, stream, weight, bias).to(stream)

    return facts.runs.altered({end: normed}, {end})


def reference_output(facts: Facts) -> torch.Tensor:
    """Return the first floating output of the reference on the example inputs.

    Raises:
        NotKnown: there is no reference, or it does not run.
    """
    model = facts.target.reference
    if model is None:
        raise NotKnown(both("needs a reference: pass reference=...", "需要参考模型：传入 reference=..."))
    trial = facts.trials.forward(model=model, prepare=lambda m: m.eval(), repair=True)
    for tensor in tensors_in(trial.output):
        if tensor.is_floating_point():
            return tensor
    raise NotKnown(both("the reference returns no floating-point tensor", "参考模型不返回浮点张量"))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return how far a lies from b, relative to b; inf where their shapes differ or a number is not finite."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.detach().double(), b.detach().double()
    if not bool(a.isfinite().all() and b.isfinite().all()):
        return float("inf")
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def rms(tensor: torch.Tensor) -> float:
    """Return the root mean square of a tensor."""
    return float(tensor.detach().double().square().mean().sqrt())
