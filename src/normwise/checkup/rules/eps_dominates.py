"""An eps as large as the statistic that it guards.

## What it finds
Norms for which eps / (statistic + eps), the median over the rows of the example run, exceeds 0.1. With true weights
and your own data such a norm divides by eps and not by the size of its input: it scales rows down by sqrt(1 - share)
and passes differences in size on. Rows of one number are left out, unless a norm sees nothing else: then its variance
is 0 up to rounding, and what comes out is rounding noise times 1/sqrt(eps). That is reported as well, as worth
knowing: the cause is a dead or constant input, and eager and compiled results may differ there by any amount.

Up to 0.9 it is worth knowing; above, a warning where the gains were trained. A model that was built small with random
weights is not judged: OLMo-2's share at one norm is 1.00 at width 64 and 0.34 at width 2048.

## Why it matters
eps is a guard against division by 0. Where it dominates, the norm does not normalize, its gradient is smaller by the
same factor, and the result depends on the eps of the port: 1e-5 instead of 1e-6, or the machine epsilon of bfloat16
(0.0078), which old kernels of `nn.RMSNorm(eps=None)` take.

## How to fix it
Set eps explicitly, well below the statistic (1e-6), as the checkpoint was trained. Where the input is constant, find
what made it so.

## Sources
Questions 59 and 5. https://github.com/pytorch/pytorch/issues/189581 (eps=None and bfloat16);
https://github.com/pytorch/pytorch/issues/183120 (group norm of a constant map, eager against compiled).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.repairs import effect, respecified
from normwise.facts.shares import Share, shares
from normwise.rendering import both
from normwise.targets import Target

ZH = """eps 与它所保护的统计量一样大。

## 发现什么
示例运行各行的 eps /（统计量 + eps）中位数超过 0.1 的归一化。在真实权重和你自己的数据上，这样的归一化除以的是 eps，而
不是输入的大小：它把行缩小为 sqrt(1 - 份额) 倍，并让大小的差异传下去。只含一个数的行不计入；如果一个归一化只看到这样的
行，它的方差除舍入外为 0，输出就是舍入噪声乘以 1/sqrt(eps)。这也会报告，作为提示：原因是死掉的或恒定的输入，eager 与编
译后的结果在此可能任意不同。

份额不超过 0.9 时作提示；超过 0.9 且增益已训练过时为警告。用随机权重缩小构建的模型不作判断：OLMo-2 的某个归一化在宽度
64 时份额为 1.00，在宽度 2048 时为 0.34。

## 为什么重要
eps 只是防止除以 0。一旦它占主导，归一化就不再归一化，梯度也按同样的倍数变小，而且结果取决于移植时用的 eps：1e-5 还是
1e-6，或者 bfloat16 的机器精度（0.0078），旧版 `nn.RMSNorm(eps=None)` 的内核正是用它。

## 如何修复
显式设置 eps，远小于统计量（1e-6），并与训练该权重时相同。若输入恒定，查找原因。

## 来源
问题 59、5。https://github.com/pytorch/pytorch/issues/189581（eps=None 与 bfloat16）；
https://github.com/pytorch/pytorch/issues/183120（对恒定特征图做 GroupNorm，eager 与编译结果不同）。
"""

CODE = "NUM005"
SEVERITY = Severity.WARNING

NOTABLE = 0.1  # the output is 5 % smaller than normalized
# The output is less than a third of normalized. Below, healthy models live: 0.66 is OLMo-2 at width 1024 (RULES 0.5)
DOMINANT = 0.9


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms whose eps is of the size of the statistic on the example data."""
    constant, dominated, notable = [], [], []
    for share in shares(facts):
        if share.live == 0:
            constant.extend([share] if share.share > DOMINANT else [])
        elif share.share > DOMINANT and _trained(facts, share):
            dominated.append(share)
        elif share.share > NOTABLE:
            notable.append(share)
    if dominated:
        yield _finding(dominated, Severity.WARNING, _repair(facts, dominated[0]))
    if notable:
        yield _finding(notable, Severity.INFO, None)
    if constant:
        yield _constant(constant)


def _trained(facts: Facts, share: Share) -> bool:
    """Whether a norm's gain has moved from the one number it was initialized with."""
    gain = facts.parameters.get(share.site.row.weight_path or "")
    return gain is not None and gain.numel() > 1 and bool((gain != gain.flatten()[0]).any())


def _finding(found: list[Share], severity: Severity, counterfactual: dict[str, object] | None) -> Finding:
    worst = max(found, key=lambda s: s.share)
    paths = tuple(s.site.row.path for s in found)
    gain = (1 - worst.share) ** (0.5 if worst.site.row.spec and worst.site.row.spec.eps_inside else 1)
    return Finding(
        path=worst.site.row.path,
        paths=tuple(dict.fromkeys((worst.site.row.path, *paths))),
        severity=severity,
        basis=Basis.MEASURED,
        message=both(
            f"eps {worst.eps:.2g} is {worst.share:.0%} of statistic + eps ({worst.statistic:.2g}); rows shrink to "
            f"{gain:.2f}",
            f"eps {worst.eps:.2g} 占（统计量 {worst.statistic:.2g} + eps）的 {worst.share:.0%}；行缩小为 {gain:.2f} 倍",
        ),
        evidence={
            "metric": "eps / (statistic + eps), median of rows",
            "value": worst.share,
            "floor": NOTABLE,
            "eps": worst.eps,
            "statistic": worst.statistic,
            "effective_gain": gain,
            "shares": {s.site.row.path: s.share for s in found[:16]},
        },
        counterfactual=counterfactual,
        fix=both(
            "Set eps explicitly, far below the statistic and as in training: eps=1e-6.",
            "显式设置远小于统计量、且与训练时相同的 eps：eps=1e-6。",
        ),
    )


def _constant(found: list[Share]) -> Finding:
    worst = max(found, key=lambda s: s.share)
    return Finding(
        path=worst.site.row.path,
        paths=tuple(s.site.row.path for s in found),
        severity=Severity.INFO,
        basis=Basis.MEASURED,
        message=both(
            f"every row is constant (variance {worst.statistic:.1g}, eps {worst.eps:.1g}): output is rounding noise",
            f"每一行都是常数，方差 {worst.statistic:.1g}，eps {worst.eps:.1g}：输出只是舍入噪声",
        ),
        evidence={
            "metric": "variance of the norm's input",
            "value": worst.statistic,
            "floor": worst.eps,
            "noise_gain": worst.eps**-0.5,
            "eps": worst.eps,
        },
        fix=both(
            "Look for what made the norm's input dead or constant; compiled and eager results may differ here.",
            "查找是什么使该归一化的输入恒定；此处编译与 eager 的结果可能不同。",
        ),
    )


def _repair(facts: Facts, share: Share) -> dict[str, object] | None:
    """Put eps far below the statistic and measure the size of the norm's output.

    An eps a tenth of 100 still hides a statistic of 0.001: beside a shift the output would not move.
    """
    calls, small = share.site.calls, min(share.eps / 10, share.statistic / 100)
    try:
        run = respecified(facts, calls, lambda s: replace(s, eps=small), wanted=[c.output for c in calls])
        before, after = (float(r.of(calls[0].output).double().square().mean().sqrt()) for r in (facts.runs.base, run))
    except NotKnown:
        return None
    change = both(f"eps {small:.1g} in place of {share.eps:.1g}", f"eps 由 {share.eps:.1g} 改为 {small:.1g}")
    return effect(change, "root mean square of the norm's output", before, after)


def _target(eps: float) -> Target:
    norm = nn.RMSNorm(8, eps=eps)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, 8))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 1e-3
    return Target(model=nn.Sequential(norm, nn.Linear(8, 2)).eval(), args=(x,))


def bad() -> Target:
    """Return a model with trained gains whose eps is a thousand times the mean square."""
    return _target(1e-3)


def good() -> Target:
    """Return the same model with an eps far below."""
    return _target(1e-9)
