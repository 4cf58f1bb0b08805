"""How a foreign norm rounds: the candidates are compared with it bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from normwise import kernels
from normwise.errors import NotKnown
from normwise.kernels import Moments
from normwise.layers._convention_probe import Probe, Values, random
from normwise.layers._convention_structure import Structure
from normwise.layers.families import FAMILIES
from normwise.spec import PROMOTED, Cast, Form, Gate, NormSpec, Statistic, Weight
from normwise.spec.definition import along, stats_dtype

__all__ = ["Match", "best_match", "families_of"]

# (input, parameters): the mixed pairs show where a norm rounds, and what dtype it returns
_PAIRS = (
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
)
_ELEMENTS = 6144  # enough that a candidate which rounds one element in a thousand otherwise is seen
# Units in the last place that orders of summation and of products differ by: in float32 the root moves by some
# units, in half precision each product that is rounded adds half of one. The mathematics is the same to 1e-4 already.
_ALLOWED = {torch.float32: 16.0, torch.bfloat16: 4.0, torch.float16: 4.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How near a spec comes to a module, on every pair of dtypes the module takes."""

    spec: NormSpec
    exact: tuple[bool, ...]  # bit for bit, the dtype of the output included
    dtypes: tuple[bool, ...]
    ulps: tuple[float, ...]
    differing: float  # fraction of elements, over all pairs
    roles: Mapping[str, str]  # what the module calls its "weight", "bias", "running_mean", "running_var"
    shape: tuple[int, ...]  # the layout that was tried

    @property
    def rank(self) -> tuple[float, ...]:
        """Return what makes one match better than another, smallest first."""
        return (-sum(self.dtypes), -sum(self.exact), self.differing, max(self.ulps))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    x: torch.Tensor
    gate: torch.Tensor | None
    values: Values
    y: torch.Tensor
    parameters: torch.dtype


def families_of(spec: NormSpec) -> tuple[str, ...]:
    """Return the model families of ``FAMILIES`` whose norm is ``spec``, whatever its eps and number of axes.

    Args:
        spec: what to look for, such as the answer of ``convention_of``.

    Examples:
        >>> families_of(NormSpec(cast="after_weight", weight_offset=1.0))[:2]
        ('gemma', 'gemma2')
    """
    known = sorted(FAMILIES.items())
    return tuple(name for name, each in known if replace(spec, axes=each.axes, eps=each.eps) == each)


def _operands(structure: Structure, values: Values, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
    """Return gain and shift of ``values`` in the shape the kernels take: axes of size 1 fall away."""

    def one(name: str | None) -> torch.Tensor | None:
        if name is None:
            return None
        value = values[name].to(dtype)
        squeezed = value.squeeze()
        return squeezed if squeezed.ndim < 2 else value

    return one(structure.gain), one(structure.shift)


def best_match(probe: Probe, structure: Structure) -> Match:
    """Return the rounding convention nearest to the module.

    Raises:
        NotKnown: none is within some units in the last place.
    """
    samples = list(_samples(probe, structure))
    candidates = list(_candidates(structure.spec, samples))
    equal_to_the_bit = candidates
    for sample in samples:
        equal_to_the_bit = [spec for spec in equal_to_the_bit if _is_exact(_ours(spec, structure, sample), sample)]
    matches = [_match(spec, structure, samples, probe.shape) for spec in equal_to_the_bit or candidates]
    nearest = min(match.rank for match in matches)
    equal = [match for match in matches if match.rank == nearest]
    best = next((match for match in equal if families_of(match.spec)), equal[0])
    far = [
        (ulps, sample) for ulps, sample in zip(best.ulps, samples, strict=True) if not ulps <= _ALLOWED[sample.x.dtype]
    ]
    wrong = [sample for same, sample in zip(best.dtypes, samples, strict=True) if not same]
    if not far and not wrong:
        return best
    raise NotKnown(f"closest is {describe(best.spec)}: " + ", and ".join(_differences(best, far, wrong, structure)))


def describe(spec: NormSpec) -> str:
    """Return what a reader needs to recognise a spec."""
    guard = "clamped at" if spec.eps_clamp else "inside" if spec.eps_inside else "outside the root"
    told = f"{spec.kind} norm over axes {list(spec.axes)}, eps {spec.eps} {guard}, cast {spec.cast}, {spec.form}"
    return told + (f", weight_offset {spec.weight_offset:g}" if spec.weight_offset else "")


def _differences(
    best: Match, far: list[tuple[float, _Sample]], wrong: list[_Sample], structure: Structure
) -> Iterator[str]:
    for ulps, sample in far[:2]:
        ours = _ours(best.spec, structure, sample)
        scale = sample.y.double().abs().max()
        off = float((ours.double() - sample.y.double()).abs().max() / scale)
        yield f"it differs by {off:.2g} relative on {_name(sample.x.dtype)} ({ulps:.3g} units in the last place)"
    for sample in wrong[:2]:
        ours = _ours(best.spec, structure, sample)
        yield (
            f"the output of a {_name(sample.x.dtype)} input with {_name(sample.parameters)} parameters is "
            f"{_name(sample.y.dtype)}, not {_name(ours.dtype)}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _samples(probe: Probe, structure: Structure) -> Iterator[_Sample]:
    """Yield inputs of rows from small to large, beside what the module makes of them."""
    held = probe.values(30, buffers=structure.mean is not None)
    rows = max(2, _ELEMENTS // max(1, int(torch.Size(probe.shape).numel())))
    x = probe.input(31, rows=rows)
    x = x * 10.0 ** random((x.shape[0], *[1] * (x.ndim - 1)), 32, -2.0, 1.0)
    gate = random(x.shape, 33) if probe.gated else None
    for dtype, parameters in _PAIRS:
        given = None if gate is None else gate.to(dtype)
        for scale in (1.0, _small(structure.spec)):
            try:
                y = probe.run(x * scale, held, dtype, parameters, given)
            except Exception:  # a module need not take this pair of dtypes
                continue
            yield _Sample(x=(x * scale).to(dtype), gate=given, values=held, y=y, parameters=parameters)
            if dtype is torch.float16:
                break  # small numbers have no digits there


def _small(spec: NormSpec) -> float:
    """Return a scale at which eps decides as much as the input."""
    eps = torch.finfo(torch.float32).eps if spec.eps is None else spec.eps
    return max(eps**0.5 if spec.eps_inside else eps, 1e-15) if eps else 1e-3


def _out_dtypes(samples: list[_Sample]) -> tuple[str | None, ...]:
    """Return the dtypes of the output worth trying: where it is always that of the input, or never, others are not."""
    kept = [sample.y.dtype is sample.x.dtype for sample in samples]
    mixed = any(sample.x.dtype is not sample.parameters for sample in samples)
    if all(kept) and mixed:
        return (None,)
    single = all(sample.y.dtype is torch.float32 for sample in samples)
    return (None,) * all(kept) + (PROMOTED,) + ("float32",) * single


def _candidates(spec: NormSpec, samples: list[_Sample]) -> Iterator[NormSpec]:
    """Yield every way to round, the most usual first: of equal matches the first is named."""
    native = spec.center and spec.statistic is Statistic.VARIANCE and spec.biased
    forms = [Form.TORCH] * native + [Form.RECIPROCAL, Form.DIVISION]
    forms += [Form.WELFORD] * (spec.statistic is Statistic.VARIANCE)
    forms += [Form.FOLDED, Form.LEFT_TO_RIGHT] * (spec.groups is None and spec.gate is Gate.NONE)
    for form, out in itertools.product(forms, _out_dtypes(samples)):
        for cast in _casts(spec, form):
            for stats, early in itertools.product(("float32", None), (False, True)):
                if early and not spec.weight_offset:
                    continue
                yield replace(
                    spec, form=form, cast=cast, out_dtype=out, stats_dtype=stats, offset_in_weight_dtype=early
                )


def _casts(spec: NormSpec, form: Form) -> list[Cast]:
    if form in (Form.FOLDED, Form.LEFT_TO_RIGHT):
        return [Cast.NONE]
    casts = [Cast.NONE, Cast.AFTER_WEIGHT] if form is Form.TORCH else [Cast.AFTER_WEIGHT, Cast.NONE]
    casts += [Cast.BEFORE_WEIGHT]
    casts += [Cast.TO_WEIGHT] * (spec.weight is not Weight.NONE and not spec.weight_on_input)
    return casts + [Cast.RECIPROCAL] * (form is Form.RECIPROCAL)


def _ours(spec: NormSpec, structure: Structure, sample: _Sample) -> torch.Tensor:
    weight, bias = _operands(structure, sample.values, sample.parameters)
    given = None
    if structure.mean is not None and structure.variance is not None:
        sizes = zip(range(-sample.x.ndim, 0), sample.x.shape, strict=True)
        shape = [1 if axis in spec.axes else size for axis, size in sizes]
        wide = torch.promote_types(sample.parameters, stats_dtype(spec, sample.x))
        dtype = wide if spec.stats_dtype else sample.parameters
        names = (structure.mean, structure.variance)
        mean, variance = (sample.values[name].to(sample.parameters).to(dtype) for name in names)
        given = Moments(mean.reshape(shape), variance.reshape(shape), 0)
    return kernels.forward(spec, sample.x, weight, bias, gate=sample.gate, given=given, kernel="eager")


def _is_exact(ours: torch.Tensor, sample: _Sample) -> bool:
    return ours.dtype is sample.y.dtype and bool(((ours == sample.y) | (ours.isnan() & sample.y.isnan())).all())


def _match(spec: NormSpec, structure: Structure, samples: list[_Sample], shape: tuple[int, ...]) -> Match:
    exact, dtypes, distances, differing = [], [], [], 0.0
    for sample in samples:
        ours = _ours(spec, structure, sample)
        same = ours.dtype is sample.y.dtype
        dtypes.append(same)
        exact.append(_is_exact(ours, sample))
        differing += float((ours.double() != sample.y.double()).double().mean())
        distances.append(0.0 if exact[-1] else _ulps(ours, spec, structure, sample))
    return Match(
        spec=spec,
        exact=tuple(exact),
        dtypes=tuple(dtypes),
        ulps=tuple(distances),
        differing=differing / max(1, len(samples)),
        roles=structure.roles,
        shape=shape,
    )


def _ulps(ours: torch.Tensor, spec: NormSpec, structure: Structure, sample: _Sample) -> float:
    """Return the largest difference in units in the last place.

    The place is that of the largest number added up: the result before the shift, the shift, half of the gain (one
    half of a standard deviation); and the unit is that of the narrowest dtype that took part.
    """
    a, b = ours.double(), sample.y.double()
    if not (a.isfinite() == b.isfinite()).all():
        return float("inf")
    gain, shift = _operands(structure, sample.values, torch.float64)
    moved = torch.zeros(()) if shift is None else along(spec, shift, b.ndim)
    least = abs(spec.factor) / 2 * (1.0 if gain is None else float(gain.abs().max()))
    magnitude = torch.maximum(b.abs(), (b - moved).abs()).clamp_min(least)
    dtypes = (ours.dtype, sample.y.dtype, sample.x.dtype, sample.parameters)
    unit = max(torch.finfo(dtype).eps for dtype in dtypes) * torch.exp2(magnitude.log2().floor())
    return float(((a - b).abs() / unit).nan_to_num(0.0).max())
