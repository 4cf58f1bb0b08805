"""Measures the eps of a foreign norm, on inputs so small that it decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from normwise.errors import NotKnown
from normwise.spec import NormSpec, reference

__all__ = ["Core", "rounded", "with_eps"]

Core = Callable[[torch.Tensor, torch.dtype | None], torch.Tensor]  # the norm alone, gain 1 and no shift

_DECADES = 40  # down to the smallest float32
_STILL = 1e-6  # relative: a root that stays when the input shrinks tenfold is eps alone
_WAY = 0.02  # the three ways give 1, 1.41 and 2

# where the root of the statistic equals that of eps alone, the root is so many times larger
_WAYS = {math.sqrt(2.0): (True, False), 2.0: (False, False), 1.0: (False, True)}  # inside, clamp


def with_eps(core: Core, x: torch.Tensor, spec: NormSpec) -> tuple[NormSpec, bool]:
    """Return ``spec`` with the eps that explains small inputs, and whether it is a number people choose.

    Raises:
        NotKnown: eps acts in none of the ways a spec has.
    """
    limit = _root_of_nothing(core, x, spec, None)
    if limit == 0:
        return spec, True
    size = _root(core, x, spec, None)
    ratio = _root(core, x * (limit / size), spec, None) / limit
    nearest = min(_WAYS, key=lambda each: abs(each - ratio))
    inside, clamp = _WAYS[nearest]
    if abs(ratio - nearest) > _WAY:
        raise NotKnown(
            f"its eps is neither added to the statistic, nor to its root, nor a bound of it: where both are {limit:.3g}"
            f", it divides by {ratio:.3g} times that"
        )
    (eps, is_round), (single, _) = (
        rounded(each**2 if inside else each) for each in (limit, _root_of_nothing(core, x, spec, torch.float32))
    )
    machine = torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps
    return replace(spec, eps=None if (eps, single) == machine else eps, eps_inside=inside, eps_clamp=clamp), is_round


def rounded(value: float) -> tuple[float, bool]:
    """Return the number that was meant by a measured one, and whether it is a round one.

    Examples:
        >>> rounded(9.9999e-6)
        (1e-05, True)
    """
    known = [torch.finfo(each).eps for each in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
    for short in (float(f"{value:.0e}"), float(f"{value:.1e}"), *known):
        if value and abs(short / value - 1) < 1e-4:
            return short, True
    return float(f"{value:.6g}"), value == 0


def _root_of_nothing(core: Core, x: torch.Tensor, spec: NormSpec, dtype: torch.dtype | None) -> float:
    """Return what an input near zero is divided by: 0 where nothing guards the root."""
    last = math.inf
    for decade in range(_DECADES):
        root = _root(core, x * 10.0**-decade, spec, dtype)
        if not math.isfinite(root):
            return 0.0
        if abs(root / last - 1) < _STILL:
            return root
        last = root
    return 0.0


def _root(core: Core, x: torch.Tensor, spec: NormSpec, dtype: torch.dtype | None) -> float:
    """Return what the module divides by, read where the numerator is largest."""
    numerator = reference(spec, x, statistic=torch.ones((), dtype=x.dtype)).flatten()
    at = int(reference(spec, x).abs().argmax())
    return float(numerator[at] / core(x, dtype).flatten()[at])
