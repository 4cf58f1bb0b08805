"""Running statistics that still hold a part of their initial values.

## What it finds
Batch norms that have counted some batches, but so few that more than 5 % of the running statistics is still their
initial value: `(1 - momentum) ** num_batches_tracked`. Exact arithmetic on the buffers. Only worth knowing: the counter
does not say how the statistics were made (`update_bn` averages plainly, loads can be partial).

## Why it matters
With a momentum of 0.1 it takes 29 batches until 5 % of the initial mean 0 and variance 1 are left, with 0.01 it takes
299. An evaluation before that normalizes with a blend, and its metric says little about the weights.

## How to fix it
Train on, evaluate later, or average plainly: `momentum=None`, or `torch.optim.swa_utils.update_bn(loader, model)`.

## Sources
Question 11. https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html (the rule of the running average
and its momentum).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.facts import Facts
from normwise.facts.running import left_of_the_start, unfinished
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS005"
SEVERITY = Severity.INFO
EXPLAINS = ("BNS004",)

ZH = """运行统计量中仍含有初始值。

## 发现什么
已计数若干批次、但次数太少的批归一化：运行统计量中超过 5% 仍是初始值，即 `(1 - momentum) ** num_batches_tracked`。
对缓冲区的精确计算。仅作提示：计数并不说明统计量如何得来（`update_bn` 取普通平均，加载可能不完整）。

## 为什么重要
动量为 0.1 时要 29 个批次，初始均值 0 和方差 1 才只剩 5%；动量 0.01 时要 299 个。在此之前的评估用的是混合统计量，
其指标不能说明权重的好坏。

## 如何修复
继续训练、推迟评估，或取普通平均：`momentum=None`，或 `torch.optim.swa_utils.update_bn(loader, model)`。

## 来源
问题 11。https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html（滑动平均的规则及其动量）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms whose running statistics have not left their initial values."""
    found = [r for r in facts.running if unfinished(r)]
    if not found:
        return
    worst = max(found, key=lambda r: left_of_the_start(r) or 0.0)
    left, paths = left_of_the_start(worst) or 0.0, tuple(r.path for r in found)
    yield Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(found), 'batch norm')}: up to {left:.0%} of the running statistics is the initial value",
            f"{len(found)} 个批归一化：运行统计量中至多 {left:.0%} 仍是初始值",
        ),
        evidence={
            "metric": "share of the initial value",
            "value": left,
            "limit": 0.05,
            "norms": len(found),
            "num_batches_tracked": worst.counted,
            "momentum": worst.momentum,
        },
        fix=both(
            "Train on before evaluating, or average plainly: torch.optim.swa_utils.update_bn(loader, model).",
            "继续训练后再评估，或取普通平均：torch.optim.swa_utils.update_bn(loader, model)。",
        ),
    )


def _target(batches: int) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    x = torch.randn(8, 4)
    with torch.no_grad():
        for _ in range(batches):
            model(x)
    return Target(model=model.eval(), args=(x,))


def bad() -> Target:
    """Return a model that has seen three batches."""
    return _target(3)


def good() -> Target:
    """Return a model that has seen forty."""
    return _target(40)
