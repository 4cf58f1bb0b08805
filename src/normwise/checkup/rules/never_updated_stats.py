"""A trained batch norm whose running statistics are still those of the first moment.

## What it finds
A batch norm that has counted no batch, with a running mean of exactly 0 and a running variance of exactly 1, although
its shift has moved: the layer was trained or loaded, its statistics were not. Fresh models, where gain and
shift are untouched as well, and norms without a counter (folded or frozen ones) are no fault; nor are shifts that an
init function drew: gains around 0 with both signs (PAR003 is the cause), or weights that are all as drawn beside gains
that are one number. Given `online`, an averaged copy is judged by BNS013.

## Why it matters
In evaluation such a norm does not normalize: it takes any input for standard normal. The activations keep whatever
scale they have, and train and eval mode disagree. Typical ways there: only `parameters()` were saved, averaged or
exchanged (buffers are none), a load with `strict=False`, or a norm that always ran in eval mode while it was trained.

## How to fix it
Load the buffers with the weights (`state_dict()` holds both), or estimate them: run some training batches in train mode
without an optimizer step (`torch.optim.swa_utils.update_bn(loader, model)`).

## Sources
Questions 10, 11 and 39. https://docs.pytorch.org/docs/stable/optim.html (update_bn, and why averaged models need it);
Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, section 3.1 (inference with population statistics).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.freshness import around_zero
from normwise.facts.gains import rms
from normwise.facts.running import NO_NUMBERS, RunningStatistics, read
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS003"
SEVERITY = Severity.ERROR
READS_CHECKPOINTS = True
EXPLAINS = ("BNS004",)

# Of the size of drawn gains: the rms of 2 draws exceeds three deviations in 1 of 8000, and trained gains are near 1.
ALIKE = 3.0
# No few steps, after which matrices still look drawn, take a gain from 1 down here.
SMALL = 0.1

ZH = """训练过的批归一化，其运行统计量仍是最初的值。

## 发现什么
从未计数任何批次、运行均值恰为 0 且运行方差恰为 1，而偏移却已改变的批归一化：该层被训练或加载过，其统计量没有。
增益和偏移都未动过的新模型，以及没有计数器的归一化（已折叠或冻结的）不算错误；由初始化函数抽取的偏移也不算：增益以 0
为中心、正负都有（原因是 PAR003）或与之大小相同，或所有权重都如刚抽取而增益极小或为同一个数。
给出 `online` 时，平均副本由 BNS013 判断。

## 为什么重要
评估时这样的归一化并不做归一化：它把任何输入都当作标准正态。激活保持原有的尺度，训练与评估模式不一致。
常见来由：只保存、平均或交换了 `parameters()`（缓冲区不在其中），以 `strict=False` 加载，
或训练时归一化一直处于评估模式。

## 如何修复
把缓冲区与权重一起加载（`state_dict()` 两者都有），或重新估计：在训练模式下运行一些训练批次而不做优化步
（`torch.optim.swa_utils.update_bn(loader, model)`）。

## 来源
问题 10、11 和 39。https://docs.pytorch.org/docs/stable/optim.html（update_bn，以及平均模型为何需要它）；
Ioffe 和 Szegedy 2015，https://arxiv.org/abs/1502.03167，3.1 节（用总体统计量推理）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report every batch norm that has counted no batch although its affine map was trained."""
    with_numbers = [r for r in facts.running if not r.var.is_meta]
    if facts.running and not with_numbers:
        raise NotKnown(NO_NUMBERS)
    found = [r for r in with_numbers if _untouched(r) and _trained(r) and not _averaged(facts, r)]
    drawn = [r.weight for r in with_numbers if r.weight is not None and around_zero(r.weight)]
    size = max(map(rms, drawn), default=0.0)
    found = [r for r in found if not _drawn(facts, r, size)]
    if found:
        yield _finding(found, len(with_numbers))


def _averaged(facts: Facts, running: RunningStatistics) -> bool:
    """Whether it is the copy of an online model's norm that did count: BNS013 says so."""
    if facts.target.online is None:
        return False
    online = {r.path: r.counted for r in read(facts.target.online)}
    return bool(online.get(running.path) or online.get(running.path.partition(".")[2]))


def _untouched(running: RunningStatistics) -> bool:
    no_mean = running.mean is None or bool((running.mean == 0).all())
    return running.counted == 0 and no_mean and bool((running.var == 1).all())


def _trained(running: RunningStatistics) -> bool:
    """Judge by the shift, which is 0 at the start everywhere; by the gain only without one, since some start random."""
    if running.bias is not None:
        return bool((running.bias != 0).any())
    return running.weight is not None and bool((running.weight != running.weight.reshape(-1)[0]).any())


def _drawn(facts: Facts, running: RunningStatistics, size: float) -> bool:
    """Whether an init function moved the shift: nobody trained or loaded the model.

    Args:
        facts: of the target.
        running: one norm.
        size: of gains elsewhere in the model that are seen to be drawn around 0; 0 where there are none.
    """
    if facts.gains.loaded or facts.gains.trained is True:
        return False
    gain = running.weight
    if gain is not None and around_zero(gain):
        return True
    if gain is not None and 0 < rms(gain) <= max(ALIKE * size, SMALL * (facts.gains.trained is False)):
        return True
    untouched = gain is None or bool((gain == gain.reshape(-1)[0]).all())
    return untouched and facts.gains.trained is False


def _finding(found: list[RunningStatistics], total: int) -> Finding:
    paths = tuple(r.path for r in found)
    shifts = [float(r.bias.abs().max()) for r in found if r.bias is not None]
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(found), 'trained batch norm')} never counted a batch: mean 0, variance 1",
            f"{len(found)} 个训练过的批归一化从未统计过批次：均值 0，方差 1",
        ),
        evidence={
            "norms": len(found),
            "of": total,
            "num_batches_tracked": 0,
            "running_mean": 0.0,
            "running_var": 1.0,
            "largest_shift": max(shifts, default=None),
        },
        fix=both(
            "Load the buffers too, or run training batches through torch.optim.swa_utils.update_bn(loader, model).",
            "把缓冲区也加载进来，或用 torch.optim.swa_utils.update_bn(loader, model) 运行一些训练批次。",
        ),
    )


def _target(*, updated: bool) -> Target:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    with torch.no_grad():
        model[1].get_parameter("weight").copy_(torch.tensor([0.8, 1.3, 1.1, 0.6]))
        model[1].get_parameter("bias").copy_(torch.tensor([0.2, -0.1, 0.0, 0.3]))
    images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    if updated:
        model.train()(images)
    return Target(model=model.eval(), args=(images,))


def bad() -> Target:
    """Return a model with trained gains and shifts, whose running statistics were never touched."""
    return _target(updated=False)


def good() -> Target:
    """Return the same model after a batch in train mode."""
    return _target(updated=True)
