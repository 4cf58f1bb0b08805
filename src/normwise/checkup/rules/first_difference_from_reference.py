"""The first value at which a model parts from its reference, and the norm behind it.

## What it finds
Model and reference run on the same inputs, and their outputs differ by more than 1e-3 of their size. Values are found
again by their numbers, not by names: the first one after which nothing agrees is named, with the norm property that
explains it: another kind, eps, axes, offset, gain, shift or statistics; a norm that is missing or stands elsewhere; a
fold that left something undone (a shift, the mean of a residual writer, a convolution's bias, a tied embedding).
Where no norm explains the difference, it is only worth knowing. Outputs that differ by less, but in float32 by more
than rounding (1e-5), are a warning where every matrix is the reference's and a norm with another such property makes
something else (by 1e-3) of the same input: the branches of fresh blocks are small beside the stream and hide it.

## Why it matters
A port or a conversion is a claim that two programs compute the same. Small differences do not stop training or
generation, they cost quality that nobody can trace later, and the place where they are noticed is rarely the place
where they begin.

## How to fix it
Repair the property that is named, and run the check again: the next difference, if any, is then the first. A LayerNorm
becomes an RMSNorm exactly if its shift moves into the next linear map and everything that writes to the stream
(embeddings, output weights and their biases) has mean 0. A convolution takes over a batch norm with weight * s and
(bias - mean) * s + shift, s = gain / sqrt(var + eps). A gain folds into a head only if no embedding shares its weight.

Silent: a reference in another dtype, with other kernels or other module names, as long as the outputs agree; and every
difference that another finding explains.

## Sources
Questions 29, 30, 31 and 60. https://github.com/spcl/QuaRot/issues/30 (biases not centred);
https://github.com/ModelCloud/GPTQModel/pull/1550 (a fold into a tied embedding);
https://github.com/ultralytics/yolov3/issues/807 (the bias of the convolution).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.facts import Facts
from normwise.facts.divergence import Divergence, at_parting, explain
from normwise.facts.reference import Reference
from normwise.rendering import both
from normwise.rendering.languages import Text
from normwise.targets import Target

ZH = """模型第一次偏离参考模型的地方，以及背后的归一化。

## 发现什么
模型与参考模型在相同输入上运行，输出之差超过其大小的 1e-3。中间值按数值而不是按名称对应：指出从哪个值起再无一致，以及
解释它的归一化属性：种类、eps、轴、单位偏移、增益、偏移或统计量不同；归一化缺失或位置不同；折叠没有做完（偏移、残差写入者
的均值、卷积偏置、共享的嵌入）。没有归一化能解释的差异只作提示。差异更小、但在 float32 下超过舍入（1e-5）时，若每个矩阵
都与参考模型相同，而某个具有上述不同属性的归一化对相同输入给出不同输出（相差 1e-3），则为警告：新建块的分支相对残差流
很小，会掩盖它。

## 为什么重要
移植或转换声称两个程序计算相同。小差异不会中断训练或生成，只会损失日后无从追查的质量；而发现问题的地方很少是它开始的地
方。

## 如何修复
修正指出的属性再检查一次：若还有差异，届时它就是第一个。LayerNorm 精确变为 RMSNorm 的条件：偏移并入下一个线性层，且所
有写入残差流的部分（嵌入、输出权重及其偏置）均值为 0。卷积吸收批归一化：weight * s 与 (bias - mean) * s + shift，其中
s = gain / sqrt(var + eps)。只有没有嵌入共享其权重时，增益才能折叠进输出头。

以下情况不报告：参考模型用另一种精度、另一种内核或另一套模块名，但输出一致；以及其他发现已经解释的差异。

## 来源
问题 29、30、31 和 60。https://github.com/spcl/QuaRot/issues/30（偏置未居中）；
https://github.com/ModelCloud/GPTQModel/pull/1550（折叠进共享嵌入）；https://github.com/ultralytics/yolov3/issues/807
（卷积的偏置）。
"""

CODE = "CKP006"
SEVERITY = Severity.ERROR


def check(facts: Facts) -> Iterator[Finding]:
    """Report where the model first differs from its reference."""
    reference = facts.reference
    if reference.differs:
        found = explain(reference)
    elif not reference.differs_slightly or (found := at_parting(reference)) is None:
        return  # no more than another order of operations, or nothing that a norm explains
    yield Finding(
        path=found.path if found.path in facts.modules else "",
        severity=_severity(reference, found),
        basis=Basis.MEASURED,
        message=_message(found, min(reference.distance, 1e9)),
        evidence=_evidence(found, reference.distance, reference.floor),
        fix=_fix(found),
    )


def _severity(reference: Reference, found: Divergence) -> Severity:
    if not reference.differs:
        return Severity.WARNING
    return SEVERITY if found.of_norms else Severity.INFO


def _message(found: Divergence, distance: float) -> Text:
    en, zh = _cause(found)
    return both(
        f"output differs from the reference by {distance:.2g}: {en}"[:99], f"输出与参考相差 {distance:.2g}：{zh}"
    )


def _cause(found: Divergence) -> tuple[str, str]:
    """Return the nearest cause in two languages; what was left undone says more than what was done."""
    if found.tied:
        return f"a gain was folded into {found.tied[0]}, which is tied", f"增益被折叠进共享的 {found.tied[0]}"
    if found.biases:
        return f"{found.biases[0]} was not scaled when the norm was folded", f"折叠归一化时未缩放 {found.biases[0]}"
    if found.shifts:
        return f"the shift of {len(found.shifts)} folded norms is lost", f"{len(found.shifts)} 个折叠的归一化丢失了偏移"
    if found.writers:
        return f"{len(found.writers)} residual writers have a mean", f"{len(found.writers)} 个残差写入者的均值不为 0"
    if found.differing:
        first = found.differing[0]
        return f"{first.name} is {_said(first.mine)}, not {_said(first.theirs)}", (
            f"{first.name} 是 {_said(first.mine)}，应为 {_said(first.theirs)}"
        )
    if found.placement:
        return f"stacks are {found.placement[0]}, not {found.placement[1]}", (
            f"堆叠为 {found.placement[0]}，应为 {found.placement[1]}"
        )
    if found.missing:
        return f"{len(found.missing)} norms of it are missing", f"缺少其中 {len(found.missing)} 个归一化"
    return f"it begins at {found.op}, no norm explains it", f"始于 {found.op}，归一化无法解释"


def _said(item: Any) -> str:
    return f"{item:.3g}" if isinstance(item, float) else str(item)


def _evidence(found: Divergence, distance: float, floor: float) -> dict[str, Any]:
    lists = {
        "norms_missing": found.missing,
        "tied": found.tied,
        "shifts_not_folded": found.shifts,
        "residual_writers_with_mean": found.writers,
        "biases_not_scaled": found.biases,
    }
    return {
        "metric": "distance of the outputs relative to the reference",
        "value": distance if distance < float("inf") else "infinite",
        "floor": floor,
        "op": found.op,
        "differing": {d.name: [d.mine, d.theirs] for d in found.differing},
        "placement": list(found.placement or ()),
        **{name: list(items) for name, items in lists.items() if items},
    }


def _fix(found: Divergence) -> Text:
    if found.tied:
        return both(
            "Untie the two tensors before the gain is folded, or leave the gain in the norm.",
            "折叠增益之前先解除张量共享，或将增益留在归一化中。",
        )
    if found.biases:
        return both(
            "Fold with (bias - running_mean) * gain / sqrt(var + eps) + shift.",
            "按 (bias - running_mean) * gain / sqrt(var + eps) + shift 折叠。",
        )
    if found.shifts or found.writers:
        return both(
            "Add weight @ shift to the bias of the next linear map; subtract its mean from every bias and row written.",
            "将 weight @ shift 加到下一线性层的偏置；从写入残差流的每个偏置和权重中减去其均值。",
        )
    return both(
        "Give the norm at this place the property that the reference has, and check again.",
        "让此处的归一化具有参考模型的属性，然后再次检查。",
    )


class _Model(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(5, 8), nn.RMSNorm(8, eps=eps), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def _target(eps: float) -> Target:
    model, reference = _Model(eps), _Model(1e-6)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            mine.copy_(theirs.normal_(generator=generator))
    return Target(model=model.eval(), args=(torch.randn(4, 5, generator=generator),), reference=reference.eval())


def bad() -> Target:
    """Return a port whose norm has another eps than its reference."""
    return _target(eps=1.0)


def good() -> Target:
    """Return a port that computes what its reference does."""
    return _target(eps=1e-6)
