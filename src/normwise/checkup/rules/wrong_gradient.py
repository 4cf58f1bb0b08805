"""A backward pass that does not differentiate its forward.

## What it finds
Norms with a backward of their own (an `autograd.Function`, a fused kernel). The module that holds the norm is run by
itself on random rows, and beside it the recorded forward in float64, where autograd gives the true gradient.
Reported: gradients of inputs and parameters that differ; a backward that writes into the gradient it was given, where
an add hands the same one to another branch (`x + norm(f(x))`). A warning: statistics under `no_grad` or of
`x.detach()`, where that changes the gradient of the input by more than 1 %. Worth knowing only: a backward that
overwrites but shares with nobody, and a second derivative that is silently another or none (gradient penalties need
it).

What is detached elsewhere passes: a whole norm (a target), a factor behind it (AdaNorm, a straight-through estimate),
running statistics, a scale that cancels; and so does a backward that refuses to be differentiated
(`once_differentiable`). Detached statistics are a warning and no error because some mean it (explanations of a trained
model by conservative propagation do).

## Why it matters
The loss falls all the same, only slower and elsewhere. An overwriting backward is right in every pre-norm block and
wrong in a sandwich block, so tests of the norm alone pass. Without the gradient through mean and variance a layer no
longer pulls back what grows: that gradient, more than the forward, is what LayerNorm gains by.

## How to fix it
Return a new tensor from backward; check it with `torch.autograd.gradcheck` in float64, alone and inside `x +
norm(x)`. Take the statistics from `x` itself; to save memory use a fused norm or checkpointing, not `detach`.

## Sources
Questions 54 and 61. https://github.com/linkedin/Liger-Kernel/issues/370 (an RMSNorm that overwrote a shared
gradient); Xu et al. 2019, https://arxiv.org/abs/1911.07013 (LayerNorm with detached statistics is worse).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.backward import CUT, Probed
from normwise.facts.detached import Detached, detached
from normwise.rendering import Text, both
from normwise.targets import Target

ZH = """反向传播不是前向的导数。

## 发现什么
自带反向传播的归一化（`autograd.Function`、融合内核）。含该归一化的模块在随机行上单独运行，同时在 float64 中运行记录下
的前向，由 autograd 给出真实梯度。报告：输入或参数的梯度不同；反向传播改写了传入的梯度，而相加把同一个梯度也交给了另一
分支（`x + norm(f(x))`）。警告：统计量在 `no_grad` 下或由 `x.detach()` 计算，且使输入的梯度改变超过 1 %。仅作提示：
改写梯度但无人共享；二阶导数悄悄变成另一个值或消失（梯度惩罚需要它）。

在别处 detach 的不报告：整个归一化（目标网络）、其后的因子（AdaNorm、直通估计）、运行统计量、会抵消的缩放；拒绝被再次
求导的反向传播（`once_differentiable`）也不报告。被 detach 的统计量是警告而不是错误，因为有人有意为之（对已训练模型作守
恒传播的解释）。

## 为什么重要
损失照样下降，只是更慢，并走向别处。改写梯度的反向传播在所有 pre-norm 块中都正确，在 sandwich 块中却是错的，所以只测归
一化本身的测试会通过。没有经过均值和方差的梯度，层就不再把增长的东西拉回来：LayerNorm 的收益更多来自这个梯度，而不是
前向。

## 如何修复
反向传播返回新的张量；用 float64 的 `torch.autograd.gradcheck` 检查，既单独检查，也在 `x + norm(x)` 中检查。

统计量直接取自 `x`；要省显存请用融合的归一化或 checkpointing，而不是 `detach`。

## 来源
问题 54、61。https://github.com/linkedin/Liger-Kernel/issues/370（RMSNorm 改写了共享的梯度）；Xu 等 2019，
https://arxiv.org/abs/1911.07013（统计量被 detach 的 LayerNorm 更差）。
"""

CODE = "NUM012"
SEVERITY = Severity.ERROR


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms whose gradient is not that of their forward."""
    if not any(not s.row.native for s in facts.sites):
        return
    found = False
    for cut in detached(facts):
        if cut.error > CUT:
            found = True
            yield _detached(cut)
    try:
        result = facts.backward
    except NotKnown:
        if found:
            return
        raise
    for probed in result.probed:
        judged = _judged(probed)
        if judged is not None:
            found = True
            yield _finding(probed, *judged)
    if result.unknown and not result.probed and not found:
        raise NotKnown(result.unknown[0])


def _detached(cut: Detached) -> Finding:
    paths = tuple(dict.fromkeys(s.row.path for s in cut.sites))
    return Finding(
        paths=paths,
        severity=Severity.WARNING,
        basis=Basis.MEASURED,
        message=both(
            f"{counted(len(paths), 'norm')}: statistics detached, the gradient of the input is off by {cut.error:.0%}",
            f"{len(paths)} 个归一化：统计量被 detach，输入的梯度相差 {cut.error:.0%}",
        ),
        evidence={
            "metric": "relative error of a gradient against float64",
            "value": cut.error,
            "floor": CUT,
            "of": "input 0",
            "own_backward": False,
        },
        fix=both(
            "Take mean and variance from x, not from x.detach(): the gradient has to pass through them.",
            "均值和方差取自 x，而不是 x.detach()：梯度必须经过它们。",
        ),
    )


def _judged(probed: Probed) -> tuple[Severity, Text] | None:
    size = f"{probed.error:.0%}" if math.isfinite(probed.error) else "not finite"
    if probed.wrong and probed.overwrites:
        return Severity.ERROR, both(
            f"backward overwrites the gradient it is given: that of {probed.of} is off by {size}",
            f"反向传播改写了传入的梯度：{probed.of} 的梯度相差 {size}",
        )
    if probed.wrong and probed.custom:
        return Severity.ERROR, both(
            f"backward is not the derivative of forward: the gradient of {probed.of} is off by {size}",
            f"反向传播不是前向的导数：{probed.of} 的梯度相差 {size}",
        )
    if probed.wrong:
        return Severity.WARNING, both(
            f"part of the norm is outside autograd (no_grad): the gradient of {probed.of} is off by {size}",
            f"归一化的一部分不在 autograd 中（no_grad）：{probed.of} 的梯度相差 {size}",
        )
    if probed.overwrites and probed.shared:
        return Severity.ERROR, both(
            "backward overwrites the gradient it is given, which a residual add hands to another branch too",
            "反向传播改写了传入的梯度，而残差相加把同一个梯度也交给了另一分支",
        )
    if probed.overwrites:
        return Severity.INFO, both(
            "backward overwrites the gradient it is given; wrong as soon as an add shares it",
            "反向传播改写了传入的梯度；一旦有相加共享它就会出错",
        )
    if probed.second_order is not None and probed.second_order > probed.limit:
        return Severity.INFO, both(
            f"the second derivative is off by {_percent(probed.second_order)}, silently: no gradient penalties",
            f"二阶导数悄悄相差 {_percent(probed.second_order)}：不能用于梯度惩罚",
        )
    return None


def _percent(number: float) -> str:
    return f"{number:.0%}" if math.isfinite(number) else "100%"


def _finding(probed: Probed, severity: Severity, message: Text) -> Finding:
    paths = tuple(dict.fromkeys(s.row.path for s in probed.sites))
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.PROOF if severity is Severity.ERROR else Basis.MEASURED,
        message=message,
        evidence={
            "metric": "relative error of a gradient against float64",
            "value": probed.error if math.isfinite(probed.error) else None,
            "floor": probed.limit,
            "of": probed.of,
            "run_alone": probed.holder or "the model",
            "own_backward": probed.custom,
            "overwrites_incoming_gradient": probed.overwrites,
            "incoming_gradient_shared": probed.shared,
            "second_derivative_error": _json(probed.second_order),
        },
        fix=both(
            "Return a new tensor from backward, and run torch.autograd.gradcheck on norm(x) and on x + norm(x).",
            "反向传播返回新的张量，并对 norm(x) 和 x + norm(x) 运行 torch.autograd.gradcheck。",
        ),
    )


def _json(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, right: bool) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        normed = x * scale
        ctx.save_for_backward(normed, scale)
        ctx.right = right
        return normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        normed, scale = ctx.saved_tensors
        along = normed * (grads[0] * normed).mean(-1, keepdim=True) if ctx.right else 0.0
        return scale * (grads[0] - along), None


class _Norm(nn.Module):
    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.right = right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Function.apply(x, self.right)  # type: ignore[no-any-return]


def _target(*, right: bool) -> Target:
    model = nn.Sequential(nn.Linear(4, 8), _Norm(right=right), nn.Linear(8, 2))
    return Target(model=model, args=(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),))


def bad() -> Target:
    """Return a model whose norm takes its scale for a constant in the backward."""
    return _target(right=False)


def good() -> Target:
    """Return the same model with the whole derivative."""
    return _target(right=True)
