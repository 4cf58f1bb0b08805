"""Kernels: ways to compute a ``NormSpec``, from plain torch to compiled code, behind one interface.

A kernel is one file with

* ``RANK``: the kernel of the highest rank that does not refuse is taken;
* ``unavailable()``: None, or why it cannot run on this machine at all;
* ``refusal(spec, x, weight, bias, mask, **operands)``: None, or the reason why it cannot serve this call;
* ``forward(spec, x, weight, bias, mask, **operands)``: the normalized tensor, differentiable as often as torch is;
* ``forward_and_moments(...)``: the same with the statistics it used, for norms that keep running ones;
* ``forward_added(spec, x, residual, weight, bias, wide)``: the norm of x + residual, and that sum;
* ``moments(spec, x, mask)``: the statistics alone.

``eager`` never refuses: it is the definition that the others are held to. Everywhere ``kernel`` is ``"auto"``, or
the name of the kernel that must be used.
"""

from __future__ import annotations

from typing import Any

import torch

from normwise._parts import collect
from normwise.kernels import _transforms as _transforms
from normwise.kernels import cpu as cpu
from normwise.kernels import eager as eager
from normwise.kernels import triton as triton
from normwise.kernels._quick import Way as Way
from normwise.kernels._quick import attempt as attempt
from normwise.kernels._quick import short_way as short_way
from normwise.kernels.eager import Moments as Moments
from normwise.spec import NormSpec

__all__ = [
    "KERNELS",
    "Moments",
    "Way",
    "attempt",
    "backends",
    "check_name",
    "forward",
    "forward_added",
    "forward_and_moments",
    "moments",
    "refusals",
    "short_way",
]

_NEEDS = ("RANK", "unavailable", "refusal", "forward", "forward_and_moments", "forward_added", "moments")
KERNELS = collect(globals(), needs=_NEEDS)
_BY_RANK = sorted(KERNELS, key=lambda name: -KERNELS[name].RANK)


def backends() -> dict[str, str | None]:
    """Return for each kernel, best first, None if it runs on this machine, or the reason why it does not.

    Examples:
        >>> backends()["eager"] is None
        True
    """
    return {name: KERNELS[name].unavailable() for name in _BY_RANK}


_running = tuple(KERNELS[name] for name in _BY_RANK if KERNELS[name].unavailable() is None)


def refusals(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    **operands: Any,
) -> dict[str, str]:
    """Return for each kernel that cannot serve this call the reason why, best kernel first.

    Examples:
        >>> "eager" in refusals(NormSpec(), torch.ones(2, 4))
        False
    """
    reasons = (
        (name, KERNELS[name].unavailable() or KERNELS[name].refusal(spec, x, weight, bias, mask, **operands))
        for name in _BY_RANK
    )
    return {name: why for name, why in reasons if why is not None}


def forward(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    *,
    kernel: str = "auto",
    **operands: Any,
) -> torch.Tensor:
    """Compute the norm with the best kernel that takes the call; arguments as in ``eager.forward``.

    Raises:
        ValueError: there is no such kernel, or the one that was named does not take this call; the message says why.
    """
    if kernel == "auto":
        for each in _running:
            if each.refusal(spec, x, weight, bias, mask, **operands) is None:
                return each.forward(spec, x, weight, bias, mask, **operands)
    return _named(kernel, spec, x, weight, bias, mask, **operands).forward(spec, x, weight, bias, mask, **operands)


def forward_and_moments(
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    *,
    kernel: str = "auto",
    **operands: Any,
) -> tuple[torch.Tensor, Moments]:
    """Compute the norm and the moments it used; arguments as in ``forward``."""
    chosen = _choose(kernel, spec, x, weight, bias, mask, **operands)
    return chosen.forward_and_moments(spec, x, weight, bias, mask, **operands)


def forward_added(
    spec: NormSpec,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    wide: bool = False,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the norm of x + residual in the dtype of x, and the sum in the wider dtype of the two.

    ``wide`` asks for a sum in float32 of two half-precision tensors.
    """
    chosen = _choose(kernel, spec, x, weight, bias, None, residual=residual)
    return chosen.forward_added(spec, x, residual, weight, bias, wide)


def moments(spec: NormSpec, x: torch.Tensor, mask: torch.Tensor | None = None, *, kernel: str = "auto") -> Moments:
    """Measure mean, statistic and number of elements."""
    return _choose(kernel, spec, x, None, None, mask).moments(spec, x, mask)


def _choose(
    kernel: str,
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    **operands: Any,
) -> Any:
    if kernel != "auto":
        return _named(kernel, spec, x, weight, bias, mask, **operands)
    for each in _running:
        if each.refusal(spec, x, weight, bias, mask, **operands) is None:
            return each
    raise AssertionError("the eager kernel takes every call")


def _named(
    kernel: str,
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    **operands: Any,
) -> Any:
    chosen = KERNELS[check_name(kernel)]
    why = chosen.unavailable() or chosen.refusal(spec, x, weight, bias, mask, **operands)
    if why is not None:
        raise ValueError(f"kernel={kernel!r} does not take this call: {why}; use kernel='auto'")
    return chosen


def check_name(kernel: str) -> str:
    """Return ``kernel``; raise ``ValueError`` unless it is ``"auto"`` or names one."""
    if kernel != "auto" and kernel not in KERNELS:
        raise ValueError(
            f"kernel={kernel!r} is none of auto, {', '.join(_BY_RANK)}; use kernel='auto' for the best that takes it"
        )
    return kernel
