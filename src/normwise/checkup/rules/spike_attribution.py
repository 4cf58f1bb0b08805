"""A batch of the loader that drives a norm's input far beyond the others: where it starts.

## What it finds
The first batches of `loader=` and the example inputs are run, and the size of every norm's input is compared. Where one
batch moves it 8 times beyond the others, the first norm in the order of execution is named: what stands before it made
the spike. Only worth knowing; following a spike through a live run belongs to a watch of the training.

## Why it matters
Loss and gradient spikes are usually seen at the end of the model. The norm that first met the large input tells whether
the data, the embedding or a block made it; the norms after it hide the size.

## How to fix it
Look at the named batch: raw features of another scale, a corrupt sample, a token that is rarely trained. Normalize or
clip it there.

## Sources
Question 61. Takase et al. 2023, Spike No More, https://arxiv.org/abs/2312.16903.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NormwiseError, NotKnown
from normwise.facts import Facts, needs
from normwise.facts.rewiring import rms
from normwise.rendering import both
from normwise.targets import Target

ZH = """数据加载器的某个批次使归一化的输入远超其他批次：从哪里开始。

## 发现什么
运行 `loader=` 的前几个批次和示例输入，比较每个归一化输入的大小。若某个批次超过其他批次 8 倍，
则指出执行顺序中的第一个归一化：尖峰由它之前的部分产生。只作提示；在训练中跟踪尖峰属于训练监视。

## 为什么重要
损失和梯度的尖峰通常在模型末端才被看到。最先遇到大输入的归一化说明是数据、嵌入还是某个块造成的；之后的归一化会掩盖大小。

## 如何修复
检查该批次：尺度不同的原始特征、损坏的样本、很少训练到的词元。在那里归一化或截断。

## 来源
问题 61。Takase 等 2023，Spike No More，https://arxiv.org/abs/2312.16903。
"""

CODE = "DYN003"
SEVERITY = Severity.INFO

SPIKE = 8.0


def check(facts: Facts) -> Iterator[Finding]:
    """Name the first norm at which one batch of the loader leaves the others behind."""
    if facts.target.loader is None:
        raise NotKnown(needs.LOADER)
    calls = facts.norm_calls.norms
    if not facts.target.weights.magnitudes_count:
        raise NotKnown(needs.USED_WEIGHTS)
    if not calls:
        return
    sizes = [_sizes(facts, None)]
    for batch in facts.batches.arguments:
        sizes.append(_sizes(facts, batch))
    everywhere = [call for call in calls if all(call.input in s for s in sizes)]
    if not everywhere:
        raise NotKnown(_NOTHING_SHARED)
    for call in everywhere:
        known = [s[call.input] for s in sizes]
        top = max(range(len(known)), key=lambda i: known[i])
        others = max(k for i, k in enumerate(known) if i != top)
        if others > 0 and known[top] > SPIKE * others:
            yield _finding(facts.graph.calls[call.call].path, top, known[top], others)
            return


_NOTHING_SHARED = both(
    "no norm's input was finite, and kept, in the example and every batch of the loader",
    "没有一个归一化的输入在示例和 loader 的每个批次中都为有限值并得到保留",
)


def _sizes(facts: Facts, batch: tuple[object, ...] | None) -> dict[int, float]:
    inputs = [c.input for c in facts.norm_calls.norms]
    try:
        run = facts.runs.base if batch is None else facts.runs.variant(batch, wanted=inputs)
    except NotKnown:
        raise
    except NormwiseError as error:
        raise NotKnown(both("a batch of the loader does not run by itself", "loader 的批次无法单独运行")) from error
    found = {}
    for value in inputs:
        try:
            size = rms(run.like(value))
        except NotKnown:
            continue
        if math.isfinite(size):
            found[value] = size
    return found


def _finding(path: str, top: int, size: float, others: float) -> Finding:
    where, where_zh = ("the example", "示例输入") if top == 0 else (f"batch {top}", f"第 {top} 个批次")
    shown = path[-40:] or "the model"
    return Finding(
        path=path,
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"{where} drives the input of {shown} to {size:.3g}, {size / others:.1f}x the other batches",
            f"{where_zh}使 {shown} 的输入达到 {size:.3g}，是其他批次的 {size / others:.1f} 倍",
        ),
        evidence={
            "metric": "norm_input_rms",
            "value": size,
            "floor": SPIKE * others,
            "batch": top,
            "largest_of_the_others": others,
        },
        fix=both(
            "Look at this batch before the named norm: another scale, a corrupt sample or a rare token.",
            "检查该批次在该归一化之前的部分：不同的尺度、损坏的样本或罕见的词元。",
        ),
    )


def _target(*, factor: float) -> Target:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    batches = [(torch.randn(4, 6, generator=generator),) for _ in range(2)]
    batches[1] = (batches[1][0] * factor,)
    return Target(model=model, args=(torch.randn(4, 6, generator=generator),), loader=batches)


def bad() -> Target:
    """Return a model with a loader whose second batch is a hundred times larger."""
    return _target(factor=100.0)


def good() -> Target:
    """Return the same with batches of one size."""
    return _target(factor=1.0)
