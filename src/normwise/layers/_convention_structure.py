"""What a foreign norm computes, measured in float64: axes, gain and shift, statistic, eps and where it acts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from normwise.errors import NoNorm, NotKnown
from normwise.layers._convention_eps import with_eps
from normwise.layers._convention_probe import Probe, Values, close, relative, single_changes
from normwise.spec import Gate, NormSpec, Scope, Statistic, Weight, reference
from normwise.spec.definition import activation

__all__ = ["ELEMENTWISE", "Structure", "is_elementwise", "structure_of"]

_LARGE = 64.0  # inputs so large that an eps of 1e-3 is below the tolerance
_AFFECTED = 1e-4  # relative: what eps may change there
ELEMENTWISE = "each output element depends on its own input element alone: no statistic is taken"
_FULL = 40.0  # sigmoid(40) is 1 and silu(40) is 40 in every dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The mathematics of a norm, and the names of its operands."""

    spec: NormSpec
    gain: str | None
    shift: str | None
    mean: str | None = None  # the buffers of a norm that uses statistics it holds
    variance: str | None = None

    @property
    def roles(self) -> dict[str, str]:
        """Return the names of the operands by what the layers call them."""
        roles = {"weight": self.gain, "bias": self.shift, "running_mean": self.mean, "running_var": self.variance}
        return {role: name for role, name in roles.items() if name is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roles:
    gain: str | None = None
    shift: str | None = None
    offset: float = 0.0
    on_input: bool = False
    neutral: Values


def structure_of(probe: Probe) -> Structure:
    """Return what the module computes on its layout.

    Raises:
        NotKnown: it is no norm, or one that no spec describes.
    """
    x, values = probe.input(1) * _LARGE + _LARGE / 4, probe.values(10)
    y = _finite(probe.run(x, values))
    if not torch.equal(y, probe.run(x, values)):
        raise NoNorm("two calls on the same input give two results; put it in eval mode if it holds a dropout")
    if close(probe.run(probe.input(2) * _LARGE, values), y):
        raise NoNorm("its output does not depend on its input")
    changed = _changed(probe, x, values, [0] * x.ndim)
    axes: tuple[int, ...] = tuple(axis - x.ndim for axis, where in enumerate(changed) if len(where) > 1)
    if not axes:
        raise NoNorm(ELEMENTWISE)
    for by, tolerance in ((4.0, _AFFECTED), (1 / 16, 100 * _AFFECTED)):
        scaled = probe.run(x * by, values)
        if not close(scaled, y, tolerance):
            raise NoNorm(
                f"no statistic of its input divides it: multiplying the input by {by:g} changes the output by "
                f"{relative(scaled, y):.2g} of its size, multiplies it by {_ratio(scaled, y):.3g} on average"
            )
    gate, act = _gate(probe, x, values) if probe.gated else (Gate.NONE, "silu")
    roles = _roles(probe, x, values)
    spec = NormSpec(
        axes=axes,
        groups=_groups(changed, axes, x.shape),
        eps=0.0,
        weight=Weight.NONE,
        gate=gate,
        gate_activation=act,
        partial=_partial(probe, x, roles.neutral, axes),
    )
    spec = replace(spec, **_place(probe, x, spec, roles))
    spec = _with_statistic(probe, x, replace(spec, bias=False), roles)
    weight = Weight.NONE
    if roles.gain is not None:
        weight = Weight.SCALAR if values[roles.gain].numel() == 1 else Weight.VECTOR
    spec = replace(
        spec,
        weight=weight,
        weight_offset=roles.offset,
        weight_on_input=roles.on_input,
        bias=roles.shift is not None,
    )
    return Structure(spec=spec, gain=roles.gain, shift=roles.shift)


def is_elementwise(probe: Probe) -> bool:
    """Return whether no output element depends on another input element."""
    x = probe.input(1) * _LARGE
    return all(len(where) == 1 for where in _changed(probe, x, probe.values(10), [0] * x.ndim))


def _finite(y: torch.Tensor) -> torch.Tensor:
    if not y.isfinite().all():
        raise NoNorm("ordinary random input gives infinity or NaN")
    return y


def _ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return k of the best a = k b."""
    b = b.double()
    return float((a.double() * b).sum() / b.square().sum().clamp_min(torch.finfo(torch.float64).tiny))


# -- axes ---------------------------------------------------------------------------------------


def _changed(probe: Probe, x: torch.Tensor, values: Values, position: list[int]) -> list[torch.Tensor]:
    """Return for each axis where the output moves when one element of the input does."""
    moved = x.clone()
    moved[tuple(position)] += 10 * x.abs().max() * math.sqrt(x.numel())
    return single_changes(probe.run(x, values), probe.run(moved, values))


def _groups(changed: list[torch.Tensor], axes: tuple[int, ...], shape: torch.Size) -> int | None:
    """Return how many groups share the leftmost axis; None for one."""
    sizes = {axis: (len(changed[axis]), shape[axis]) for axis in axes}
    parts = [axis for axis, (reached, size) in sizes.items() if reached < size]
    if not parts:
        return None
    reached, size = sizes[parts[0]]
    contiguous = bool((changed[parts[0]] == torch.arange(reached)).all())
    if len(parts) > 1 or parts[0] != min(axes) or size % reached or not contiguous:
        raise NotKnown(
            f"an element reaches {reached} of {size} positions along axis {parts[0]}: neither all nor equal groups"
        )
    return size // reached


def _partial(probe: Probe, x: torch.Tensor, values: Values, axes: tuple[int, ...]) -> float:
    """Return the fraction of a single axis whose elements move the others."""
    if len(axes) > 1:
        return 1.0
    axis = min(axes)
    n = x.shape[axis]

    def counts(index: int) -> bool:
        position = [0] * x.ndim
        position[axis] = index
        return len(_changed(probe, x, values, position)[axis]) > 1

    if counts(n - 1):
        return 1.0
    low, high = 0, n - 1  # the last that counts, the first that does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if counts(middle) else (low, middle)
    fraction = high / n
    return fraction if int(n * fraction) == high else (high + 0.5) / n


def _place(probe: Probe, x: torch.Tensor, spec: NormSpec, roles: _Roles) -> dict[str, object]:
    """Return scope and groups: told by the axes of the statistic, and by those the parameters lie along."""
    axes: tuple[int, ...] = spec.axes
    along: tuple[int, ...] = _parameter_axes(probe, x, roles)
    if -x.ndim in axes and x.ndim > 1:
        return {"scope": Scope.BATCH}
    first = min(axes)
    if spec.groups:
        return {"scope": Scope.GROUP if len(axes) > 1 else Scope.HIDDEN}
    if not along or set(axes) <= set(along):
        return {"scope": Scope.HIDDEN}
    if along == (first,) and len(axes) > 1:
        return {"scope": Scope.GROUP, "groups": 1}
    if along == (first - 1,) and axes == tuple(range(first, 0)):
        return {"scope": Scope.INSTANCE}
    return {"scope": Scope.OTHER}


def _parameter_axes(probe: Probe, x: torch.Tensor, roles: _Roles) -> tuple[int, ...]:
    name = roles.gain or roles.shift
    if name is None or roles.neutral[name].numel() == 1:
        return ()
    moved = dict(roles.neutral)
    moved[name] = moved[name].clone()
    moved[name].view(-1)[0] += 1
    where = single_changes(probe.run(x, roles.neutral), probe.run(x, moved))
    return tuple(axis - x.ndim for axis, each in enumerate(where) if len(each) == 1 and x.shape[axis] > 1)


# -- gate, gain and shift -----------------------------------------------------------------------


def _gate(probe: Probe, x: torch.Tensor, values: Values) -> tuple[Gate, str]:
    """Return where the gate multiplies and through what, from three constant gates."""
    full, half, none = (probe.run(x, values, gate=torch.full_like(x, z)) for z in (_FULL, _FULL / 2, 0.0))
    by_scale, at_zero = _ratio(full, half), _ratio(none, full)
    known = {
        (2.0, 0.0): (Gate.AFTER, "silu"),
        (1.0, 0.0): (Gate.BEFORE, "silu"),
        (1.0, 0.5): (Gate.AFTER, "sigmoid"),
        (1.0, 1.0): (Gate.BEFORE, "sigmoid"),
    }
    for (scale, zero), found in known.items():
        if abs(by_scale - scale) < _AFFECTED and abs(at_zero - zero) < _AFFECTED:
            return found
    raise NotKnown(
        f"its second input is no silu or sigmoid gate: 40 against 20 multiplies the output by {by_scale:.3g}, "
        f"0 against 40 by {at_zero:.3g}"
    )


def _roles(probe: Probe, x: torch.Tensor, values: Values) -> _Roles:
    """Return which parameter is the gain and which the shift, and the offset of the gain."""
    other, moved = probe.input(3) * _LARGE, probe.values(20)
    gains, shifts = [], []
    for name in probe.names:
        change = {**values, name: moved[name]}
        here, there = (probe.run(each, change) - probe.run(each, values) for each in (x, other))
        if here.abs().max() <= 1e-7 and there.abs().max() <= 1e-7:
            continue
        (shifts if close(here, there) else gains).append(name)
    if len(gains) > 1 or len(shifts) > 1:
        raise NotKnown(f"a norm has one gain and one shift, this has gains {gains} and shifts {shifts}")
    shift = shifts[0] if shifts else None
    neutral = {**values, **({shift: torch.zeros_like(values[shift])} if shift else {})}
    if not gains:
        return _Roles(shift=shift, neutral=neutral)
    gain = gains[0]
    offset, on_input = _offset(probe, x, neutral, gain)
    neutral[gain] = torch.full_like(values[gain], 1 - offset)
    return _Roles(gain=gain, shift=shift, offset=offset, on_input=on_input, neutral=neutral)


def _offset(probe: Probe, x: torch.Tensor, values: Values, gain: str) -> tuple[float, bool]:
    """Return what is added to the gain, and whether it multiplies the input instead of the output."""

    def run(fill: float | torch.Tensor, x: torch.Tensor = x) -> torch.Tensor:
        return probe.run(x, {**values, gain: torch.zeros_like(values[gain]) + fill})

    normalized = run(3.0) - run(2.0)
    offset = round(_ratio(run(0.0), normalized), 4)
    if all(close(run(k), normalized * (offset + k), 1e-4) for k in (-2.0, 2.0, 7.0)):
        return offset, False
    for on_input in (0.0, 1.0):
        weight = values[gain]
        if weight.shape == x.shape[-weight.ndim :] and close(
            run(weight), run(1 - on_input, (on_input + weight) * x), 1e-4
        ):
            return on_input, True
    raise NotKnown(f"the parameter {gain!r} is no gain: the output is not linear in it")


# -- statistic and eps --------------------------------------------------------------------------


def _with_statistic(probe: Probe, x: torch.Tensor, spec: NormSpec, roles: _Roles) -> NormSpec:
    """Return the spec with centring, statistic, factor and eps: the roundest numbers that explain the module."""
    before = spec.gate is Gate.BEFORE and spec.gate_activation == "silu"
    after = float(activation(spec)(torch.tensor(_FULL))) if spec.gate is Gate.AFTER else 1.0

    def core(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return probe.run(x / _FULL if before else x, roles.neutral, dtype).double() / after

    plain, misses = replace(spec, gate=Gate.NONE), []
    found: list[tuple[tuple[bool, bool, int], NormSpec]] = []
    y = core(x)
    for rank, candidate in enumerate(_statistics(plain)):
        u = reference(candidate, x)
        factor = _tidy(_ratio(y, u), (1.0, *_roots(x, spec)))
        miss = relative(factor * u, y)
        misses.append((miss, candidate))
        if miss <= _AFFECTED:
            fitted, is_round = with_eps(core, x, replace(candidate, factor=factor))
            found.append(((not is_round, factor != 1.0, rank), fitted))
    if not found:
        miss, nearest = min(misses, key=lambda each: each[0])
        raise NotKnown(
            f"no known statistic divides it; closest is {nearest.statistic} over axes {list(nearest.axes)}, "
            f"center={nearest.center}, which differs by {miss:.2g} relative"
        )
    best = min(found, key=lambda each: each[0])[1]
    return replace(best, gate=spec.gate, gate_activation=spec.gate_activation)


def _statistics(spec: NormSpec) -> Iterator[NormSpec]:
    variance = replace(spec, statistic=Statistic.VARIANCE)
    if spec.partial == 1:
        yield replace(variance, center=True)
        yield replace(variance, center=True, biased=False)
    yield replace(spec, statistic=Statistic.MEAN_SQUARE)
    yield replace(spec, statistic=Statistic.L2)
    if spec.partial == 1:
        if len(spec.axes) == 1:
            yield replace(spec, statistic=Statistic.COMPLETED)
        yield variance
        yield replace(variance, biased=False)
        yield replace(spec, center=True, statistic=Statistic.MEAN_SQUARE)


def _roots(x: torch.Tensor, spec: NormSpec) -> tuple[float, float]:
    """Return sqrt(n) and 1 / sqrt(n), n the elements behind one statistic: what turns L2 into RMS and back."""
    n = math.prod(x.shape[axis] for axis in spec.axes) / (spec.groups or 1)
    return math.sqrt(n), 1 / math.sqrt(n)


def _tidy(value: float, known: tuple[float, ...]) -> float:
    near = [each for each in known if abs(value / each - 1) < _AFFECTED]
    return near[0] if near else float(f"{value:.6g}")
