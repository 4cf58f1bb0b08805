"""Tokens that have become one vector before a norm.

## What it finds
On the example inputs, a stack at whose start the tokens of a sample differ (mean cosine below 0.99) and in which they
end up equal to one part in ten thousand (mean cosine above 0.9999). A variance that falls to the size of eps is the
business of the rule on eps. Anisotropy of trained models, with cosines up to 0.99, is no fault.

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

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.profile import token_cosine
from normwise.facts.records import ProfileRow
from normwise.rendering import both
from normwise.targets import Target, Weights

ZH = """各 token 在归一化之前已变成同一个向量。

## 发现什么
在示例输入上，堆叠起点处一个样本的各 token 不同（平均余弦低于 0.99），而在堆叠中变得相同，差别不到万分之一
（平均余弦高于 0.9999）。方差降到 eps 的量级由关于 eps 的规则负责。
训练过的模型的各向异性（余弦可达 0.99）不算错。

## 为什么重要
归一化保持 token 之间的夹角：被注意力平均掉的东西，之后的归一化都找不回来。
token 相同时，注意力无从选择，查询和键得不到梯度，模型在没有上下文的情况下预测。

## 如何修复
让分支在开始时小于残差流（初始权重、DeepNorm、LayerScale），把归一化放在子层之前，
并检查残差流上是否有对所有 token 的平均。

## 来源
问题 59、61 和 62。Dong 等 2021，Attention is not all you need，https://arxiv.org/abs/2103.03404；
Noci 等 2022，https://arxiv.org/abs/2206.03126（初始化时的秩塌缩）。
"""

CODE = "DYN002"
SEVERITY = Severity.WARNING

# 24 post-norm blocks with Xavier weights reach 0.996, trained language models 0.99: what lies above 0.9999 is equal
# but for rounding in half precision.
EQUAL = 0.9999
DIFFERENT = 0.99


def check(facts: Facts) -> Iterator[Finding]:
    """Report stacks in which different tokens become equal."""
    facts.placement  # noqa: B018 - without inputs nothing is known
    if facts.target.weights not in (Weights.GIVEN, Weights.REAL):
        raise NotKnown(both("needs the weights that are used: these are random", "需要实际使用的权重：现在是随机的"))
    if not facts.placement.stacks:
        return
    for index in range(len(facts.placement.stacks)):
        rows = [r for r in facts.profile if r.stack == index and r.token_cosine is not None]
        first = next((r for r in rows if (r.token_cosine or 0.0) > EQUAL), None)
        start = _start(facts, index)
        if first is not None and start is not None and start < DIFFERENT:
            yield _finding(first, start, len(rows))


def _start(facts: Facts, index: int) -> float | None:
    origin = facts.runs.base.of(facts.placed.streams[index].adds[0].skip.root)
    return token_cosine(origin, 1)


def _finding(first: ProfileRow, start: float, sublayers: int) -> Finding:
    assert first.token_cosine is not None
    where = first.path[-30:] or "the model"
    return Finding(
        path=first.path,
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"the tokens become equal by {where}: cosine {start:.2f} at the start, {first.token_cosine:.5f} there",
            f"到 {where} 时各 token 变得相同：余弦从 {start:.2f} 升到 {first.token_cosine:.5f}",
        ),
        evidence={
            "metric": "mean_cosine_between_tokens",
            "value": first.token_cosine,
            "floor": EQUAL,
            "at_the_start": start,
            "sublayer": first.sublayer,
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
