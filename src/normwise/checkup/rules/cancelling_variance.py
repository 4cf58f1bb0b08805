"""A variance taken as the difference of two large numbers.

## What it finds
Norms written by hand that subtract one moment from another, E[x^2] - E[x]^2, and whose output on your own rows is off
by more than 1 % against float64, at least ten times more than on the same rows without their mean. Where your rows
are harmless but rows with a mean far from 0 are not, it is worth knowing.

## Why it matters
E[x^2] and E[x]^2 agree in their leading digits once the mean is large beside the spread, and the difference keeps
what rounding left: 3 % off at a mean of 1000 deviations in float32, at 16 in bfloat16. It may even come out negative,
and the root is NaN.

## How to fix it
Centre first: `c = x - x.mean(-1, keepdim=True); var = c.square().mean(-1, keepdim=True)`, or use
`torch.nn.functional.layer_norm`, which sums by Welford's method.

## Sources
Questions 41 and 54. Chan, Golub and LeVeque 1983, Algorithms for computing the sample variance,
https://doi.org/10.1080/00031305.1983.10483115.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts import vocabulary as ops
from normwise.facts.calls import NormCall
from normwise.facts.repairs import effect
from normwise.facts.rows import alike
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.targets import Target

ZH = """方差由两个大数相减得到。

## 发现什么
用一个矩减去另一个矩（`E[x^2] - E[x]^2`）、且在你自己的数据行上输出与 float64 相差超过 1%，并至少是去掉均值后同样的行
的十倍的手写归一化。若你的数据没有问题，但均值远离 0 的行有问题，则作为提示。

## 为什么重要
当均值远大于离散程度时，E[x^2] 与 E[x]^2 的高位数字相同，相减只剩舍入误差：float32 在均值为 1000 倍标准差时误差 3%，
bfloat16 在 16 倍时就如此。结果甚至可能为负，开方得到 NaN。

## 如何修复
先中心化：`c = x - x.mean(-1, keepdim=True); var = c.square().mean(-1, keepdim=True)`，或使用
`torch.nn.functional.layer_norm`，它用 Welford 方法求和。

## 来源
问题 41、54。Chan、Golub 与 LeVeque 1983，Algorithms for computing the sample variance，
https://doi.org/10.1080/00031305.1983.10483115。
"""

CODE = "NUM007"
SEVERITY = Severity.WARNING
EXPLAINS = ("NUM009",)

INEXACT = 1e-2  # of the output (RULES: measured error above this)
CLOSER = 10.0  # without the mean the same rows must come out this much better: else the dtype is to blame
_MANY = 10.0  # times the output: from here on percent are hard to read
# Means, in deviations, at which a difference of squares has lost about 3 %: rounding 2^-24 * m^2, 2^-11, 2^-8
FAR = {"float64": 1e6, "float32": 1e3, "float16": 16.0, "bfloat16": 16.0}


def check(facts: Facts) -> Iterator[Finding]:
    """Report variances taken as a difference of moments that lose what a two-pass variance keeps."""
    suspects = [s for s in facts.sites if not s.row.native and s.calls[0].uses_batch and _differs(facts, s.calls[0])]
    unknown: NotKnown | None = None
    found = False
    for group in alike(suspects, facts.recording):
        try:
            finding = _judged(facts, group)
        except NotKnown as why:
            unknown = why
            continue
        if finding is not None:
            found = True
            yield finding
    if unknown is not None and not found:
        raise unknown


def _differs(facts: Facts, call: NormCall) -> bool:
    """Whether a norm subtracts one reduced value from another: two moments, not the mean from the row."""
    values = facts.graph.values
    size = values[call.input].numel
    subtractions = (facts.graph.ops[m] for m in call.members if facts.graph.ops[m].short in ops.SUB)
    return any(
        len(op.inputs) == 2 and all(values[i].numel < size and facts.flow.data[i] for i in op.inputs)
        for op in subtractions
    )


def _judged(facts: Facts, group: tuple[Site, ...]) -> Finding | None:
    worst, site = 0.0, group[0]
    for each in group:
        error = _excess(facts, each.calls[0], facts.runs.base.of(each.calls[0].input))
        if error > worst:
            worst, site = error, each
    if worst > INEXACT:
        return _finding(facts, site, group, worst, Severity.WARNING)
    call = group[0].calls[0]
    record = facts.graph.values[call.input]
    x = torch.randn(record.shape, generator=torch.Generator().manual_seed(0), device="cpu") + FAR[record.dtype]
    error = _excess(facts, call, x.to(facts.rows.device, getattr(torch, record.dtype)))
    return _finding(facts, group[0], group, error, Severity.INFO) if error > INEXACT else None


def _excess(facts: Facts, call: NormCall, x: torch.Tensor) -> float:
    """Return the error on rows where it is much smaller once they are centred, else 0: a variance does not move."""
    if not bool(x.isfinite().all()):
        return 0.0
    axes = call.spec.axes if call.spec is not None else (-1,)
    centred = (x.double() - x.double().mean(axes, keepdim=True)).to(x.dtype)
    own, without_mean = facts.rows.error_on(call, x), facts.rows.error_on(call, centred)
    return own if own > CLOSER * without_mean else 0.0


def _finding(facts: Facts, site: Site, group: tuple[Site, ...], error: float, severity: Severity) -> Finding:
    shown, shown_zh = "is not finite", "输出不是有限数"
    if math.isfinite(error):
        size, size_zh = (f"{error:.1%}", f" {error:.1%}") if error < _MANY else (f"{error:.0f}x", f" {error:.0f} 倍")
        shown, shown_zh = f"is off by {size} against float64", f"输出与 float64 相差{size_zh}"
    own = severity is not Severity.INFO
    rows, rows_zh = ("your rows", "你的数据") if own else ("rows with a large mean", "均值很大的行")
    paths = tuple(s.row.path for s in group)
    return Finding(
        path=site.row.path,
        paths=tuple(dict.fromkeys((site.row.path, *paths))),
        severity=severity,
        basis=Basis.MEASURED,
        message=both(
            f"E[x^2] - E[x]^2 cancels: the output on {rows} {shown}",
            f"E[x^2] - E[x]^2 相消：在{rows_zh}上{shown_zh}",
        ),
        evidence={
            "metric": "relative error of the output against float64",
            "value": error if math.isfinite(error) else None,
            "floor": INEXACT,
            "norms": len(group),
            "rows": both("given", "你的数据") if own else both("probe", "探测数据"),
        },
        counterfactual=_repair(facts, site, error) if own else None,
        fix=both(
            "Centre first: c = x - x.mean(-1, keepdim=True); var = c.square().mean(-1, keepdim=True).",
            "先中心化：c = x - x.mean(-1, keepdim=True); var = c.square().mean(-1, keepdim=True)。",
        ),
    )


def _repair(facts: Facts, site: Site, before: float) -> dict[str, object] | None:
    """Run the model with this norm computed in float64 and rounded, and measure what leaves the norm."""
    call = site.calls[0]
    try:
        true = facts.rows.double(call.core, {call.input: facts.runs.base.of(call.input).cpu().double()})
        run = facts.runs.altered({call.core: lambda kept: true}, [call.core])
        after = float((run.of(call.core).cpu().double() - true).norm() / true.norm())
    except NotKnown:
        return None
    change = both("the variance without cancellation", "不发生相消的方差")
    return effect(change, "relative error of the output", before if math.isfinite(before) else 1.0, after)


class _LayerNorm(nn.Module):
    def __init__(self, hidden_size: int, *, two_pass: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(hidden_size)), nn.Parameter(torch.zeros(hidden_size))
        self.two_pass = two_pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        if self.two_pass:
            var = (x - mean).square().mean(-1, keepdim=True)
        else:
            var = (x.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.weight + self.bias


def _target(*, two_pass: bool) -> Target:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)) + 1500.0
    return Target(model=nn.Sequential(_LayerNorm(32, two_pass=two_pass), nn.Linear(32, 2)), args=(x,))


def bad() -> Target:
    """Return a model that takes the variance as a difference, on rows with a mean of 1500 deviations."""
    return _target(two_pass=False)


def good() -> Target:
    """Return the same model with its rows centred first."""
    return _target(two_pass=True)
