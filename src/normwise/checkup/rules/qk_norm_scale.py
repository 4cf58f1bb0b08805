"""A norm on queries and keys with a softmax scale that does not go with it.

## What it finds
Attention with a norm on queries and keys whose logits are scaled otherwise than the norm asks for. RMS-normalized
vectors of width d want 1/sqrt(d), vectors of length 1 want about sqrt(d) (or a learned temperature): both give logits
of standard deviation 1. Measured is the spread of the logits relative to that: 6.6 times or more is too sharp, a tenth
or less too flat to attend at all. Learned temperatures choose their own scale and are left in peace. So may gains of
the norms: Gemma 4 ships scale 1 beside them (logits of deviation 19 with random weights), so with gains this is never
more than worth knowing.

## Why it matters
With a norm on queries and keys the scale of the logits is a constant of the code. A forgotten 1/sqrt(d) saturates the
softmax from the first step; a 1/sqrt(d) left in place beside vectors of length 1 bounds every logit by 1/sqrt(d), so
that attention is an average whatever the weights.

## How to fix it
RMSNorm on both and scale 1/sqrt(d), or vectors of length 1 and a learned temperature that starts near sqrt(d).

## Sources
Questions 64 and 67. Henry et al. 2020, Query-Key Normalization, https://arxiv.org/abs/2010.04245; Dehghani et al.
2023, https://arxiv.org/abs/2302.05442.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts, needs
from normwise.facts.logits import Attention
from normwise.facts.repairs import effect
from normwise.rendering import both
from normwise.targets import InputsFrom, Target

ZH = """查询和键的归一化与 softmax 的缩放不相配。

## 发现什么
查询和键带归一化的注意力，其 logits 的缩放与该归一化的要求不符。宽度为 d 的 RMS 归一化向量配 1/sqrt(d)，
长度为 1 的向量配约 sqrt(d)（或可学习的温度）：两者的 logits 标准差都是 1。
测量 logits 相对于它的散布：6.6 倍以上过于尖锐，十分之一以下过于平坦，根本无法关注。
可学习的温度自己选择尺度，不报告。归一化的增益也能选择尺度：Gemma 4 在增益之外就用缩放 1（随机权重下 logits 标准差
为 19），所以带增益时只作提示。

## 为什么重要
查询和键带归一化时，logits 的尺度是代码里的常数。漏掉 1/sqrt(d) 会让 softmax 从第一步起就饱和；
对长度为 1 的向量仍保留 1/sqrt(d)，则每个 logit 都不超过 1/sqrt(d)，无论权重如何，注意力都只是平均。

## 如何修复
两者都用 RMSNorm 并用缩放 1/sqrt(d)；或用长度为 1 的向量和从 sqrt(d) 附近开始的可学习温度。

## 来源
问题 64 和 67。Henry 等 2020，Query-Key Normalization，https://arxiv.org/abs/2010.04245；
Dehghani 等 2023，https://arxiv.org/abs/2302.05442。
"""

CODE = "PLC009"
SEVERITY = Severity.WARNING

# Heads of 64, the smallest in common use, without their 1/sqrt(64) are 8 times too sharp; Muse Spark chooses 5.47 on
# purpose, published fixed temperatures (0.1 with heads of 32 or 64) stay below 2. The limit is the geometric mean of
# 5.47 and 8. Vectors of length 1 with 1/sqrt(d) are 1/d: a tenth already at the smallest heads in use.
SHARP = 6.6
FLAT = 0.1


def check(facts: Facts) -> Iterator[Finding]:
    """Report attentions whose logits are scaled far too much, or ten times too little."""
    if not facts.target.weights.magnitudes_count:
        raise NotKnown(needs.TRAINED_WEIGHTS)
    if facts.target.inputs_from is InputsFrom.NONE:
        raise NotKnown(both("needs example inputs: give inputs=...", "需要示例输入：给出 inputs=..."))
    normed = [a for a in facts.attentions if a.norms and not a.learned_scale]
    sharp = [a for a in normed if a.scale is not None and a.scale >= SHARP]
    flat = [a for a in normed if a.scale is not None and a.scale <= FLAT and not _gained(a)]
    for hit in (sharp, flat):
        if hit:
            yield _finding(facts, hit, len(facts.attentions), sharp=hit is sharp)


def _gained(attention: Attention) -> bool:
    """Whether a gain can still choose the scale."""
    return any(n.weight is not None for n in attention.norms)


def _finding(facts: Facts, hit: list[Attention], total: int, *, sharp: bool) -> Finding:
    first = hit[0]
    scale = first.scale
    assert scale is not None
    assert first.with_norm is not None
    paths = tuple(dict.fromkeys(a.path for a in hit))
    spread, usual = (sorted(s.spread)[len(s.spread) // 2] for s in (first.measured, first.with_norm))
    word, zh = ("too sharp", "过于尖锐") if sharp else ("too flat", "过于平坦")
    said = f"{scale:.1f} x" if sharp else f"1/{1 / max(scale, 1e-9):.0f} of"
    change = both("RMS-normalized queries and keys with 1/sqrt(d)", "RMS 归一化的查询和键，配 1/sqrt(d)")
    return Finding(
        paths=paths,
        severity=Severity.INFO if any(map(_gained, hit)) else SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"QK norm, but {len(hit)} of {total} attentions are {word}: logits {said} the usual spread",
            f"有 QK 归一化，但 {total} 个注意力中 {len(hit)} 个{zh}：logits 的散布是通常的 {scale:.3g} 倍",
        ),
        evidence={
            "metric": "logit_scale_relative_to_unit_rms",
            "value": scale,
            "floor": SHARP if sharp else FLAT,
            "logit_standard_deviation": spread,
            "entropy_share": first.measured.entropy[0],
            "keys": first.keys,
        },
        counterfactual=effect(change, "logit_standard_deviation", spread, usual),
        fix=both(
            "Use RMSNorm on queries and keys with scale 1/sqrt(head_dim), or unit vectors with a learned temperature.",
            "查询和键用 RMSNorm 并用缩放 1/sqrt(head_dim)，或用单位向量和可学习的温度。",
        ),
    )


class _Attention(nn.Module):
    def __init__(self, *, scale: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(64), nn.Linear(64, 192, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(64, elementwise_affine=False) for _ in range(2))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return (self.q_norm(q) @ self.k_norm(k).transpose(-1, -2) * self.scale).softmax(-1) @ v


def _target(*, scale: float) -> Target:
    torch.manual_seed(0)
    return Target(model=_Attention(scale=scale), args=(torch.randn(2, 8, 64),))


def bad() -> Target:
    """Return an attention with a QK norm and no 1/sqrt(d)."""
    return _target(scale=1.0)


def good() -> Target:
    """Return the same attention with it."""
    return _target(scale=1 / math.sqrt(64))
