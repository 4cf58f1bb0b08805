"""Batch statistics made of very few values.

## What it finds
Batch norms that are trained with fewer than 32 values a channel (batch times space), counted on the batches of your
loader; below 8 it is a warning. The example inputs of a `train_step` only inform, since examples are often small.
Synchronized batch norms are left out, their batch is larger than what one process sees.

Batches of one sample count as well, however large the image: each was trained with its own statistics. By itself that
is worth knowing (style transfer wants it so); a warning where the loss of 8 samples, each alone, is less than half with
their own statistics of what it is with the running ones (`eval_fn`, or a model that returns its loss).

## Why it matters
The variance of n values is known to sqrt(2/n) of itself: 70 % at 4 values, 35 % at 16, 25 % at 32. That noise is in
every activation of the training, and no batch was normalized with the running variance: train and eval mode disagree.
Accumulating gradients does not help, the statistics remain those of the small batch.

## How to fix it
Larger batches, SyncBatchNorm over several devices, or a norm whose statistics do not depend on the batch (GroupNorm).

## Sources
Questions 12 and 16. Wu and He 2018, https://arxiv.org/abs/1803.08494 (error against batch size, group norm);
Ioffe 2017, https://arxiv.org/abs/1702.03275.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.batch_sizes import values_per_channel
from normwise.facts.gaps import still
from normwise.facts.liveness import Scope, in_training
from normwise.facts.losses import Losses, clearly_lower
from normwise.facts.repairs import effect
from normwise.facts.runs import statistics_live
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS006"
SEVERITY = Severity.WARNING
EXPLAINS = ("BNS004",)

# sqrt(2/n) of a variance: half of it at 8 values, a quarter at 32
FEW, SOME = 8, 32
SAMPLES = 8  # whose losses are compared one by one: as many as the comparison asks for
TIMES = 2.0  # by which the loss falls: running statistics that lag behind the weights cost a third of it (measured)

ZH = """批统计量由极少的数值构成。

## 发现什么
训练时每通道不足 32 个数值（批大小乘空间大小）的批归一化，按你的 loader 的批次计数；不足 8 个时为警告。
`train_step` 的示例输入只作提示，因为示例往往很小。同步批归一化不在此列，它的批次大于单个进程所见。

每批一个样本也算，无论图像多大：训练时各样本用的是自己的统计量。单凭这一点只作提示（风格迁移有意如此）；若 8 个样本逐个
计算时，用各自统计量的损失不到用运行统计量的一半（`eval_fn`，或返回损失的模型），则为警告。

## 为什么重要
n 个数值的方差只能精确到其自身的 sqrt(2/n)：4 个时 70%，16 个时 35%，32 个时 25%。这一噪声在训练时乘到每个激活上，
而运行方差也不是任何一个批次实际所用的：训练与评估模式不一致。梯度累积无济于事，统计量仍是小批次的。

## 如何修复
更大的批次、跨设备的 SyncBatchNorm，或统计量不依赖批次的归一化（GroupNorm）。

## 来源
问题 12 和 16。Wu 和 He 2018，https://arxiv.org/abs/1803.08494（误差与批大小，组归一化）；
Ioffe 2017，https://arxiv.org/abs/1702.03275。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report batch norms with few values under each statistic."""
    norms = [p for p in in_training(facts, Scope.BATCH) if not _synchronized(facts, p)]
    if not norms:
        return
    if facts.target.loader is not None:
        batch = facts.batches.usual
    elif facts.target.train_step is not None:
        batch = None
    else:
        raise NotKnown(both("needs the batches of training: pass loader=...", "需要训练的批次：传入 loader=..."))
    trained = facts.target.model.training or facts.target.train_step is not None
    every = {p: n for p, n in values_per_channel(facts, batch).items() if p in norms and n > 1}
    numbers = {p: n for p, n in every.items() if n < SOME}
    if numbers:
        sure = batch is not None and trained
        yield _finding(numbers, batch, SEVERITY if sure and min(numbers.values()) < FEW else Severity.INFO)
    large = tuple(p for p in every if p not in numbers)
    if batch == 1 and large:
        yield from _one_by_one(facts, large, trained=trained)


def _synchronized(facts: Facts, path: str) -> bool:
    return isinstance(facts.target.model.get_submodule(path), nn.SyncBatchNorm)


def _finding(numbers: dict[str, int], batch: int | None, severity: Severity) -> Finding:
    paths = tuple(sorted(numbers, key=lambda p: numbers[p]))
    fewest = numbers[paths[0]]
    noise = math.sqrt(2 / fewest)
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'batch norm')} on {fewest} or more values a channel: variance known to {noise:.0%}",
            f"{len(paths)} 个批归一化每通道最少只有 {fewest} 个数值：方差只精确到 {noise:.0%}",
        ),
        evidence={
            "metric": "values of one channel under one statistic",
            "value": fewest,
            "limit": FEW,
            "noise_of_the_variance": noise,
            "batch": batch,
            "norms": len(paths),
        },
        fix=both(
            "Use larger batches, SyncBatchNorm over devices, or GroupNorm, whose statistics ignore the batch.",
            "使用更大的批次、跨设备的 SyncBatchNorm，或统计量与批次无关的 GroupNorm。",
        ),
    )


def _one_by_one(facts: Facts, paths: tuple[str, ...], *, trained: bool) -> Iterator[Finding]:
    """Report norms that saw one sample at a time, if they were trained so or the loss shows it."""
    try:
        losses = _losses(facts)
    except NotKnown:
        losses = None
    if losses is None and not trained:
        return  # an evaluation one by one is no fault
    metric = "loss of single samples with the running statistics"
    counts = {"norms": len(paths), "batch": 1}
    change = both("each sample's own statistics, as in training", "与训练时一样用各样本自己的统计量")
    en = f": loss {losses[0]:.3g}, with its own statistics {losses[1]:.3g}" if losses else ""
    zh = f"：损失 {losses[0]:.3g}，用自己的统计量为 {losses[1]:.3g}" if losses else ""
    yield Finding(
        paths=paths,
        severity=SEVERITY if losses else Severity.INFO,
        basis=Basis.MEASURED if losses else Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'batch norm')} on one sample a batch{en}",
            f"{len(paths)} 个批归一化每批只有一个样本{zh}",
        ),
        evidence={"metric": metric, "value": losses[0], **counts} if losses else counts,
        counterfactual=effect(change, metric, *losses) if losses else None,
        fix=both(
            "Train with larger batches, or with GroupNorm or InstanceNorm, which do the same in both modes.",
            "用更大的批次训练，或改用两种模式下相同的 GroupNorm 或 InstanceNorm。",
        ),
    )


def _losses(facts: Facts) -> tuple[float, float] | None:
    """Return the loss of single samples with the running statistics, and the one with their own if clearly lower.

    Raises:
        NotKnown: no loss can be had, or no samples from all over the data.
    """
    mixed = facts.batches.mixed
    if mixed is None:
        return None
    rows = tuple(a[:SAMPLES] if isinstance(a, torch.Tensor) and a.dim() else a for a in mixed)
    target = dataclasses.replace(facts.target, args=rows, kwargs={}, loader=None)
    measured = Losses(type(facts)(target, "full"))
    facts.spend(forward=2)
    running, own = measured.of(), measured.of(_own_statistics)
    before, after = sum(running) / len(running), sum(own) / len(own)
    if TIMES * after > before or not clearly_lower(own, running) or measured.is_score(still, own):
        return None
    return before, after


def _own_statistics(model: nn.Module) -> None:
    still(model)
    statistics_live(model)


def _target(batch: int) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    return Target(model=model, args=(torch.randn(64, 4),), loader=[(torch.randn(batch, 4),) for _ in range(3)])


def bad() -> Target:
    """Return a model trained on batches of four."""
    return _target(4)


def good() -> Target:
    """Return the same model trained on batches of 64."""
    return _target(64)
