"""A gain far larger than those of its siblings.

## What it finds
In a trained model, a norm whose effective gain (root mean square over channels) stands far above the norms of the same
role in the other blocks: more than 8 robust deviations and more than 4 times their median. Sizes are never judged by
themselves: whole families have gains of 10 and more. A warning only where the harm is measured: an attention without a
norm on queries and keys that is saturated (PLC010), and no longer is in a run with the gain at its siblings' median.

## Why it matters
It is worth knowing: such a gain sets the size of a branch or of the attention logits alone, is where half precision
overflows first and where quantisation loses most. It is often healthy (first and last blocks, Gemma), so by itself it
is information; growth while training is a matter for a live watch.

## How to fix it
Look whether the loss or the gradients spike where it stands; a lower learning rate for gains, or decay toward 1
(`1 + weight` with weight decay), holds it back.

## Sources
Questions 61 and 64. https://github.com/huggingface/transformers/issues/45676 (gains and logits suspected in a spike).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.facts import Facts
from normwise.facts.oversized import LEAST as LEAST
from normwise.facts.oversized import SIBLINGS as SIBLINGS
from normwise.facts.oversized import SIGMAS as SIGMAS
from normwise.facts.oversized import TIMES as TIMES
from normwise.facts.oversized import Driven, Oversized
from normwise.facts.repairs import effect
from normwise.rendering import both
from normwise.targets import Target

CODE = "PAR004"
SEVERITY = Severity.WARNING
READS_CHECKPOINTS = True
EXPLAINS = ("PLC010",)

ZH = """远大于同类的增益。

## 发现什么
在已训练的模型中，某个归一化的有效增益（各通道的均方根）远高于其他块中同一角色的归一化：超过 8 个稳健偏差，且超过其
中位数的 4 倍。从不单独判断大小：整个模型族的增益可以达到 10 以上。只有测得危害时才是警告：查询和键没有归一化的某个注意
力已饱和（PLC010），而把该增益换成同类的中位数后不再饱和。

## 为什么重要
值得知道：这样的增益独自决定一个分支或注意力 logits 的大小，半精度最先在此溢出，量化在此损失最多。它常常是健康的（首
末块、Gemma），所以本身只作提示；训练中的增长属于实时监控。

## 如何修复
查看损失或梯度是否在此处出现尖峰；为增益使用更低的学习率，或向 1 衰减（`1 + weight` 加权重衰减）可以抑制它。

## 来源
问题 61 和 64。https://github.com/huggingface/transformers/issues/45676（尖峰中被怀疑的增益与 logits）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report gains far above their siblings."""
    harm = facts.driven_attentions.values() if facts.oversized else ()
    for one in facts.oversized:
        yield _finding(one, [d for d in harm if d.by is one.gain])


def _finding(one: Oversized, harm: Sequence[Driven]) -> Finding:
    gain = one.gain
    worst = max(harm, key=lambda d: d.before, default=None)
    change = both("the gain at the median of its siblings", "把增益换成同类的中位数")
    en, zh = (f": logits sd {worst.before:.1f}", f"：logits 标准差 {worst.before:.1f}") if worst else ("", "")
    return Finding(
        path=gain.site.row.path,
        severity=SEVERITY if worst else Severity.INFO,
        basis=Basis.MEASURED,
        message=both(
            f"gain {gain.rms:.3g}, {one.times:.1f} times the median {one.median:.3g} of {one.siblings} siblings{en}",
            f"增益为 {gain.rms:.3g}，是 {one.siblings} 个同类的中位数 {one.median:.3g} 的 {one.times:.1f} 倍{zh}",
        ),
        evidence={
            "metric": "rms of the effective gain",
            "value": gain.rms,
            "median": one.median,
            "robust_deviations": one.sigmas,
            "siblings": one.siblings,
            "largest_channel": float(gain.effective.abs().max()),
        },
        counterfactual=effect(change, "logit_standard_deviation", worst.before, worst.after) if worst else None,
        fix=both(
            "Look whether loss or gradients spike there; a lower learning rate for gains holds it back.",
            "查看损失或梯度是否在此出现尖峰；为增益使用更低的学习率可以抑制它。",
        ),
    )


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(16), nn.Linear(16, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _target(largest: float) -> Target:
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(*[_Attention() for _ in range(6)], nn.RMSNorm(16), nn.Linear(16, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=random)
            parameter.copy_(1 + 0.05 * drawn if parameter.dim() == 1 else 0.15 * drawn * drawn.abs())
        model.get_parameter("2.norm.weight").mul_(largest)
    stored = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    return Target(model=model, args=(torch.randn(2, 8, 16, generator=random),), checkpoint=stored)


def bad() -> Target:
    """Return a loaded model in which one gain, thirty times as large as the others, saturates its attention."""
    return _target(30.0)


def good() -> Target:
    """Return the same model with gains of one size."""
    return _target(1.0)
