"""Running statistics kept in half precision while the model is trained.

## What it finds
Batch norms in training whose running mean and variance are float16 or bfloat16. A warning where the model is in train
mode with an optimizer or a `train_step`, measured on a batch: the share of updates smaller than half the spacing of
the buffer's numbers, which are lost. Models that only infer may well hold half buffers.

## Why it matters
An update is `momentum * (batch - running)`. With momentum 0.1 and bfloat16, whose numbers are 0.4 to 0.8 % apart, a
running statistic stops 2 to 4 % short of its target, with momentum 0.01 it stops 20 to 40 % short. Nothing reports it;
evaluation is off by as much.

## How to fix it
Keep batch norms in float32: use autocast instead of `model.half()`, or convert them back after it. torch's batch norm
takes half inputs with float32 statistics.

## Sources
Question 41. https://docs.pytorch.org/docs/stable/amp.html (autocast keeps parameters and buffers in float32);
Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740 (updates that are too small for half precision).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.liveness import in_training
from normwise.facts.repairs import effect
from normwise.facts.running import RunningStatistics
from normwise.facts.watching import NormEvent
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS012"
SEVERITY = Severity.WARNING
READS_CHECKPOINTS = True
EXPLAINS = ("BNS003", "BNS004")

ZH = """训练时运行统计量以半精度保存。

## 发现什么
正在训练的批归一化，其运行均值和方差为 float16 或 bfloat16。若模型处于训练模式并给出优化器或 `train_step`，则为警告，
并在一批数据上测量：小于缓冲区数值间距一半、因而丢失的更新所占的比例。只做推理的模型可以保存半精度缓冲区。

## 为什么重要
一次更新是 `momentum * (batch - running)`。动量 0.1、bfloat16（相邻数值相差 0.4 到 0.8%）时，运行统计量在距目标 2 到 4%
处停住，动量 0.01 时是 20 到 40%。没有任何提示，评估就偏差这么多。

## 如何修复
让批归一化保持 float32：用 autocast 代替 `model.half()`，或在其后转换回来。
torch 的批归一化接受半精度输入和 float32 统计量。

## 来源
问题 41。https://docs.pytorch.org/docs/stable/amp.html（autocast 让参数和缓冲区保持 float32）；
Micikevicius 等 2018，https://arxiv.org/abs/1710.03740（对半精度来说太小的更新）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms in training with running statistics in half precision."""
    half = [r for r in facts.running if r.var.dtype in (torch.float16, torch.bfloat16)]
    if half and facts.target.stored is not None:
        yield _stored(half)
        return
    if not half or not facts.target.model.training:
        return
    live = set(in_training(facts))
    found = [r for r in half if r.path in live and facts.live_norms[r.path].updates]
    if not found:
        return
    sure = facts.target.optimizer is not None or facts.target.train_step is not None
    try:
        lost = _lost(facts, found)
    except NotKnown:
        lost = None
    yield _finding(found, lost, SEVERITY if sure and lost != 0 else Severity.INFO)


def _stored(found: list[RunningStatistics]) -> Finding:
    """Return the remark on a checkpoint: who trains on from it loses updates, who only evaluates does not."""
    paths, dtype = tuple(r.path for r in found), str(found[0].var.dtype).removeprefix("torch.")
    return Finding(
        paths=paths,
        severity=Severity.INFO,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'norm')} store running statistics in {dtype}",
            f"{len(paths)} 个归一化以 {dtype} 存储运行统计量",
        ),
        evidence={"norms": len(paths), "dtype": dtype, "relative_spacing": torch.finfo(found[0].var.dtype).eps},
        fix=both(
            "Cast these buffers to float32 before training on; for evaluation nothing has to change.",
            "继续训练前把这些缓冲区转为 float32；仅作评估则无需改动。",
        ),
    )


def _lost(facts: Facts, found: list[RunningStatistics]) -> float | None:
    """Return the share of the means' updates on one batch that change nothing, without gradients or dropout."""
    momenta = {r.path: r.momentum for r in found if r.momentum}
    events = [e for e in facts.on_data.live.norms if e.path in momenta and e.batch is not None]
    shares = [_lost_by(e, momenta[e.path]) for e in events]
    return sum(shares) / len(shares) if shares else None


def _lost_by(event: NormEvent, momentum: float) -> float:
    running = event.before["running_mean"]
    assert event.batch is not None
    target = event.batch.mean
    wanted = running.double() + momentum * (target - running.double())
    # those that are at their target already lose nothing
    moving = (target - running.double()).abs() > 1e-3 * (target.abs() + 1e-12)
    lost = (wanted.to(running.dtype) == running) & moving
    return float(lost.double().mean())


def _finding(found: list[RunningStatistics], lost: float | None, severity: Severity) -> Finding:
    paths, dtype = tuple(r.path for r in found), str(found[0].var.dtype).removeprefix("torch.")
    change = both("running statistics in float32", "运行统计量用 float32")
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'norm')} in training keep running statistics in {dtype}",
            f"{len(paths)} 个正在训练的归一化以 {dtype} 保存运行统计量",
        ),
        evidence={
            "metric": _METRIC,
            "value": lost,
            "norms": len(paths),
            "dtype": dtype,
            "relative_spacing": torch.finfo(found[0].var.dtype).eps,
            "momentum": found[0].momentum,
        },
        counterfactual=effect(change, _METRIC, lost, 0.0) if lost else None,
        fix=both(
            "Keep batch norms in float32: autocast instead of model.half(), or norm.float() after it.",
            "让批归一化保持 float32：用 autocast 代替 model.half()，或在其后调用 norm.float()。",
        ),
    )


_METRIC = "share of the running means' updates on one batch that rounding loses"


def _target(*, half: bool) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Linear(32, 2))
    x = torch.randn(64, 4) + 2
    with torch.no_grad():
        for _ in range(60):
            model(x)
    model = model.bfloat16()
    if not half:
        model[1].float()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Target(model=model.train(), args=(x.bfloat16(),), optimizer=optimizer)


def bad() -> Target:
    """Return a model in bfloat16, its running statistics included."""
    return _target(half=True)


def good() -> Target:
    """Return the same model with its batch norm in float32."""
    return _target(half=False)
