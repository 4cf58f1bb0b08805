"""A gain far larger than those of its siblings.

## What it finds
In a trained model, a norm whose effective gain (root mean square over channels) stands far above the norms of the same
role in the other blocks: more than 8 robust deviations and more than 4 times their median. Sizes are never judged by
themselves: whole families have gains of 10 and more.

## Why it matters
It is worth knowing: such a gain sets the size of a branch or of the attention logits alone, is where half precision
overflows first and where quantisation loses most. It is often healthy (first and last blocks, Gemma), so it is never
more than information; growth while training is a matter for a live watch.

## How to fix it
Look whether the loss or the gradients spike where it stands; a lower learning rate for gains, or decay toward 1
(`1 + weight` with weight decay), holds it back.

## Sources
Questions 61 and 64. https://github.com/huggingface/transformers/issues/45676 (gains and logits suspected in a spike).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.facts import Facts
from normwise.facts.gains import Gain
from normwise.rendering import both
from normwise.spec import Kind
from normwise.targets import Target

CODE = "PAR004"
SEVERITY = Severity.INFO

SIBLINGS = 5  # fewer have no distribution
SIGMAS = 8.0
TIMES = 4.0
# The median deviation of equal gains is 0; 5 % of difference is not worth a deviation (in logarithms).
LEAST = 0.05
TO_SIGMA = 1.4826  # from the median absolute deviation of a normal distribution to its deviation

ZH = """远大于同类的增益。

## 发现什么
在已训练的模型中，某个归一化的有效增益（各通道的均方根）远高于其他块中同一角色的归一化：超过 8 个稳健偏差，且超过其
中位数的4 倍。从不单独判断大小：整个家族的增益可以达到 10 以上。

## 为什么重要
值得知道：这样的增益独自决定一个分支或注意力 logits 的大小，半精度最先在此溢出，量化在此损失最多。它常常是健康的（首
末块、Gemma），所以只作提示；训练中的增长属于实时监控。

## 如何修复
查看损失或梯度是否在此处出现尖峰；为增益使用更低的学习率，或向 1 衰减（`1 + weight` 加权重衰减）可以抑制它。

## 来源
问题 61 和 64。https://github.com/huggingface/transformers/issues/45676（尖峰中被怀疑的增益与 logits）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report gains far above their siblings."""
    if facts.gains.trained is False and not facts.gains.loaded:
        return
    roles: dict[Hashable, list[Gain]] = defaultdict(list)
    for gain in facts.gains.of(Kind.LAYER, Kind.RMS):
        if gain.rms > 0:
            roles[gain.role].append(gain)
    for gains in roles.values():
        if len(gains) >= SIBLINGS:
            yield from _far_above(gains)


def _far_above(gains: list[Gain]) -> Iterator[Finding]:
    logs = [math.log(g.rms) for g in gains]
    middle = statistics.median(logs)
    deviation = max(LEAST, TO_SIGMA * statistics.median(abs(size - middle) for size in logs))
    for gain, size in zip(gains, logs, strict=True):
        times, sigmas = math.exp(size - middle), (size - middle) / deviation
        if times > TIMES and sigmas > SIGMAS:
            yield _finding(gain, len(gains) - 1, math.exp(middle), times, sigmas)


def _finding(gain: Gain, siblings: int, median: float, times: float, sigmas: float) -> Finding:
    return Finding(
        path=gain.site.row.path,
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"gain {gain.rms:.3g}, {times:.1f} times the median {median:.3g} of {siblings} siblings",
            f"增益为 {gain.rms:.3g}，是 {siblings} 个同类的中位数 {median:.3g} 的 {times:.1f} 倍",
        ),
        evidence={
            "metric": "rms of the effective gain",
            "value": gain.rms,
            "median": median,
            "robust_deviations": sigmas,
            "siblings": siblings,
            "largest_channel": float(gain.effective.abs().max()),
        },
        fix=both(
            "Look whether loss or gradients spike there; a lower learning rate for gains holds it back.",
            "查看损失或梯度是否在此出现尖峰；为增益使用更低的学习率可以抑制它。",
        ),
    )


def _target(largest: float) -> Target:
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.LayerNorm(8))])
    for index, layer in enumerate(model):
        if isinstance(layer, nn.LayerNorm):
            drawn = 1 + 0.05 * torch.randn(8, generator=random)
            layer.load_state_dict({"weight": drawn * (largest if index == 5 else 1.0), "bias": torch.zeros(8)})
    stored = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    return Target(model=model, args=(torch.randn(3, 8, generator=random),), checkpoint=stored)


def bad() -> Target:
    """Return a loaded model with one gain twenty times as large as the others."""
    return _target(20.0)


def good() -> Target:
    """Return the same model with gains of one size."""
    return _target(1.0)
