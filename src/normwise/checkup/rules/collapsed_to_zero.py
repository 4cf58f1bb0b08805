"""A norm whose output row is exactly zero although its input is not.

## What it finds
Rows of the example run that a norm maps to exact zeros, before gain and shift, while the same formula in float64
gives them their usual size. The mean square, the variance or the norm of the row overflowed to infinity, and 1/inf is
0. A row of equal numbers in a norm that centres, and a row of zeros, are zero by right.

## Why it matters
The token, and its gradient, are gone, and nothing is NaN: a watch on infinity and anomaly mode stay silent. In
float16 one element of 256 in a row does it wherever the squares are taken in float16.

## How to fix it
Take the statistics in float32 (`x.float()` before the squares) and cast the normalized value back. In float32 the
rows themselves are beyond 1e19: find what makes them grow.

## Sources
Questions 41, 58 and 61. https://github.com/meta-llama/llama/issues/1048 (generation collapses without the upcast).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.calls import NormCall
from normwise.facts.repairs import effect, respecified
from normwise.facts.shares import statistic
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.spec import NormSpec, Statistic
from normwise.targets import Target

ZH = """归一化把非零的输入行变成了恰好为零的输出行。

## 发现什么
示例运行中，归一化（增益和偏移之前）输出恰好全零、而同一公式在 float64 下大小正常的行。该行的均方、方差或范数溢出为无
穷，1/inf 等于 0。对做中心化的归一化，所有元素相等的行以及全零行本来就应为零，不计入。

## 为什么重要
这个词元和它的梯度都消失了，却没有任何 NaN：检查无穷的工具和 anomaly mode 都不作声。只要平方在 float16 中计算，行内
一个元素达到 256 就会发生。

## 如何修复
在 float32 中计算统计量（平方之前 `x.float()`），再把结果转回。若在 float32 中发生，说明该行已超过 1e19：查找使其增长
的原因。

## 来源
问题 41、58、61。https://github.com/meta-llama/llama/issues/1048（去掉提升精度后生成崩溃）。
"""

CODE = "NUM002"
SEVERITY = Severity.ERROR

# A row whose statistic is below a hundredth of eps is small by right: its output underflows, it has not collapsed
_SHRUNK_BY_EPS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapsed:
    """The rows that one execution of a norm lost."""

    call: NormCall
    rows: int
    of: int
    largest: float
    dtype: str


def check(facts: Facts) -> Iterator[Finding]:
    """Report every norm that maps rows of the example run to exact zeros."""
    found: dict[str, list[tuple[Site, Collapsed]]] = {}
    for site in facts.sites:
        for call in site.calls:
            lost = _collapsed(facts, call)
            if lost is not None:
                found.setdefault(lost.dtype, []).append((site, lost))
    for dtype, lost in found.items():
        yield _finding(facts, dtype, lost)


def _collapsed(facts: Facts, call: NormCall) -> Collapsed | None:
    spec = call.spec
    if spec is None or not call.uses_batch or spec.statistic in (Statistic.OTHER, Statistic.COMPLETED):
        return None
    x, core = facts.runs.base.of(call.input), facts.runs.base.of(call.core)
    if x.numel() == 0 or x.shape != core.shape or spec.partial < 1 or bool((core != 0).all()):
        return None
    if call.native and _silenced(facts, call):
        return None
    zero = _zero_rows(spec, core)
    if not bool(zero.any()):
        return None
    s, eps = statistic(spec, x), spec.eps or 0.0
    enough = s > _SHRUNK_BY_EPS * (eps if spec.eps_inside else eps**2)
    # what rounding leaves of the variance of n equal numbers
    extent = _grouped(spec, x.double()).abs().amax(spec.axes)
    live = enough & _finite_rows(spec, x) & (s > (extent * torch.finfo(x.dtype).eps).square())
    rows = int((zero & live).sum())
    if rows == 0:
        return None
    dtype = facts.graph.values[call.statistic_value].dtype
    return Collapsed(call=call, rows=rows, of=zero.numel(), largest=float(x.abs().max()), dtype=dtype)


def _silenced(facts: Facts, call: NormCall) -> bool:
    """Whether torch's own op, which multiplies by the gain inside, holds a gain of 0: zero rows are then asked for."""
    named = facts.parameters
    gain = None if call.weight is None else named.get(facts.graph.values[call.weight].names[0])
    return gain is not None and bool((gain == 0).any())


def _grouped(spec: NormSpec, x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(min(spec.axes), (spec.groups, -1)) if spec.groups else x


def _zero_rows(spec: NormSpec, x: torch.Tensor) -> torch.Tensor:
    return (_grouped(spec, x) != 0).double().amax(spec.axes) == 0


def _finite_rows(spec: NormSpec, x: torch.Tensor) -> torch.Tensor:
    """Return which rows are finite: inf and NaN have a cause elsewhere."""
    return _grouped(spec, x.isfinite().double()).amin(spec.axes) > 0


def _finding(facts: Facts, dtype: str, lost: list[tuple[Site, Collapsed]]) -> Finding:
    paths = tuple(dict.fromkeys(site.row.path for site, _ in lost))
    rows, of = sum(c.rows for _, c in lost), sum(c.of for _, c in lost)
    largest = max(c.largest for _, c in lost)
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{rows} of {of} rows come out exactly 0: the statistic overflowed {dtype} (max|x| {largest:.3g})",
            f"{of} 行中有 {rows} 行输出恰好为 0：统计量超出 {dtype} 的范围（max|x| 为 {largest:.3g}）",
        ),
        evidence={
            "metric": "rows that are exactly zero",
            "value": rows,
            "floor": 0,
            "rows": of,
            "largest_input": largest,
            "dtype": dtype,
        },
        counterfactual=_repair(facts, lost, rows),
        fix=both(
            "Take the statistics of x.float() and cast the normalized value back: y = x.float(); ...; y.to(x.dtype).",
            "在 x.float() 上计算统计量，再把归一化后的值转回：y = x.float(); ...; y.to(x.dtype)。",
        ),
    )


def _repair(facts: Facts, lost: list[tuple[Site, Collapsed]], before: int) -> dict[str, object] | None:
    wide = "float32" if lost[0][1].dtype != "float32" else "float64"
    calls = [c.call for _, c in lost]
    try:
        run = respecified(facts, calls, lambda s: replace(s, stats_dtype=wide), wanted=[c.output for c in calls])
        after = sum(int(_zero_rows(c.spec, run.of(c.output)).sum()) for c in calls if c.spec is not None)
    except NotKnown:
        return None
    change = both(f"the statistics in {wide}", f"用 {wide} 计算统计量")
    return effect(change, "rows that are exactly zero", before, after)


class _Cosine(nn.Module):
    def __init__(self, *, float32: bool) -> None:
        super().__init__()
        self.up, self.head, self.float32 = nn.Linear(4, 8), nn.Linear(8, 3), float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        y = x.float() if self.float32 else x
        return self.head((y / (y.square().sum(-1, keepdim=True) + 1e-4).sqrt()).to(x.dtype))


def _target(*, float32: bool) -> Target:
    model = _Cosine(float32=float32)
    with torch.no_grad():
        model.up.weight.copy_(torch.eye(8, 4) * 400.0)
    x = torch.tensor([[1.0, 0.2, 0.1, 0.3], [0.1, 0.2, 0.3, 0.2]])
    return Target(model=model.half().eval(), args=(x.half(),))


def bad() -> Target:
    """Return a float16 model whose cosine similarity squares a row that holds 400."""
    return _target(float32=False)


def good() -> Target:
    """Return the same model with its squares in float32."""
    return _target(float32=True)
