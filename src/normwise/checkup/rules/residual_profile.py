"""A jump of the residual stream between two neighbouring sublayers.

## What it finds
On the example inputs, a sublayer after which the root mean square of the stream is more than 8 times what it was one
sublayer before. The profile by depth is in every report; this names the writer of the jump. It is never more than worth
knowing: steady growth is part of many designs (14 times in Gemma, 65 times in OLMo-2), and trained models keep a few
very large channels on purpose.

## Why it matters
Behind a jump every later branch is small beside the stream, so that these blocks change little and get small gradients.
In float16 the jump is also where the range ends first.

## How to fix it
Look at what the named sublayer writes: the scale of its output matrix, a missing norm or residual scale, one channel.

## Sources
Questions 51 and 64. https://github.com/allenai/OLMo/issues/797 (growth by depth is expected); Sun et al. 2024, Massive
Activations, https://arxiv.org/abs/2402.17762.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.rules._examples import PreNormBlock
from normwise.errors import NotKnown
from normwise.facts import Facts, needs
from normwise.facts.records import ProfileRow, StackKind
from normwise.rendering import both
from normwise.rendering.cleaning import shorten
from normwise.targets import Target

ZH = """残差流在相邻两个子层之间跳变。

## 发现什么
在示例输入上，某个子层之后残差流的均方根超过前一子层的 8 倍。每份报告都有按深度的曲线，这里指出是谁写出了跳变。
最多只作提示：稳定的增长是许多设计的一部分（Gemma 14 倍，OLMo-2 65 倍），训练过的模型也会有意保留少数很大的通道。

## 为什么重要
跳变之后，每个分支相对残差流都很小，这些块改变不大、梯度也小。在 float16 中，范围也最先在这里用尽。

## 如何修复
检查该子层写出了什么：输出矩阵的尺度、缺少的归一化或残差缩放、某个通道。

## 来源
问题 51 和 64。https://github.com/allenai/OLMo/issues/797（随深度增长属预期）；
Sun 等 2024，Massive Activations，https://arxiv.org/abs/2402.17762。
"""

CODE = "PLC007"
SEVERITY = Severity.INFO

_LONGEST_PATH = 40  # characters, so that the message stays one line
# neighbours of healthy stacks differ by less than 3: even OLMo-2's 65 times come in steps
JUMP = 8.0


def check(facts: Facts) -> Iterator[Finding]:
    """Report the largest jump of each stack."""
    facts.placement  # noqa: B018 - without inputs nothing is known
    if not facts.target.weights.magnitudes_count:
        raise NotKnown(needs.TRAINED_WEIGHTS)
    if not facts.placement.stacks:
        return
    for index, stack in enumerate(facts.placement.stacks):
        rows = [r for r in facts.profile if r.stack == index and _positive(r.residual_rms)]
        if stack.kind is StackKind.POST:
            rows = rows[1:]  # the first add still has the embedding's scale
        jumps = [
            (b.residual_rms / a.residual_rms, a, b) for a, b in pairwise(rows) if a.residual_rms and b.residual_rms
        ]
        largest = max(jumps, key=lambda j: j[0], default=None)
        if largest is not None and largest[0] > JUMP:
            yield _finding(largest, rows)


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _finding(largest: tuple[float, ProfileRow, ProfileRow], rows: list[ProfileRow]) -> Finding:
    jump, before, after = largest
    where = shorten(after.path, _LONGEST_PATH)
    return Finding(
        path=after.path,
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"the stream grows {jump:.1f}x at once in {where or 'the model'}",
            f"残差流在 {where or '模型'} 处一次增长 {jump:.1f} 倍",
        ),
        evidence={
            "metric": "stream_rms_over_the_sublayer_before",
            "value": jump,
            "floor": JUMP,
            "rms_before": before.residual_rms,
            "rms_after": after.residual_rms,
            "branch_rms": after.branch_rms,
            "branch_gain": after.branch_gain,
            "sublayer": after.sublayer,
            "sublayers": len(rows),
        },
        fix=both(
            "Look at what this sublayer writes: the scale of its output matrix, a missing norm, or one channel.",
            "检查该子层写出了什么：输出矩阵的尺度、缺少的归一化，或某个通道。",
        ),
    )


def _target(*, factor: float) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(*(PreNormBlock() for _ in range(4)), nn.LayerNorm(8))
    with torch.no_grad():
        model[2].mlp.weight.mul_(factor)  # type: ignore[union-attr,operator]
    return Target(model=model, args=(torch.randn(2, 3, 8),))


def bad() -> Target:
    """Return a stack in which one sublayer writes a hundred times more."""
    return _target(factor=100.0)


def good() -> Target:
    """Return the same stack as drawn."""
    return _target(factor=1.0)
