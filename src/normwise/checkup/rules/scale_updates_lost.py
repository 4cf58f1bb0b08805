"""Updates of gains that rounding throws away.

## What it finds
Gains in bfloat16 or float16 whose bits are the same after the optimizer's step although they had a gradient and a
learning rate. The user's `train_step` is run once and everything it changes is put back. Reported where at least nine
tenths of the channels with a gradient did not move; frozen gains, groups with a rate of 0 and gains whose float32
master copy is what the optimizer holds are not judged.

## Why it matters
Near 1 neighbouring bfloat16 numbers are 1/256 apart below and 1/128 above. AdamW moves a gain by about the learning
rate, so at 1e-4 or 1e-3 every update is rounded back: the gains stay at their initial value for the whole training,
with healthy gradients, while other weights, which are smaller, move.

## How to fix it
Keep float32 master weights (autocast with float32 parameters), store gains around 0 in a norm that computes
`1 + weight`, or round stochastically.

## Sources
Question 41. https://arxiv.org/abs/2010.06192 (Zamirai et al.: training in bfloat16 alone loses small updates).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.rules._examples import Float32RMSNorm
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts, gain_steps, needs
from normwise.rendering import both
from normwise.targets import Target

CODE = "PAR007"
SEVERITY = Severity.WARNING

# stochastic rounding moves a share of the channels that is rate / spacing: a tenth at a rate of 4e-4
LOST = 0.9
HALF = (torch.bfloat16, torch.float16)

ZH = """增益的更新被舍入丢弃。

## 发现什么
bfloat16 或 float16 的增益，虽有梯度和学习率，在优化器更新之后逐位不变。会运行一次用户的 `train_step`，之后恢复它改
变的一切。当至少十分之九有梯度的通道没有移动时报告；冻结的增益、学习率为 0 的组、以及优化器持有 float32 主副本的增益
不予判断。

## 为什么重要
在 1 附近，相邻的 bfloat16 数向下相差 1/256，向上相差 1/128。AdamW 每步移动增益约一个学习率，因此在 1e-4 或 1e-3 时
每次更新都被舍入回去：整个训练中增益停在初始值，梯度看起来正常，而较小的其他权重会移动。

## 如何修复
保留 float32 主权重（float32 参数加 autocast），在计算 `1 + weight` 的归一化中以 0 为中心存储增益，或使用随机舍入。

## 来源
问题 41。https://arxiv.org/abs/2010.06192（Zamirai 等：仅用 bfloat16 训练会丢失小更新）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report gains that an optimizer's step cannot move."""
    if facts.target.train_step is None:
        raise NotKnown(needs.TRAIN_STEP)
    gains = [g for g in facts.gains.all if g.parameter.dtype in HALF and g.parameter.requires_grad]
    if not gains:
        return
    steps = gain_steps.watched(facts, gains)
    lost = [s for s in steps if s.rate > 0 and s.with_gradient and s.unmoved >= LOST * s.with_gradient]
    if lost:
        yield _finding(lost, len(gains))


def _finding(lost: Sequence[gain_steps.Step], of: int) -> Finding:
    paths = tuple(dict.fromkeys(s.gain.site.row.path for s in lost))
    dtype = lost[0].gain.parameter.dtype
    name = str(dtype).removeprefix("torch.")
    channels, unmoved = sum(s.with_gradient for s in lost), sum(s.unmoved for s in lost)
    rate = max(s.rate for s in lost)
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), f'{name} gain')} of {of}: a step at rate {rate:.1g} moved"
            f" {channels - unmoved} of {channels} channels",
            f"{of} 个增益中有 {len(paths)} 个（{name}）：学习率 {rate:.1g} 的一步只移动了"
            f" {channels} 个通道中的 {channels - unmoved} 个",
        ),
        evidence={
            "metric": "share of channels with a gradient that did not move",
            "value": unmoved / channels,
            "gains": len(paths),
            "of": of,
            "learning_rate": rate,
            "spacing_below_1": float(torch.finfo(dtype).eps) / 2,
        },
        fix=both(
            "Keep float32 master weights for gains, or store them around 0 in a norm that computes 1 + weight.",
            "为增益保留 float32 主权重，或在计算 1 + weight 的归一化中以 0 为中心存储。",
        ),
    )


def _target(dtype: torch.dtype) -> Target:
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Float32RMSNorm(), nn.Linear(16, 16)).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train_step(trained: nn.Module, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        trained(x).float().square().mean().backward()
        optimizer.step()

    x = torch.randn(8, 16, generator=random).to(dtype)
    return Target(model=model, args=(x,), optimizer=optimizer, train_step=train_step)


def bad() -> Target:
    """Return a model whose gains in bfloat16 one step cannot move."""
    return _target(torch.bfloat16)


def good() -> Target:
    """Return the same model in float32."""
    return _target(torch.float32)
