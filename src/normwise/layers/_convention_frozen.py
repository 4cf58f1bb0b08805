"""Norms that use statistics they hold: batch norms in evaluation, and frozen ones."""

from __future__ import annotations

import torch

from normwise.layers._convention_eps import rounded
from normwise.layers._convention_probe import Probe, Values, close, single_changes
from normwise.layers._convention_structure import Structure
from normwise.spec import NormSpec, Scope, Statistic, Weight

__all__ = ["frozen_structure", "momentum_of", "moves"]

_LARGEST_EPS = 0.04  # above it a variance of 0 cannot be told from one of 1


def moves(probe: Probe) -> bool:
    """Return whether a call changes the floating buffers, as running statistics do."""
    before = {name: buffer.clone() for name, buffer in probe.buffers().items()}
    probe.run(probe.input(40) * 3 + 1, probe.values(40))
    after = probe.buffers()
    return any(not close(after[name], before[name]) for name in before)


def frozen_structure(probe: Probe) -> Structure | None:
    """Return the roles of parameters and buffers of a batch norm that uses the statistics it holds, or None."""
    names = list(probe.values(buffers=True))
    if not 2 <= len(names) <= 4:
        return None
    roles = {name: _role(probe, name) for name in names}
    by_role = {role: name for name, role in roles.items()}
    if len(by_role) < len(names) or "var" not in by_role or "mean" not in by_role:
        return None
    slope = _slope(probe, _ones(probe, **{by_role["var"]: 0.0}))
    channel = _channel(probe, by_role["mean"])
    ndim = len(probe.shape)
    spec = NormSpec(
        scope=Scope.BATCH,
        axes=tuple(axis for axis in range(-ndim, 0) if axis != channel),
        center=True,
        statistic=Statistic.VARIANCE,
        eps=rounded(slope**-2)[0],
        weight=Weight.VECTOR if "weight" in by_role else Weight.NONE,
        bias="bias" in by_role,
        running=True,
    )
    return Structure(
        spec=spec,
        gain=by_role.get("weight"),
        shift=by_role.get("bias"),
        mean=by_role["mean"],
        variance=by_role["var"],
    )


def _ones(probe: Probe, **changes: float) -> Values:
    ones = {name: torch.ones_like(value) for name, value in probe.values(buffers=True).items()}
    return {**ones, **{name: torch.full_like(ones[name], value) for name, value in changes.items()}}


def _at(probe: Probe, x: float, values: Values) -> torch.Tensor:
    return probe.run(torch.full(probe.shape, x, dtype=torch.float64), values).double()


def _slope(probe: Probe, values: Values) -> float:
    return float((_at(probe, 1.0, values) - _at(probe, 0.0, values)).flatten()[0])


def _role(probe: Probe, name: str) -> str:
    """Return which operand a tensor is, told by what setting it to 0 among ones does."""
    slope = _slope(probe, _ones(probe, **{name: 0.0}))
    if abs(slope) < 1e-9:
        return "weight"
    if not slope < _LARGEST_EPS**-0.5:
        return "var"
    moved = _at(probe, 0.0, _ones(probe, **{name: 0.0})) - _at(probe, 0.0, _ones(probe))
    return "mean" if float(moved.flatten()[0]) > 0 else "bias"


def _channel(probe: Probe, name: str) -> int:
    values = _ones(probe)
    moved = {**values, name: values[name].clone()}
    moved[name].view(-1)[0] += 1
    where = single_changes(_at(probe, 0.5, values), _at(probe, 0.5, moved))
    single = [axis - len(probe.shape) for axis, each in enumerate(where) if len(each) == 1 and probe.shape[axis] > 1]
    return single[0] if single else 1 - len(probe.shape)


def momentum_of(probe: Probe, structure: Structure) -> float | None:
    """Return the weight of a new batch in the running mean, None where it is the average of all batches."""
    assert structure.mean is not None
    x = probe.input(41) + 2
    over = [axis for axis in range(x.ndim) if axis - x.ndim in structure.spec.axes]
    probe.reset_counts()
    values = probe.values(42)
    values[structure.mean] = torch.zeros_like(probe.buffers()[structure.mean])
    weights = []
    for _ in range(2):
        probe.run(x, values)
        weights.append(float((probe.buffers()[structure.mean].flatten() / x.mean(over).flatten()).mean()))
    return None if abs(weights[0] / weights[1] - 2) < 1e-3 else float(f"{weights[0]:.4g}")
