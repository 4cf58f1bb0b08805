"""Running statistics that are not those of the data.

## What it finds
Two forwards on the same batch, dropout off: with the batch's statistics and with the running ones. A batch norm is
reported where at least a tenth of its channels differ by more than six standard errors *and* half a standard
deviation, and the model's output moves by more than a tenth. A warning needs a loader whose samples can be drawn from
all over the data, and a model that is evaluated; one example batch only informs, and so do norms still warming up
(BNS005) and a model in the middle of its training, whose statistics follow the weights with a delay. Norms that
counted no batch are left to BNS003. An InstanceNorm with `track_running_stats=True` uses each sample's own statistics
in train mode and one fixed map in eval mode: that difference is by construction, and a warning where the output moves.

## Why it matters
What was trained is not what is evaluated. Ways there: batches too small, another domain, padding, weights averaged or
loaded without their buffers, augmentation that the evaluation does not have.

## How to fix it
Re-estimate the statistics (`torch.optim.swa_utils.update_bn(loader, model)`), train with larger batches, or use a norm
without running statistics. For an InstanceNorm: `track_running_stats=False`.

## Sources
Questions 10, 14, 16 and 65. https://github.com/junyanz/pytorch-CycleGAN-and-pix2pix/issues/395 (InstanceNorm that is a
fixed map in eval mode); Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.gaps import CHANNELS, EFFECT, SAMPLES, Gap, Z, gaps, output_shift, recalibrated
from normwise.facts.liveness import Scope
from normwise.facts.repairs import effect
from normwise.facts.running import unfinished
from normwise.rendering import both
from normwise.targets import InputsFrom, Target

CODE = "BNS004"
SEVERITY = Severity.WARNING

# Below this the two modes agree for practical purposes: with 16 samples the scale of one channel is known to 18 %
# (sqrt(2/16) of the variance), so trained models whose statistics are right move by several percent.
SHIFT = 0.1

ZH = """运行统计量与数据不符。

## 发现什么
在同一批数据上关闭 dropout 运行两次前向：一次用该批的统计量，一次用运行统计量。若一个批归一化至少十分之一的通道相差超过
六个标准误差*且*超过半个标准差，并且模型输出移动超过十分之一，则予以报告。警告需要能从全部数据中抽样的 loader，
以及一个用于评估的模型；只有一个示例批次时仅作提示，仍在预热的归一化（BNS005）和训练途中的模型也是，后者的统计量随权重滞后。
从未计数的归一化由 BNS003 处理。
`track_running_stats=True` 的 InstanceNorm 训练时用每个样本自己的统计量，eval 时是固定映射：这种差异是结构性的，
输出移动时给出警告。

## 为什么重要
被评估的不是被训练的那个函数。常见来由：批次太小、换了领域、补齐、权重被平均或加载时丢了缓冲区、评估时没有的数据增强。

## 如何修复
重新估计统计量（`torch.optim.swa_utils.update_bn(loader, model)`），用更大的批次训练，或改用没有运行统计量的归一化。
InstanceNorm 请设 `track_running_stats=False`。

## 来源
问题 10、14、16 和 65。https://github.com/junyanz/pytorch-CycleGAN-and-pix2pix/issues/395（eval 时成为固定映射的
InstanceNorm）；Ioffe 和 Szegedy 2015，https://arxiv.org/abs/1502.03167。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms whose two modes differ on the data."""
    if not facts.running:
        return
    if not facts.target.weights.magnitudes_count:
        raise NotKnown(both("needs trained weights", "需要训练过的权重"))
    # an InstanceNorm counts no batches: whether its statistics moved says whether it was trained
    moved = {r.path for r in facts.running if r.counted or bool((r.var != 1).any())}
    scopes = {p: live.scope for p, live in facts.live_norms.items() if p in moved and live.updates}
    instance = tuple(p for p, s in scopes.items() if s is Scope.INSTANCE)
    batch = {p for p, s in scopes.items() if s is Scope.BATCH}
    if not instance and not batch:
        return
    if facts.target.loader is None and facts.target.inputs_from is not InputsFrom.GIVEN:
        raise NotKnown(
            both("needs real data: pass inputs=... or loader=...", "需要真实数据：传入 inputs=... 或 loader=...")
        )
    if instance:
        yield from _instance(facts, instance)
    if batch and facts.target.online is None:  # beside an online model the averaged copy is judged against it
        yield from _batch(facts, batch)


def _instance(facts: Facts, paths: tuple[str, ...]) -> Iterator[Finding]:
    data = facts.on_data
    shift = output_shift(data.still, data.live)
    if shift is None or shift <= SHIFT:
        return
    trial = facts.trials.forward(data.args, prepare=partial(_each_alone, paths=paths), repair=True)
    own = output_shift(data.still, trial)  # that of these norms alone
    if own is None or own <= SHIFT:
        return
    change = both("statistics of each sample in eval mode too", "评估模式下也用每个样本自己的统计量")
    yield Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"{counted(len(paths), 'norm')}: own statistics in training, fixed ones in eval; output moves {own:.0%}",
            f"{len(paths)} 个归一化训练时用各样本统计量，评估时用固定统计量；输出移动 {own:.0%}",
        ),
        evidence={"metric": _METRIC, "value": own, "limit": SHIFT, "norms": len(paths), "samples": data.samples},
        counterfactual=effect(change, _METRIC, shift, output_shift(trial, data.live) or 0.0),
        fix=both(
            "Set track_running_stats=False, unless one fixed map for all inputs is what you want.",
            "设 track_running_stats=False，除非你就要一个对所有输入固定的映射。",
        ),
    )


_METRIC = "relative difference of the output between statistics of the data and running ones"


def _each_alone(model: nn.Module, paths: tuple[str, ...]) -> None:
    model.eval()
    for path in paths:
        model.get_submodule(path).training = True


def _batch(facts: Facts, paths: set[str]) -> Iterator[Finding]:
    data = facts.on_data
    if data.samples < SAMPLES:
        raise NotKnown(both(f"needs a batch of at least {SAMPLES} samples", f"需要至少 {SAMPLES} 个样本的批次"))
    found = [g for g in gaps(facts, data.live) if g.path in paths]
    shift = output_shift(data.still, data.live)
    if not found or shift is None or shift <= SHIFT:
        return
    warming = {r.path for r in facts.running if unfinished(r)}
    evaluated = not facts.target.model.training or facts.target.eval_fn is not None
    sure = data.from_loader and evaluated and any(g.path not in warming for g in found)
    yield _finding(facts, found, shift, SEVERITY if sure else Severity.INFO)


def _finding(facts: Facts, found: list[Gap], shift: float, severity: Severity) -> Finding:
    worst, paths = max(found, key=lambda g: g.channels / g.of), tuple(g.path for g in found)
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.MEASURED,
        message=both(
            f"running statistics of {counted(len(paths), 'norm')} are not the data's; the output moves {shift:.0%}",
            f"{len(paths)} 个归一化的运行统计量与数据不符；输出移动 {shift:.0%}",
        ),
        evidence={
            "metric": _METRIC,
            "value": shift,
            "limit": SHIFT,
            "norms": len(paths),
            "channels": worst.channels,
            "of": worst.of,
            "largest_shift_in_sd": max(g.largest for g in found),
            "largest_ratio_of_sd": max(g.spread for g in found),
            "limits": {"standard_errors": Z, "standard_deviations": EFFECT, "channels": CHANNELS},
            "samples": facts.on_data.samples,
            "from_loader": facts.on_data.from_loader,
        },
        counterfactual=_recalibrated(facts, shift),
        fix=both(
            "Re-estimate the statistics on training data: torch.optim.swa_utils.update_bn(loader, model).",
            "在训练数据上重新估计统计量：torch.optim.swa_utils.update_bn(loader, model)。",
        ),
    )


def _recalibrated(facts: Facts, before: float) -> dict[str, Any] | None:
    data = facts.on_data
    try:
        trial = facts.trials.forward(data.args, prepare=recalibrated(data.live), repair=True)
    except NotKnown:
        return None
    after = output_shift(trial, data.live)
    change = both("running statistics re-estimated on this batch", "在这一批上重新估计运行统计量")
    return None if after is None else effect(change, _METRIC, before, after)


def _target(*, tracked: bool) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=tracked), nn.Conv2d(4, 2, 1))
    images = torch.rand(4, 3, 6, 6)
    with torch.no_grad():
        for _ in range(40):
            model(images)
    return Target(model=model, args=(images * 0.2,))


def bad() -> Target:
    """Return a model whose InstanceNorm is another function in eval mode."""
    return _target(tracked=True)


def good() -> Target:
    """Return the same model with the statistics of each sample in both modes."""
    return _target(tracked=False)
