"""Kernels: ways to compute a ``NormSpec``, from plain torch to compiled code, behind one interface.

A kernel is one file with

* ``RANK``: the kernel of the highest rank that does not refuse is taken;
* ``refusal(spec, x, weight, bias, mask)``: None, or the reason why it cannot serve this call;
* ``forward(spec, x, weight, bias, mask, ...)``: the normalized tensor, differentiable as often as torch is;
* ``forward_and_moments(...)``: the same with the statistics it used, for norms that keep running ones;
* ``moments(spec, x, mask)``: the statistics alone.

``eager`` never refuses: it is the definition that the others are held to.
"""

from __future__ import annotations

from typing import Any

import torch

from normwise._parts import collect
from normwise.kernels import eager as eager
from normwise.kernels.eager import Moments as Moments
from normwise.spec import NormSpec

__all__ = ["KERNELS", "Moments", "forward", "forward_and_moments", "moments", "refusals"]

KERNELS = collect(globals(), needs=("RANK", "refusal", "forward", "forward_and_moments", "moments"))
_BY_RANK = sorted(KERNELS.values(), key=lambda kernel: -kernel.RANK)


def refusals(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> dict[str, str]:
    """Return for each kernel that cannot serve this call the reason why, best kernel first.

    Examples:
        >>> refusals(NormSpec(), torch.ones(2, 4))
        {}
    """
    reasons = ((name, KERNELS[name].refusal(spec, x, weight, bias, mask)) for name in KERNELS)
    return {name: why for name, why in reasons if why is not None}


def forward(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    **operands: Any,
) -> torch.Tensor:
    """Compute the norm with the best kernel that takes the call; arguments as in ``eager.forward``."""
    return _choose(spec, x, weight, bias, mask).forward(spec, x, weight, bias, mask, **operands)


def forward_and_moments(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    **operands: Any,
) -> tuple[torch.Tensor, Moments]:
    """Compute the norm and the moments it used; arguments as in ``eager.forward``."""
    return _choose(spec, x, weight, bias, mask).forward_and_moments(spec, x, weight, bias, mask, **operands)


def moments(spec: NormSpec, x: torch.Tensor, mask: torch.Tensor | None = None) -> Moments:
    """Measure mean, statistic and number of elements."""
    return _choose(spec, x, None, None, mask).moments(spec, x, mask)


def _choose(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> Any:
    for kernel in _BY_RANK:
        if kernel.refusal(spec, x, weight, bias, mask) is None:
            return kernel
    raise AssertionError("the eager kernel takes every call")
