"""Padding that takes part in a norm's statistics.

## What it finds
The same samples are run with and without padding behind them (`padded_inputs=...`), in eval mode and, where norms keep
running statistics, with those of the batch. The runs are compared op by op on the part that both have. Reported is a
norm that moves a position although its own input there did not move: zeros behind the sample have entered its mean and
variance. What moves for another reason (absolute positions, convolutions that see the padding) is not blamed on it.

## Why it matters
The result for a sample depends on how long the longest of its batch was. In training the variance shrinks with the
share of padding, so activations are blown up in batches of mixed lengths and the running statistics describe the
padding. An attention mask further down cannot repair it.

## How to fix it
Leave padding out of the statistics: the norms of `normwise.layers` take a `mask`. Or batch samples of equal length, or
use a norm of each step (`LayerNorm`), which never sees its neighbours.

## Sources
Questions 14, 15 and 40. https://github.com/pytorch/audio/issues/2242 (group norm over padded time in wav2vec 2.0);
https://github.com/Tomiinek/Multilingual_Text_to_Speech/issues/81 (batch norm over padded text).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import percent
from normwise.facts import Facts, mixing
from normwise.facts.padding import Padded
from normwise.facts.repairs import effect
from normwise.rendering import both
from normwise.targets import Target, inputs

ZH = """补齐进入了归一化的统计量。

## 发现什么
把同样的样本在有补齐和无补齐时各运行一次（`padded_inputs=...`），评估模式下比较；归一化带运行统计量时再用批统计量比
较一次。两次运行在共同部分逐个操作比较。报告这样的归一化：某位置的输入没有变，输出却变了，即样本后面的零进入了均值和
方差。由其他原因引起的变化（绝对位置、看到补齐的卷积）不归咎于它。

## 为什么重要
一个样本的结果取决于同批最长样本的长度。训练时方差随补齐比例缩小，长短混合的批次激活被放大，运行统计量描述的是补齐。
后面的注意力掩码补救不了。

## 如何修复
把补齐排除在统计量之外：`normwise.layers` 的归一化接受 `mask`。或按相同长度组批，或改用逐步归一化（`LayerNorm`），它
看不到邻居。

## 来源
问题 14、15、40。https://github.com/pytorch/audio/issues/2242 （wav2vec 2.0 中跨补齐时间的组归一化）；
https://github.com/Tomiinek/Multilingual_Text_to_Speech/issues/81 （对补齐文本做批归一化）。
"""

CODE = "AXS004"
SEVERITY = Severity.ERROR


def check(facts: Facts) -> Iterator[Finding]:
    """Report the norms whose result changes with the padding behind a sample, the eval mode first."""
    batch, lengths = inputs.size_of(facts.target, "batch"), inputs.lengths_of(facts.target)
    norms = facts.norm_calls.norms
    if not any(c.running_var is not None or mixing.may_mix(c, facts.graph, batch, lengths) for c in norms):
        return  # every norm sees one position's features alone
    seen = facts.padding
    blamed: set[str] = set()
    for mode in seen.modes:
        paths = tuple(s.row.path for s in mode.sites if s.row.path not in blamed)
        blamed.update(paths)
        if paths:
            yield _finding(mode, paths, seen.share)


def _finding(mode: Padded, paths: tuple[str, ...], share: float) -> Finding:
    where_en, where_zh = ("in training", "训练时") if mode.training else ("in eval", "推理时")
    return Finding(
        paths=paths,
        severity=Severity.WARNING if mode.training else SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"{share:.0%} padding moves the outputs of the same samples by {percent(mode.change)} {where_en}",
            f"{where_zh} {share:.0%} 的补齐使同样样本的输出变化 {percent(mode.change)}",
        ),
        evidence={
            "metric": "change of the outputs on valid positions, relative",
            "value": mode.change,
            "floor": mode.floor,
            "norm_change": mode.norm_change,
            "padding": share,
            "mode": both("training", "训练") if mode.training else both("eval", "评估"),
            "norms": len(paths),
        },
        fix=both(
            "Leave padding out of the statistics (mask= of normwise.layers), batch equal lengths, or use LayerNorm.",
            "把补齐排除在统计量之外（normwise.layers 的 mask=），按等长组批，或改用 LayerNorm。",
        ),
        counterfactual=effect(
            both("this norm held where its own input is unchanged", "在输入未变处保持该归一化的输出"),
            "change of the outputs on valid positions",
            mode.change,
            mode.change_held(),
        ),
    )


class _Speech(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.read, self.norm, self.head = nn.Conv1d(3, 4, 1), norm, nn.Conv1d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.read(x)))


class _Steps(nn.Module):
    """A layer norm over the channels of each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5)


def _target(norm: nn.Module) -> Target:
    x = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(0))
    padded = nn.functional.pad(x, (0, 20))
    return Target(model=_Speech(norm).eval(), args=(x,), padded_inputs=(padded,), lengths=(10, 10))


def bad() -> Target:
    """Return a model with an instance norm over time, and its samples with 20 steps of padding."""
    return _target(nn.InstanceNorm1d(4))


def good() -> Target:
    """Return the same model with a norm of each step."""
    return _target(_Steps())
