"""A norm whose statistics span the steps of a sequence.

## What it finds
A layer, group or instance norm, or one written by hand, that takes its mean and variance over the time axis of a
sequence model. The axes are named by running the model again with another batch size and another length. Masked forms
and images are left out. Speech and signal models take statistics over time on purpose: with floating inputs the
finding is for information. Where a later step's data reaches an earlier one of a causal model, the leak is reported
instead (future-leak-through-norm).

## Why it matters
Every step is then scaled by all others: by the length of the sequence, by the padding behind it, and by what comes
later. The same tokens give other results in a longer batch, and a decoder cannot reproduce them step by step.

## How to fix it
Normalize the features of each step alone: `LayerNorm(H)` or `RMSNorm(H)` on `[B, T, H]`. Where a statistic over time is
meant, leave padding out of it with a mask.

## Sources
Questions 4, 20, 24 and 26. Ba, Kiros and Hinton 2016, Layer Normalization, https://arxiv.org/abs/1607.06450 (statistics
of one step's summed inputs); https://docs.pytorch.org/docs/stable/generated/torch.nn.LayerNorm.html (which trailing
axes a `normalized_shape` covers).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts, mixing
from normwise.facts.labels import counts_tokens
from normwise.facts.masks import masks_behind
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.spec import Scope
from normwise.targets import Target, inputs

ZH = """统计量跨越序列时间步的归一化。

## 发现什么
序列模型中，层归一化、组归一化、实例归一化或手写归一化在时间轴上取均值和方差。轴名通过改变批次大小和长度再运行得到。
带掩码的形式和图像除外。语音和信号模型常有意在时间上取统计量：输入为浮点数时只作提示。若因果模型中后面的步影响了前面
的步，则改报泄漏（future-leak-through-norm）。

## 为什么重要
每一步都被其他所有步缩放：受序列长度、末尾补齐和后面内容的影响。同样的词元在更长的批次里结果不同，解码器也无法逐步重
现。

## 如何修复
只对每一步的特征归一化：对 `[B, T, H]` 用 `LayerNorm(H)` 或 `RMSNorm(H)`。确实要跨时间统计时，用掩码排除补齐。

## 来源
问题 4、20、24、26。Ba、Kiros 与 Hinton 2016，Layer Normalization，https://arxiv.org/abs/1607.06450 ；
https://docs.pytorch.org/docs/stable/generated/torch.nn.LayerNorm.html （`normalized_shape` 覆盖哪些末尾轴）。
"""

CODE = "AXS002"
SEVERITY = Severity.WARNING


def check(facts: Facts) -> Iterator[Finding]:
    """Report every norm that reduces the time axis, apart from those through which the future leaks."""
    batch, lengths = inputs.size_of(facts.target, "batch"), inputs.lengths_of(facts.target)
    suspects = [s for s in facts.sites if lengths and _may_span_time(facts, s, batch, lengths)]
    if not suspects:
        return
    spanning = [s for s in suspects if _spans_time(facts, s)]
    leaks = {s.row.path for s in facts.causality.sites} if spanning and facts.causality.leaks else set[str]()
    spanning = [s for s in spanning if s.row.path not in leaks]
    if spanning:
        yield _finding(facts, spanning)


def _may_span_time(facts: Facts, site: Site, batch: int, lengths: tuple[int, ...]) -> bool:
    """Images have no steps, and a batch norm's statistics over time are those of its training."""
    spec, call = site.row.spec, site.calls[0]
    if spec is None or spec.scope is Scope.BATCH or not call.uses_batch:
        return False
    return mixing.may_mix(call, facts.graph, batch, lengths) and not masks_behind(facts.flow, call.members)


def _spans_time(facts: Facts, site: Site) -> bool:
    spec, axes = site.row.spec, facts.labels.get(site.calls[0].input)
    if axes is None or spec is None:
        raise NotKnown(both(f"the axes of {site.row.path}'s input have no names", f"{site.row.path} 的输入轴无法命名"))
    if spec.scope is Scope.GROUP and spec.axes and "time" in axes[1]:
        return False  # steps taken for channels: a fault of its own
    return any("time" in axes[axis] for axis in spec.axes)


def _finding(facts: Facts, sites: list[Site]) -> Finding:
    paths = tuple(s.row.path for s in sites)
    first = sites[0]
    tokens, elements = counts_tokens(facts.graph), first.calls[0].count
    return Finding(
        paths=paths,
        severity=SEVERITY if tokens else Severity.INFO,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'norm')} over time: one mean and variance for {elements} elements of all steps",
            f"{len(paths)} 个归一化跨越时间：所有步的 {elements} 个元素共用一个均值和方差",
        ),
        evidence={
            "norms": len(paths),
            "shape": list(first.row.shape),
            "axes": list(facts.labels[first.calls[0].input]),
            "reduced": list(first.row.spec.axes) if first.row.spec else [],
            "elements": elements,
        },
        fix=both(
            "Normalize the features of each step alone: LayerNorm or RMSNorm over the last axis of [B, T, H].",
            "只对每一步的特征归一化：在 [B, T, H] 的最后一轴上用 LayerNorm 或 RMSNorm。",
        ),
    )


class _Encoder(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 6), _Whole(len(shape)), nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(ids)))


class _Whole(nn.Module):
    """A layer norm over the last axes, written by hand so that it runs at any length."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.axes = tuple(range(-axes, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(self.axes, keepdim=True)
        return x * torch.rsqrt(x.square().mean(self.axes, keepdim=True) + 1e-5)


def _target(shape: tuple[int, ...]) -> Target:
    return Target(model=_Encoder(shape).eval(), args=(torch.arange(18).view(2, 9) % 11,))


def bad() -> Target:
    """Return an encoder of tokens that normalizes over steps and features."""
    return _target((9, 6))


def good() -> Target:
    """Return the same encoder, each step normalized alone."""
    return _target((6,))
