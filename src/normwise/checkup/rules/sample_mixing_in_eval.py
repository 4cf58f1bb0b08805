"""Samples that change each other's result in eval mode.

## What it finds
All samples of the batch but the first are replaced, and the two runs are compared op by op, in eval mode and float32.
Reported is a norm that moves the first sample although its own input there did not move (statistics over the batch:
`BatchNorm` without running statistics, a group or instance norm on a `[1, N*C, ...]` view), or an op that pairs rows
of one sample with rows of another. For information only: anything else that mixes samples (capacity of experts,
in-batch contrast), and norms over the batch of a model that was given in train mode.

## Why it matters
The answer for one sample then depends on who shares its batch, so it changes with batch size and order, and no single
result can be reproduced. Losses hide it: on average everything looks plausible.

## How to fix it
Let eval use running statistics (`track_running_stats=True`), or take statistics per sample (`GroupNorm`, `LayerNorm`).
Where rows are paired wrongly, repeat with `repeat_interleave` (sample by sample) instead of `repeat`.

## Sources
Questions 18, 21, 37 and 65. https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html (batch statistics
in eval mode without running ones); Wu and He 2018, Group Normalization, https://arxiv.org/abs/1803.08494.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import percent
from normwise.facts import Facts
from normwise.facts.differences import AGREE, DIFFER
from normwise.facts.mixing import Mixer
from normwise.facts.partners import Partners
from normwise.facts.repairs import effect
from normwise.rendering import both
from normwise.targets import Target

ZH = """评估模式下样本之间相互影响。

## 发现什么
把批次中除第一个以外的样本全部替换，在评估模式、float32 下逐个操作比较两次运行。报告这样的归一化：第一个样本的输入没
有变，它的输出却变了（统计量跨批次：没有运行统计量的 `BatchNorm`，或作用在 `[1, N*C, ...]` 视图上的组归一化、实例归
一化）；也报告把一个样本的行与另一个样本的行配在一起的操作。其他混合样本的地方（专家容量、批内对比），以及处于训练模
式的模型中跨批次的归一化，只作提示。

## 为什么重要
一个样本的结果取决于同批的其他样本，随批次大小和顺序而变，单个结果无法重现。平均损失看不出来。

## 如何修复
推理时使用运行统计量（`track_running_stats=True`），或按样本取统计量（`GroupNorm`、`LayerNorm`）。行配错时，用
`repeat_interleave`（逐个样本）代替 `repeat`。

## 来源
问题 18、21、37、65。https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html （没有运行统计量时推理
也用批统计量）；Wu 与 He 2018，Group Normalization，https://arxiv.org/abs/1803.08494 。
"""

CODE = "AXS001"
SEVERITY = Severity.ERROR


def check(facts: Facts) -> Iterator[Finding]:
    """Report the norms, or the op, through which one sample's result depends on the others."""
    seen = facts.partners
    if seen.norms:
        # a model in train mode is being trained, where statistics of the batch are what a batch norm is for
        evaluated = not facts.target.model.training or facts.target.eval_fn is not None
        yield _of_norms(seen, SEVERITY if evaluated else Severity.INFO)
    elif seen.mixer is not None:
        yield _of_op(seen, seen.mixer)


def _evidence(seen: Partners, floor: float) -> dict[str, object]:
    return {
        "metric": "change of the first sample's outputs, relative",
        "value": seen.change,
        "floor": floor,
        "samples": seen.samples,
        "agree_below": AGREE,
        "differ_above": DIFFER,
    }


def _of_norms(seen: Partners, severity: Severity) -> Finding:
    first = seen.norms[0]
    paths = tuple(s.row.path for s in seen.sites)
    assert seen.change_held is not None
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.MEASURED,
        message=both(
            f"other batch partners move a sample's output by {percent(seen.change)}; statistics over the batch",
            f"换掉同批样本，一个样本的输出变化 {percent(seen.change)}；统计量跨越批次",
        ),
        evidence=_evidence(seen, first.floor)
        | {"norms": len(paths), "norm_change": first.change, "batch_axis": first.layout.axis},
        fix=both(
            "Use running statistics in eval (track_running_stats=True), or a norm of each sample (LayerNorm).",
            "推理时使用运行统计量（track_running_stats=True），或改用按样本的归一化（GroupNorm、LayerNorm）。",
        ),
        counterfactual=effect(
            both("this norm held where its own input is unchanged", "在输入未变处保持该归一化的输出"),
            "change of the first sample's outputs",
            seen.change,
            seen.change_held(),
        ),
    )


def _of_op(seen: Partners, mixer: Mixer) -> Finding:
    """Rows of different samples paired are wrong whatever was meant; other mixing may be meant."""
    what_en = "rows of different samples are paired" if mixer.pairs else "no norm: it may be meant"
    what_zh = "不同样本的行被配对" if mixer.pairs else "不是归一化，可能有意为之"
    return Finding(
        path=mixer.path,
        severity=SEVERITY if mixer.pairs else Severity.INFO,
        basis=Basis.MEASURED,
        message=both(
            f"other batch partners move a sample's output by {percent(seen.change)} at {mixer.op.short}; {what_en}",
            f"换掉同批样本，一个样本的输出在 {mixer.op.short} 处变化 {percent(seen.change)}；{what_zh}",
        ),
        evidence=_evidence(seen, 0.0) | {"op": mixer.op.name, "source": str(mixer.op.source or "")},
        fix=both(
            "Bring both operands into one order of samples: repeat_interleave(n, dim=0) for repeat(n, 1, ...).",
            "让两个操作数按同样的样本顺序排列：把 repeat(n, 1, ...) 换成 repeat_interleave(n, dim=0)。",
        )
        if mixer.pairs
        else both(
            "Nothing to do where samples are meant to meet here; otherwise keep them apart in this op.",
            "若这里本应让样本相互作用则无需处理；否则在此操作中把样本分开。",
        ),
    )


class _BatchStatistics(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(0, keepdim=True)
        return x * torch.rsqrt(x.square().mean(0, keepdim=True) + 1e-5)


def _target(norm: nn.Module) -> Target:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3))
    return Target(model=model.eval(), args=(torch.randn(4, 6, generator=generator),))


def bad() -> Target:
    """Return a model that normalizes over the batch, in eval mode too."""
    return _target(_BatchStatistics())


def good() -> Target:
    """Return the same model with a norm of each sample."""
    return _target(nn.LayerNorm(8))
