"""A norm that divides by n - 1.

## What it finds
A norm whose variance is the unbiased one, `sum((x - mean)^2) / (n - 1)`, as `tensor.std()` and `tensor.var()` give by
default, where layer, group and batch norms of every framework divide by n; or a mean of squares that divides so. The
output is smaller by sqrt((n - 1) / n). For information, because a model trained this way is sound (PocketTTS does it
on purpose); a warning where the norm of the given `reference=` in its place divides by n and the outputs differ.

## Why it matters
Weights are not interchangeable with `nn.LayerNorm`: at 16 features the outputs differ by 3.2 %, at 768 by 0.065 %.
Ported checkpoints lose a little quality that nobody can place.

## How to fix it
`x.var(-1, correction=0, keepdim=True)` and `torch.rsqrt(var + eps)`, or `nn.LayerNorm`, if the weights were trained
with the biased variance; nothing if they were trained with this one.

## Sources
Questions 19 and 54. https://github.com/codertimo/BERT-pytorch/issues/30 (the tutorial norm gives 1.5 where layer norm
gives 1.732); https://docs.pytorch.org/docs/stable/generated/torch.nn.LayerNorm.html (biased estimator).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NormwiseError
from normwise.facts import Facts
from normwise.facts.calls import NormCall
from normwise.facts.differences import AGREE
from normwise.facts.outcomes import apart, outputs_of
from normwise.facts.repairs import effect, respecified
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.spec import NormSpec, Statistic
from normwise.targets import Target

ZH = """除以 n - 1 的归一化。

## 发现什么
归一化用的是无偏方差 `sum((x - mean)^2) / (n - 1)`，即 `tensor.std()` 和 `tensor.var()` 的默认值；而各框架的层归一化、
组归一化、批归一化都除以 n；均方根归一化除以 n - 1 也一样。输出小 sqrt((n - 1) / n) 倍。这样训练的模型没有问题
（PocketTTS 有意如此），所以只作提示；若给出的 `reference=` 中同一位置的归一化除以 n 且输出不同，则为警告。

## 为什么重要
权重不能与 `nn.LayerNorm` 互换：16 个特征时输出相差 3.2 %，768 个时相差 0.065 %。移植的检查点会损失一点说不清的质量。

## 如何修复
若权重按有偏方差训练，用 `x.var(-1, correction=0, keepdim=True)` 和 `torch.rsqrt(var + eps)`，或 `nn.LayerNorm`；若
就是这样训练的，不必改。

## 来源
问题 19、54。https://github.com/codertimo/BERT-pytorch/issues/30 （教程的归一化得 1.5，层归一化得 1.732）；
https://docs.pytorch.org/docs/stable/generated/torch.nn.LayerNorm.html （有偏估计）。
"""

CODE = "AXS008"
SEVERITY = Severity.INFO
EXPLAINS = ("CKP006",)

NEAR = 0.01  # of n, told from n - 1


def check(facts: Facts) -> Iterator[Finding]:
    """Report the norms whose variance divides by n - 1, one finding for each number of elements."""
    found: dict[int, list[Site]] = {}
    for site in facts.sites:
        if _less_one(site.calls[0]):
            found.setdefault(site.calls[0].count, []).append(site)
    biased = _biased_in_reference(facts) if found else frozenset[int]()
    for count, sites in sorted(found.items()):
        yield _finding(facts, count, sites, against=[c for s in sites for c in s.calls if c.op.id in biased])


def _less_one(call: NormCall) -> bool:
    """Whether a norm divides by n - 1; mean squares that do are L2 norms times sqrt(n - 1), or have that factor."""
    spec, n = call.spec, call.count
    if spec is None or n <= 1:
        return False
    if spec.statistic is Statistic.L2:
        return abs(spec.factor**2 - (n - 1)) < NEAR
    return not spec.biased or (spec.statistic is Statistic.MEAN_SQUARE and abs(spec.factor**2 * n - (n - 1)) < NEAR)


def _divided_by_n(count: int) -> Callable[[NormSpec], NormSpec]:
    def change(spec: NormSpec) -> NormSpec:
        if not spec.biased:
            return replace(spec, biased=True)
        return replace(spec, factor=math.sqrt(count) if spec.statistic is Statistic.L2 else 1.0)

    return change


def _biased_in_reference(facts: Facts) -> frozenset[int]:
    """Return the ops of norms in whose place the reference divides by n, where its outputs differ visibly."""
    if facts.target.reference is None:
        return frozenset()
    try:
        seen = facts.reference
        pairs = seen.pairs if seen.distance > AGREE else ()
    except NormwiseError:
        return frozenset()  # what cannot be run says nothing against the model
    return frozenset(p.mine.op.id for p in pairs if p.theirs.spec is not None and not _less_one(p.theirs))


def _finding(facts: Facts, count: int, sites: list[Site], *, against: Sequence[NormCall]) -> Finding:
    paths = tuple(s.row.path for s in sites)
    factor = math.sqrt((count - 1) / count)
    return Finding(
        paths=paths,
        severity=Severity.WARNING if against else SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'norm')} dividing by n - 1: outputs {1 - factor:.2%} below those with n = {count}",
            f"{len(paths)} 个归一化除以 n - 1：输出比除以 n = {count} 时小 {1 - factor:.2%}",
        ),
        evidence={
            "metric": "output against the biased variance",
            "value": factor,
            "elements": count,
            "norms": len(paths),
            "eps_outside_root": sites[0].calls[0].eps_outside,
            "reference_divides_by_n": bool(against),
        },
        fix=both(
            "x.var(-1, correction=0, keepdim=True) and rsqrt(var + eps), if the weights were trained with LayerNorm.",
            "若权重按 LayerNorm 训练：用 x.var(-1, correction=0, keepdim=True) 和 rsqrt(var + eps)。",
        ),
        counterfactual=(_towards_reference(facts, against) if against else None) or _effect(facts, sites[-1]),
    )


def _towards_reference(facts: Facts, calls: Sequence[NormCall]) -> dict[str, object] | None:
    """Measure how near the model comes to its reference with these norms divided by n."""
    try:
        reference = facts.reference
        mine, theirs = reference.runs
        if mine is not facts.runs.base:
            return None  # compared in float32: in half precision it drowns
        run = respecified(facts, calls, _divided_by_n(calls[0].count), wanted=facts.graph.outputs)
        before, after = reference.distance, apart(outputs_of(run), outputs_of(theirs))
    except NormwiseError:
        return None
    return effect(
        both("the variance divided by n", "方差除以 n"),
        "distance of the outputs relative to the reference",
        before,
        after,
    )


def _effect(facts: Facts, site: Site) -> dict[str, object] | None:
    """Measure the norm's output with the variance divided by n, where its formula is known."""
    call = site.calls[0]
    try:
        before = _size(facts.runs.base.of(call.core))
        run = respecified(facts, [call], _divided_by_n(call.count), wanted=[call.output])
        own = _size(facts.runs.base.of(call.output))
        after = before * _size(run.of(call.output)) / own if own else before
    except NormwiseError:
        return None
    change = both("the variance divided by n", "方差除以 n")
    return effect(change, "root mean square of the normalized values", before, after)


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


class _LayerNorm(nn.Module):
    def __init__(self, hidden_size: int, *, correction: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(hidden_size)), nn.Parameter(torch.zeros(hidden_size))
        self.correction = correction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        var = x.var(-1, correction=self.correction, keepdim=True)
        return self.weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(var + 1e-6) + self.bias


def _target(*, correction: int) -> Target:
    model = nn.Sequential(nn.Linear(6, 8), _LayerNorm(8, correction=correction), nn.Linear(8, 2))
    return Target(model=model.eval(), args=(torch.randn(3, 6, generator=torch.Generator().manual_seed(0)),))


def bad() -> Target:
    """Return a model whose norm divides by n - 1."""
    return _target(correction=1)


def good() -> Target:
    """Return the same model, dividing by n."""
    return _target(correction=0)
