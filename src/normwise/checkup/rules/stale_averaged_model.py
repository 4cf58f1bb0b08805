"""An averaged model whose running statistics belong to other weights.

## What it finds
Given `online`, the model whose weights were averaged into this one: batch norms that counted no batch although the
online model's did (an error, exact), and batch norms whose running statistics are not those of the data while the
online model's are, on the same batch of at least 8 samples, where the output moves by more than a tenth (a warning).
Averages that copy or average the buffers, or whose statistics were estimated again, pass.

## Why it matters
Averaging takes `parameters()`, and running statistics are buffers. The averaged weights then meet the statistics of the
copy made at the start or of the last online weights: training looks healthy, the averaged model performs poorly.

## How to fix it
`torch.optim.swa_utils.update_bn(loader, averaged)` before evaluating or saving; for an exponential average
`AveragedModel(model, use_buffers=True)` or copying the buffers at every update.

## Sources
Question 11. https://github.com/mosaicml/composer/issues/624 (an averaged model that performed very poorly);
https://docs.pytorch.org/docs/stable/optim.html (update_bn); Izmailov et al. 2018, https://arxiv.org/abs/1803.05407.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.gaps import SAMPLES, Measurement, gaps, measure, output_shift, recalibrated
from normwise.facts.liveness import Scope
from normwise.facts.repairs import effect
from normwise.facts.running import RunningStatistics, read
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS013"
SEVERITY = Severity.ERROR
EXPLAINS = ("BNS003", "BNS004")

# as for any gap between running statistics and data
SHIFT = 0.1

ZH = """平均模型的运行统计量属于别的权重。

## 发现什么
给出 `online`（其权重被平均到本模型的那个模型）时：在线模型已计数、而本模型从未计数的批归一化（错误，精确）；
以及在同一个至少 8 个样本的批次上，在线模型的运行统计量与数据相符而本模型的不相符、
且输出移动超过十分之一的批归一化（警告）。
复制或平均了缓冲区、或重新估计了统计量的平均模型视为通过。

## 为什么重要
平均的是 `parameters()`，而运行统计量是缓冲区。于是平均后的权重遇到的是起始副本或最后一次在线权重的统计量：
训练看起来正常，平均模型却很差。

## 如何修复
评估或保存之前运行 `torch.optim.swa_utils.update_bn(loader, averaged)`；指数平均可用
`AveragedModel(model, use_buffers=True)`，或每次更新时复制缓冲区。

## 来源
问题 11。https://github.com/mosaicml/composer/issues/624（表现很差的平均模型）；
https://docs.pytorch.org/docs/stable/optim.html（update_bn）；Izmailov 等 2018，https://arxiv.org/abs/1803.05407。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report batch norms of an averaged model whose statistics are not those of its weights."""
    online = facts.target.online
    if online is None:
        raise NotKnown(both("needs the model that was averaged: pass online=...", "需要被平均的模型：传入 online=..."))
    own = {r.path: r for r in facts.running if not r.var.is_meta and _over_the_batch(facts, r.path)}
    theirs = {r.path: r for r in read(online)}
    pairs = [(r, t) for p, r in own.items() if (t := _counterpart(p, theirs)) is not None]
    if own and not pairs:
        raise NotKnown(both("online has no norms of the same paths", "online 中没有路径相同的归一化"))
    never = [r for r, t in pairs if r.counted == 0 and t.counted]
    if never:
        yield _finding(facts, never, SEVERITY)
    elif pairs:
        yield from _measured(facts, [r for r, _ in pairs])


def _over_the_batch(facts: Facts, path: str) -> bool:
    return path in facts.live_norms and facts.live_norms[path].scope is Scope.BATCH


def _counterpart(path: str, theirs: dict[str, RunningStatistics]) -> RunningStatistics | None:
    """Find the norm of the online model: an averaged one holds the model as a child (``module.``), or is its copy."""
    return theirs.get(path) or theirs.get(path.partition(".")[2])


def _measured(facts: Facts, norms: list[RunningStatistics]) -> Iterator[Finding]:
    data = measure(facts, given=True)
    if data.samples < SAMPLES:
        raise NotKnown(both(f"needs a batch of at least {SAMPLES} samples", f"需要至少 {SAMPLES} 个样本的批次"))
    off = {g.path for g in gaps(facts, data.live)}
    shift = output_shift(data.still, data.live)
    if not off or shift is None or shift <= SHIFT:
        return
    off -= _off_online(facts, norms)
    found = [r for r in norms if r.path in off]
    if found:
        yield _finding(facts, found, Severity.WARNING, data, shift)


def _off_online(facts: Facts, norms: list[RunningStatistics]) -> set[str]:
    """Return the norms whose counterparts in the online model are off as well: then it is the data that differs."""
    assert facts.target.online is not None
    trial = measure(facts, model=facts.target.online, given=True).live
    off = {g.path for g in gaps(facts, trial, everywhere=True)}
    return {r.path for r in norms if r.path in off or r.path.partition(".")[2] in off}


def _finding(
    facts: Facts,
    found: list[RunningStatistics],
    severity: Severity,
    data: Measurement | None = None,
    shift: float | None = None,
) -> Finding:
    paths = tuple(r.path for r in found)
    norms = counted(len(paths), "norm")
    if severity is SEVERITY:
        data, shift = _on_the_example(facts)
        message = both(
            f"averaged model: {norms} counted no batch, the online model's did",
            f"平均模型：{len(paths)} 个归一化从未统计过批次，而在线模型的统计过",
        )
    else:
        message = both(
            f"averaged model: statistics of {norms} are not its activations'; the output moves {shift or 0:.0%}",
            f"平均模型：{len(paths)} 个归一化的统计量与其激活不符；输出移动 {shift or 0:.0%}",
        )
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.PROOF if severity is SEVERITY else Basis.MEASURED,
        message=message,
        evidence={
            "metric": _METRIC,
            "value": shift,
            "limit": SHIFT,
            "norms": len(paths),
            "num_batches_tracked": found[0].counted,
            "samples": None if data is None else data.samples,
        },
        counterfactual=_recalibrated(facts, data, shift) if data is not None and shift else None,
        fix=both(
            "Estimate them on training data: torch.optim.swa_utils.update_bn(loader, averaged_model).",
            "在训练数据上重新估计：torch.optim.swa_utils.update_bn(loader, averaged_model)。",
        ),
    )


_METRIC = "relative difference of the output between statistics of the data and running ones"


def _on_the_example(facts: Facts) -> tuple[Measurement | None, float | None]:
    try:
        data = measure(facts, given=True)
    except NotKnown:
        return None, None
    return data, output_shift(data.still, data.live)


def _recalibrated(facts: Facts, data: Measurement, before: float) -> dict[str, Any] | None:
    try:
        trial = facts.trials.forward(prepare=recalibrated(data.live), repair=True)
    except NotKnown:
        return None
    after = output_shift(trial, data.live)
    change = both("running statistics re-estimated on this batch", "在这一批上重新估计运行统计量")
    return None if after is None else effect(change, _METRIC, before, after)


def _target(*, updated: bool) -> Target:
    torch.manual_seed(0)
    online = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    averaged = copy.deepcopy(online)
    x = torch.randn(128, 4) * 3 + 2
    with torch.no_grad():
        for model in (online, averaged) if updated else (online,):
            for _ in range(40):
                model(x)
        averaged[0].get_parameter("weight").mul_(1.01)
    return Target(model=averaged.eval(), args=(x,), online=online.eval())


def bad() -> Target:
    """Return an averaged model whose statistics are still those of the copy."""
    return _target(updated=False)


def good() -> Target:
    """Return the same averaged model with statistics of its own."""
    return _target(updated=True)
