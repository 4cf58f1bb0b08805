"""A momentum of the other convention.

## What it finds
Norms in which the newest batch enters the running statistics with a weight between 0.5 and 1: read from torch's own
norms, measured on others, whatever their buffers are called, by an update or two. A warning where the model is in
training (train mode, an optimizer or a `train_step`); in eval mode the number does nothing and is only worth knowing. A
weight of exactly 1 ("use the last batch") is a decision and only worth knowing as well; plain averages
(`momentum=None`, or a share that falls from batch to batch) pass.

## Why it matters
torch writes `running = (1 - momentum) * running + momentum * batch`; TensorFlow, Keras and JAX libraries mean the
other factor, so their 0.99 is torch's 0.01. With the constant copied as it is, the running statistics are those of the
last batch alone: evaluation depends on which batch happened to be last, and its metric jumps from epoch to epoch.

## How to fix it
`momentum = 1 - momentum`: 0.01 for 0.99, 0.003 for 0.997. Look at eps as well, it was copied from the same place.

## Sources
Question 11. https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html (the note on momentum);
https://keras.io/api/layers/normalization_layers/batch_normalization/ (the other convention).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.facts import Facts
from normwise.rendering import both
from normwise.targets import Target, Weights

CODE = "BNS015"
SEVERITY = Severity.WARNING
EXPLAINS = ("BNS004",)

# From here on the newest batch outweighs all before it. Constants of the other convention are 0.9 to 0.9997,
# those of torch 0.1 to 0.0003.
HALF = 0.5

ZH = """动量取自相反的约定。

## 发现什么
最新批次以 0.5 到 1 之间的权重进入运行统计量的归一化：torch 自己的归一化直接读取，
其他的（无论缓冲区叫什么）以一两次更新测得。
模型正在训练（训练模式、给出优化器或 `train_step`）时为警告；评估模式下该数不起作用，仅作提示。
恰为 1 的权重（“只用最后一批”）是有意的选择，也仅作提示；普通平均（`momentum=None`）视为通过。

## 为什么重要
torch 的写法是 `running = (1 - momentum) * running + momentum * batch`；TensorFlow、Keras 和 JAX 的库指的是另一个系数，
它们的 0.99 就是 torch 的 0.01。原样照抄这个常数，运行统计量就只是最后一批的：评估取决于最后碰巧是哪一批，
指标在各轮之间跳动。

## 如何修复
`momentum = 1 - momentum`：0.99 对应 0.01，0.997 对应 0.003。同时检查 eps，它是从同一处抄来的。

## 来源
问题 11。https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html（关于 momentum 的说明）；
https://keras.io/api/layers/normalization_layers/batch_normalization/（相反的约定）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms whose running statistics are mostly those of the newest batch."""
    weights = {p: live.momentum for p, live in facts.live_norms.items() if live.updates and live.momentum is not None}
    weights |= {p: k.momentum for p, k in facts.keepers.items() if k.momentum is not None}
    copied = {p: m for p, m in weights.items() if HALF < m < 1}
    if copied:
        yield _finding(copied, SEVERITY if _in_training(facts) else Severity.INFO)
    last = {p: m for p, m in weights.items() if m >= 1}
    if last:
        yield _finding(last, Severity.INFO)


def _in_training(facts: Facts) -> bool:
    """Whether the user trains this model; one that was only built from a configuration is nobody's training."""
    target = facts.target
    if target.weights is not Weights.GIVEN:
        return False
    return target.model.training or target.optimizer is not None or target.train_step is not None


def _finding(found: dict[str, float], severity: Severity) -> Finding:
    paths, most = tuple(found), max(found.values())
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.PROOF,
        message=both(
            f"running statistics of {counted(len(paths), 'norm')} are {most:.2%} those of the last batch",
            f"{len(paths)} 个归一化的运行统计量有 {most:.2%} 来自最后一批",
        ),
        evidence={"metric": "weight of the newest batch", "value": most, "limit": HALF, "norms": len(paths)},
        fix=both(
            f"torch's momentum is the weight of the new batch: did you mean {max(1 - most, 0.0):.4g}?",
            f"torch 的 momentum 是新批次的权重：你想要的是 {max(1 - most, 0.0):.4g} 吗？",
        ),
    )


def _target(momentum: float) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=momentum), nn.ReLU(), nn.Linear(6, 2))
    return Target(model=model.train(), args=(torch.randn(64, 4),))


def bad() -> Target:
    """Return a model in training with the momentum of another framework."""
    return _target(0.99)


def good() -> Target:
    """Return the same model with torch's."""
    return _target(0.01)
