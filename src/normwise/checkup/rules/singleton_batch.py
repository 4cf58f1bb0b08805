"""A last batch that leaves one value a channel.

## What it finds
A loader whose last batch is so small that a batch norm in training sees a single value of each channel, computed from
the lengths of the data set and its batches where they are known. The norm itself is then run on such an input: it
raises, or stores a variance that is not finite. Norms over images are spared: one sample still has many values.

## Why it matters
The variance of one value is undefined. torch's batch norm raises "Expected more than 1 value per channel" at the end of
the first epoch, hours into a run; others store NaN in the running variance, and only evaluation shows it.

## How to fix it
`DataLoader(..., drop_last=True)`, another batch size, or a norm whose statistics do not depend on the batch.

## Sources
Question 12. https://github.com/fastai/fastai/issues/1352 (the last batch of an epoch held one sample);
https://github.com/pytorch/pytorch/issues/4534; https://github.com/facebookresearch/SparseConvNet/issues/190 (NaN).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.batch_sizes import values_per_channel
from normwise.facts.liveness import Scope, in_training
from normwise.facts.repairs import effect
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS016"
SEVERITY = Severity.WARNING

ZH = """最后一个批次使每通道只剩一个数值。

## 发现什么
loader 的最后一批小到使训练中的批归一化每通道只看到一个数值；在长度已知时由数据集和批次的长度算出。
随后用这样的输入单独运行该归一化：它抛出异常，或存下非有限的方差。图像上的归一化不受影响：一个样本仍有许多数值。

## 为什么重要
一个数值的方差没有定义。torch 的批归一化会在第一轮结束时抛出 “Expected more than 1 value per channel”，
此时可能已运行数小时；其他实现则把 NaN 存进运行方差，直到评估才显现。

## 如何修复
`DataLoader(..., drop_last=True)`、换一个批大小，或改用统计量不依赖批次的归一化。

## 来源
问题 12。https://github.com/fastai/fastai/issues/1352（一轮的最后一批只有一个样本）；
https://github.com/pytorch/pytorch/issues/4534；https://github.com/facebookresearch/SparseConvNet/issues/190（NaN）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report batch norms that the loader's last batch leaves with one value a channel."""
    # a synchronized norm joins the batches of several processes
    model = facts.target.model
    norms = [p for p in in_training(facts, Scope.BATCH) if not isinstance(model.get_submodule(p), nn.SyncBatchNorm)]
    if not norms:
        return
    batches = facts.batches
    if batches.last is None:
        raise NotKnown(
            both("the end of the loader is not known: give it a length", "不知道 loader 何时结束：请给它长度")
        )
    numbers = values_per_channel(facts, batches.last)
    single = {p: _outcome(model.get_submodule(p)) for p in norms if numbers.get(p) == 1}
    found = {p: outcome for p, outcome in single.items() if outcome is not None}
    if found:
        trained = model.training or facts.target.train_step is not None
        yield _finding(facts, found, SEVERITY if trained else Severity.INFO)


def _outcome(norm: nn.Module) -> str | None:
    """Return what a norm does with one value a channel in train mode; None where it takes it."""
    alone = copy.deepcopy(norm).train()
    var = alone.get_buffer("running_var")
    try:
        with torch.no_grad():
            out = alone(torch.randn(1, len(var), generator=torch.Generator().manual_seed(0)).to(var))
    except Exception as error:  # what it raises is the finding
        return f"{type(error).__name__}: {error}"[:80]
    after = alone.get_buffer("running_var")
    return None if bool(after.isfinite().all()) and bool(out.isfinite().all()) else "running_var is not finite"


def _finding(facts: Facts, found: dict[str, str], severity: Severity) -> Finding:
    batches, paths = facts.batches, tuple(found)
    change = both("drop_last=True: the last batch is left out", "drop_last=True：丢弃最后一批")
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.PROOF,
        message=both(
            f"the last batch has size {batches.last}: {counted(len(paths), 'batch norm')} get one value a channel",
            f"最后一批大小为 {batches.last}：{len(paths)} 个批归一化每通道只得到一个数值",
        ),
        evidence={
            "metric": "values of one channel in the smallest batch",
            "value": 1,
            "limit": 2,
            "last_batch": batches.last,
            "batch": batches.usual,
            "norms": len(paths),
            "outcome": found[paths[0]],
        },
        counterfactual=effect(
            change,
            "values of one channel in the smallest batch",
            1,
            values_per_channel(facts, batches.usual).get(paths[0], batches.usual),
        ),
        fix=both(
            "Pass drop_last=True to the training loader, or use another batch size.",
            "给训练用的 loader 传 drop_last=True，或换一个批大小。",
        ),
    )


def _target(*, drop_last: bool) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    loader = DataLoader(TensorDataset(torch.randn(65, 4)), batch_size=32, drop_last=drop_last)
    return Target(model=model.train(), args=(torch.randn(32, 4),), loader=loader)


def bad() -> Target:
    """Return a model and a loader of 65 samples in batches of 32."""
    return _target(drop_last=False)


def good() -> Target:
    """Return the same with the last batch left out."""
    return _target(drop_last=True)
