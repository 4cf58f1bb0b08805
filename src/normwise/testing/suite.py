"""Runs every check on a layer and reports all that failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from normwise.spec import NormSpec
from normwise.testing import gradients, manners, shapes, values
from normwise.testing.case import Case, case_of
from normwise.testing.report import Check, Conformance, Measured

__all__ = ["CHECKS", "conformance"]

_F64, _F32, _BF16, _F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
_Run = Callable[[Case], Measured | str]


def _each(name: str, check: Callable[..., Measured | str], *dtypes: torch.dtype) -> dict[str, _Run]:
    """Return one check a dtype."""
    return {f"{name} in {str(dtype).removeprefix('torch.')}": partial(check, dtype=dtype) for dtype in dtypes}


CHECKS: dict[str, _Run] = {
    **_each("the definition", values.forward, _F64, _F32, _BF16, _F16),
    "size and place of eps": values.near_eps,
    "an offset of 1000 standard deviations": values.far_from_zero,
    **_each("large finite rows", values.large_rows, _F32, _BF16, _F16),
    **_each("constant rows are finite", values.constant_rows, _F32, _BF16, _F16),
    "rows of zeros": values.zero_rows,
    "dtype of the output": values.output_dtype,
    **_each("gradient of the input", gradients.input_gradient, _F64, _F32, _BF16, _F16),
    **_each("gradients of gain and shift", gradients.parameter_gradients, _F64, _F32, _BF16, _F16),
    **_each("gradients of gain and shift over 16,384 rows", gradients.many_rows, _F32, _BF16, _F16),
    **_each("gradients on one, two and four threads", gradients.threads, _F32, _BF16),
    "second derivative": gradients.second_derivative,
    "gradient through an added residual": gradients.residual_gradient,
    **_each("batch invariance", shapes.batch_invariance, _F32, _BF16),
    "layouts of memory": shapes.layouts,
    "an empty batch": shapes.empty_batch,
    "rows of one element": shapes.one_element_rows,
    "padding": shapes.padding,
    "the input is left alone": manners.input_unchanged,
    "the upstream gradient is left alone": manners.upstream_gradient_unchanged,
    "a gradient shared with a residual": manners.shared_gradient,
    "a retained graph": manners.retained_graph,
    "the same bits twice": manners.deterministic,
    "every number is written": manners.unwritten_output,
    "copies": manners.copies,
    "state dict": manners.state_dict,
}
_COMPILE = {"torch.compile": manners.compiles}


def conformance(
    layer_factory: Callable[..., Any],
    spec: NormSpec,
    *,
    shape: Sequence[int] | None = None,
    residual: bool = False,
    compile: bool = False,
    without: Sequence[str] = (),
) -> Conformance:
    """Run every check of ``CHECKS`` on a layer, and raise with all that failed.

    The definition is ``normwise.spec.reference`` in float64; each tolerance is derived where it is used. The layer
    is made anew for every check, in the mode it is made in; its gain and shift are set to random numbers. Random
    state and number of threads are left as found.

    Args:
        layer_factory: returns a layer: an ``nn.Module``, or anything callable with an input. Its gain and shift,
            where it has them, are its attributes ``weight`` and ``bias``. If it needs one argument, such as
            ``torch.nn.LayerNorm`` itself, it is given the size of the normalized axis or the number of channels,
            and is checked on rows of one element too.
        spec: what the layer computes; its axes count in the layout of ``shape``.
        shape: of a small input; by default [6, *weight.shape], or [6, C, 5, 3, ...] for statistics over
            positions. Its first axis is made longer and shorter.
        residual: the layer takes (x, residual) and returns (normalized sum, sum).
        compile: whether to check ``torch.compile(fullgraph=True)`` too, which takes seconds.
        without: names of checks to leave out.

    Returns:
        The report; ``str()`` prints it as a table.

    Raises:
        AssertionError: at least one check failed; the message lists all of them with the evidence.
        ValueError: a gated or modulated spec, or an unknown name in ``without``.

    Examples:
        >>> from normwise.layers import RMSNorm
        >>> report = conformance(RMSNorm, RMSNorm(1).spec)
        >>> report.failed
        ()
    """
    checks = {**CHECKS, **(_COMPILE if compile else {})}
    unknown = sorted(set(without) - set(checks))
    if unknown:
        raise ValueError(f"no check is called {unknown[0]!r}; choose from: {', '.join(checks)}")
    case = case_of(layer_factory, spec, None if shape is None else tuple(shape), residual)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        done = [_run(name, check, case) for name, check in checks.items() if name not in without]
    report = Conformance(layer=type(case.layer()).__name__, checks=tuple(done))
    if report.failed:
        lines = "\n".join(f"  {check.name}: {_evidence(check)}" for check in report.failed)
        raise AssertionError(f"{report.layer} failed {len(report.failed)} of {len(done)} checks\n{lines}")
    return report


def _evidence(check: Check) -> str:
    if math.isnan(check.measured):
        return check.note
    return f"measured {check.measured:.4g}, at most {check.limit:.4g} ({check.note})"


def _run(name: str, check: _Run, case: Case) -> Check:
    try:
        found = check(case)
    except Exception as error:  # a layer may fail in any way; the other checks are wanted too
        said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return Check(name=name, passed=False, measured=math.nan, limit=math.nan, note=said)
    if isinstance(found, str):
        return Check(name=name, passed=True, measured=math.nan, limit=math.nan, note=found, applies=False)
    return Check(
        name=name, passed=found.value <= found.limit, measured=found.value, limit=found.limit, note=found.about
    )
