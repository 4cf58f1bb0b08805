"""A saved reciprocal that is infinite: a row of zeros has no finite gradient in float16.

## What it finds
Torch's own layer norm in float16 with an eps below 2.3e-10, whose gradient on a row of zeros is not finite. The
forward computes in float32 and is sound; what it saves for the backward, 1/sqrt(var + eps), is above 65504 for such a
row. The op is run by itself, forward and backward, on a row of zeros.

## Why it matters
Only training shows it: padding rows or dead units turn all gradients of a step into NaN. eps 1e-12 is the default of
the BERT family, which runs soundly in float16 for inference.

## How to fix it
Use eps 1e-6 or larger where float16 is trained, or train in bfloat16, or keep the norm in float32.

## Sources
Questions 41 and 59. https://github.com/pytorch/pytorch/issues/41527 (layer norm with eps 1e-12 in half precision).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.rows import alike
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.targets import Target

ZH = """保存下来的倒数是无穷：float16 中全零行没有有限的梯度。

## 发现什么
float16 下 torch 自带、eps 小于 2.3e-10、且在全零行上梯度非有限的层归一化。前向在 float32 中计算，没有问题；但为反向保
存的 1/sqrt(var + eps) 对这样的行超过 65504。该操作被单独在全零行上运行前向和反向。

## 为什么重要
只有训练时才显现：补齐行或死单元使一步中的所有梯度变成 NaN。eps 1e-12 是 BERT 系列的默认值，在 float16 推理中没有问题。

## 如何修复
在 float16 中训练时用 1e-6 或更大的 eps，或用 bfloat16 训练，或让归一化保持 float32。

## 来源
问题 41、59。https://github.com/pytorch/pytorch/issues/41527（半精度中 eps 为 1e-12 的层归一化）。
"""

CODE = "NUM006"
SEVERITY = Severity.INFO

# 65504^-2: with a smaller eps the reciprocal root of a row of zeros is beyond float16
SMALLEST = 2.33e-10


def check(facts: Facts) -> Iterator[Finding]:
    """Report torch's norms in float16 whose gradient on a row of zeros is not finite."""
    values = facts.graph.values
    tiny = [
        s
        for s in facts.sites
        if s.row.native
        and s.row.spec is not None
        and 0 < (s.row.spec.eps or 1.0) < SMALLEST
        and values[s.calls[0].input].dtype == "float16"
    ]
    caught: list[Site] = []
    unknown: NotKnown | None = None
    for group in alike(tiny, facts.recording):
        try:
            answer = facts.rows.constant(group[0].calls[0], 0.0)
        except NotKnown as why:
            unknown = why
            continue
        if answer.forward_finite and not answer.gradient_finite:
            caught.extend(group)
    if caught:
        yield _finding(caught)
    elif unknown is not None:
        raise unknown


def _finding(sites: list[Site]) -> Finding:
    eps = min(s.row.spec.eps or 0.0 for s in sites if s.row.spec is not None)
    return Finding(
        path=sites[0].row.path,
        paths=tuple(s.row.path for s in sites),
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"eps {eps:.0e} in float16: the gradient of a row of zeros is not finite (inference is sound)",
            f"float16 中 eps 为 {eps:.0e}：全零行的梯度非有限（推理不受影响）",
        ),
        evidence={
            "norms": len(sites),
            "eps": eps,
            "metric": "smallest eps whose reciprocal root float16 holds",
            "value": eps,
            "floor": SMALLEST,
        },
        fix=both(
            "Where float16 is trained: eps=1e-6 or larger, or the norm in float32.",
            "若用 float16 训练：eps=1e-6 或更大，或让归一化保持 float32。",
        ),
    )


def _target(eps: float) -> Target:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8, eps=eps), nn.Linear(8, 2)).half().eval()
    return Target(model=model, args=(torch.ones(2, 4, dtype=torch.float16),))


def bad() -> Target:
    """Return a float16 model with the eps of BERT."""
    return _target(1e-12)


def good() -> Target:
    """Return the same model with an eps whose reciprocal root float16 holds."""
    return _target(1e-5)
