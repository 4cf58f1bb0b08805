"""Tokens that have become one vector before a norm.

## What it finds
On the example inputs, a stack at whose start the tokens of a sample differ and in which they end up equal: what differs
between tokens is less than one part in ten thousand of the squares, in the median channel (so that one massive channel,
which makes every cosine 1, hides nothing), and the mean cosine is above 0.9999. Always for information: queries that
start equal, and models at their first weights, look like this as well. A variance that falls to the size of eps is the
business of the rule on eps.

## Why it matters
A norm keeps the angle between tokens: what attention has averaged away, no later norm brings back. With equal tokens
attention has nothing to choose from, queries and keys get no gradient, and the model predicts without context.

## How to fix it
Make the branches smaller than the stream at the start (initial weights, DeepNorm, LayerScale), place the norms before
the sublayers, and look for an average over all tokens on the stream.

## Sources
Questions 59, 61 and 62. Dong et al. 2021, Attention is not all you need, https://arxiv.org/abs/2103.03404; Noci et al.
2022, https://arxiv.org/abs/2206.03126 (rank collapse at initialisation).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts, needs
from normwise.facts.records import ProfileRow
from normwise.facts.tokens import tokens_apart
from normwise.rendering import both
from normwise.targets import Target

ZH = """各词元在归一化之前已变成同一个向量。

## 发现什么
在示例输入上，堆叠起点处一个样本的各词元不同，而在堆叠中变得相同：按通道取中位数，词元之间的差别不到平方的
万分之一（因此一个巨大的通道使所有余弦为 1 也不会误报），且平均余弦高于 0.9999。始终只作提示：起点相同的查询、
刚初始化的模型也会这样。方差降到 eps 的量级由关于 eps 的规则负责。

## 为什么重要
归一化保持词元之间的夹角：被注意力平均掉的东西，之后的归一化都找不回来。
词元相同时，注意力无从选择，查询和键得不到梯度，模型在没有上下文的情况下预测。

## 如何修复
让分支在开始时小于残差流（初始权重、DeepNorm、LayerScale），把归一化放在子层之前，
并检查残差流上是否有对所有词元的平均。

## 来源
问题 59、61 和 62。Dong 等 2021，Attention is not all you need，https://arxiv.org/abs/2103.03404；
Noci 等 2022，https://arxiv.org/abs/2206.03126（初始化时的秩塌缩）。
"""

CODE = "DYN002"
SEVERITY = Severity.INFO

# 24 post-norm blocks with Xavier weights reach a cosine of 0.996, trained language models 0.99: what lies above 0.9999
# is equal but for rounding in half precision. Of unit vectors 1 - cosine is the share of the squares that differs.
EQUAL = 0.9999
SAME = 1e-4
DIFFERENT = 1e-2


def check(facts: Facts) -> Iterator[Finding]:
    """Report stacks in which different tokens become equal."""
    facts.placement  # noqa: B018 - without inputs nothing is known
    if not facts.target.weights.magnitudes_count:
        raise NotKnown(needs.USED_WEIGHTS)
    if not facts.placement.stacks:
        return
    for index, stream in enumerate(facts.placed.streams[: len(facts.placement.stacks)]):
        rows = [r for r in facts.profile if r.stack == index and r.token_cosine is not None]
        equal = (r for r in rows if (r.token_cosine or 0.0) > EQUAL)
        start = _apart(facts, stream.adds[0].skip.root)
        first = next(((r, a) for r in equal if (a := _apart(facts, stream.adds[r.sublayer].out)) < SAME), None)
        if first is not None and start > DIFFERENT:
            yield _finding(*first, start, len(rows))


def _apart(facts: Facts, value: int) -> float:
    apart = tokens_apart(facts.runs.base.of(value), 1)
    return math.nan if apart is None else apart  # nan is neither equal nor different


def _finding(row: ProfileRow, apart: float, start: float, sublayers: int) -> Finding:
    where = row.path[-30:] or "the model"
    return Finding(
        path=row.path,
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"the tokens become equal by {where}: {start:.0%} of the squares differ at the start, {apart:.0e} there",
            f"到 {where} 时各词元变得相同：起点处平方的 {start:.0%} 不同，此处为 {apart:.0e}",
        ),
        evidence={
            "metric": "share of the squares that differs between tokens, median channel",
            "value": apart,
            "floor": SAME,
            "at_the_start": start,
            "mean_cosine_between_tokens": row.token_cosine,
            "sublayer": row.sublayer,
            "sublayers": sublayers,
        },
        fix=both(
            "Make branches small at the start (initial weights, DeepNorm, LayerScale) or place the norms before them.",
            "让分支在开始时很小（初始权重、DeepNorm、LayerScale），或把归一化放到子层之前。",
        ),
    )


class _Block(nn.Module):
    """Attention whose weights are all equal: each token gets the mean of all."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.norm, self.value = nn.LayerNorm(8), nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.value.weight.copy_(torch.eye(8) * gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.value(x.mean(1, keepdim=True)).expand_as(x))


def _target(*, gain: float) -> Target:
    model = nn.Sequential(*(_Block(gain) for _ in range(6)), nn.Linear(8, 8))
    return Target(model=model, args=(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)),))


def bad() -> Target:
    """Return blocks that replace every token by the mean of all."""
    return _target(gain=9.0)


def good() -> Target:
    """Return the same blocks with small branches."""
    return _target(gain=0.05)
