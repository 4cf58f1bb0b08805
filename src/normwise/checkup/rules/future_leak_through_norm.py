"""A norm that lets a causal model see the future.

## What it finds
Every token behind the middle of the sequence is replaced, and the two runs are compared op by op, in eval mode and
float32. Reported is a norm that moves an earlier step although its own input there did not move, in a model that is
causal apart from it: it claims so (`claims=("causal",)`), or, with the norm held, earlier steps no longer move while
later ones still follow earlier ones. With floating inputs and no claim it is a warning. An encoder is meant to see
everything and is left alone; where the inputs hold its sequence and a decoder's, each is replaced by itself. A causal
model that is being trained (train mode, an optimizer, a `train_step`) is also run with its batch norms in train mode:
their statistics span later steps even where eval mode is causal; a warning where the model claims to be causal, else
for information.

## Why it matters
In training the model learns to read the answer out of the mean and the variance of what comes later. The loss looks
good; in generation the later tokens do not exist, and quality falls for no visible reason.

## How to fix it
Take statistics of one step's features: `LayerNorm(H)` or `RMSNorm(H)` over the last axis, no group or instance norm
over time. Where a norm over time is wanted, use only steps up to the present one (a cumulative norm).

## Sources
Questions 23, 26 and 65. Luo and Mesgarani 2018, Conv-TasNet, https://arxiv.org/abs/1809.07454 (cumulative norm where
the global one is not causal); Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import percent
from normwise.facts import Facts
from normwise.facts.causality import Causality, Trained, in_train_mode
from normwise.facts.differences import DIFFER
from normwise.facts.labels import counts_tokens
from normwise.facts.repairs import effect
from normwise.rendering import both
from normwise.targets import Target

ZH = """归一化让因果模型看到未来。

## 发现什么
替换序列中点之后的全部词元，在评估模式、float32 下逐个操作比较两次运行。报告这样的归一化：较早的步输入没有变，输出却
变了，而模型除此之外是因果的：用户声明（`claims=("causal",)`），或保持该归一化的输出后较早的步不再变化、较后的步仍随
较早的步变化。输入为浮点数且没有声明时为警告。编码器本来就看到全部，不报告；输入同时含编码器和解码器的序列时，逐个
替换。
正在训练的因果模型（训练模式、optimizer 或 `train_step`）还会以训练模式的批归一化运行：即使评估模式是因果的，
批统计量也跨越后面的步；声明为因果时为警告，否则仅作提示。

## 为什么重要
训练时模型学会从后文的均值和方差里读出答案。损失很好看；生成时后文并不存在，质量无端下降。

## 如何修复
只对一步的特征取统计量：在最后一轴上用 `LayerNorm(H)` 或 `RMSNorm(H)`，不用跨时间的组归一化或实例归一化。确实要跨时
间时，只用到当前步为止的内容（累积归一化）。

## 来源
问题 23、26、65。Luo 与 Mesgarani 2018，Conv-TasNet，https://arxiv.org/abs/1809.07454 （全局归一化不因果时用累积归一
化）；Ba、Kiros 与 Hinton 2016，https://arxiv.org/abs/1607.06450 。
"""

CODE = "AXS003"
SEVERITY = Severity.ERROR


def check(facts: Facts) -> Iterator[Finding]:
    """Report the norms through which later steps reach earlier ones of a model that is causal otherwise."""
    seen = facts.causality
    if seen.leaks:
        # signals are also filtered as a whole by models that run from left to right: there it takes a claim to be sure
        sure = seen.claimed or counts_tokens(facts.graph)
        yield _finding(seen, SEVERITY if sure else Severity.WARNING)
    elif (trained := in_train_mode(facts.exact)) is not None:
        yield _in_train_mode(trained)


def _in_train_mode(seen: Trained) -> Finding:
    count, by = len(seen.paths), percent(seen.change)
    return Finding(
        path=seen.paths[0],
        paths=seen.paths,
        severity=Severity.WARNING if seen.claimed else Severity.INFO,
        basis=Basis.MEASURED,
        message=both(
            f"in training, inputs after step {seen.step} move outputs before it by {by}: batch statistics",
            f"训练时，第 {seen.step} 步之后的输入使之前的输出变化 {by}：批统计量",
        ),
        evidence={
            "metric": "change of the outputs up to the step, relative",
            "value": seen.change,
            "floor": seen.still,
            "step": seen.step,
            "steps": seen.steps,
            "norms": count,
            "differ_above": DIFFER,
        },
        fix=both(
            "Normalize the features of each step alone (LayerNorm or RMSNorm), not batch and time together.",
            "只对每一步的特征归一化（LayerNorm 或 RMSNorm），不要跨批次和时间。",
        ),
        counterfactual=effect(
            both("the running statistics in place of the batch's", "用运行统计量代替批统计量"),
            "change of the outputs up to the step",
            seen.change,
            seen.still,
        ),
    )


def _finding(seen: Causality, severity: Severity) -> Finding:
    paths = tuple(s.row.path for s in seen.sites)
    first, by = seen.norms[0], percent(seen.change)
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.MEASURED,
        message=both(
            f"tokens after step {seen.step} move the outputs before it by {by}, through this norm alone",
            f"替换第 {seen.step} 步之后的词元，之前的输出变化 {by}，只经由该归一化",
        ),
        evidence={
            "metric": "change of the outputs up to the step, relative",
            "value": seen.change,
            "floor": first.floor,
            "step": seen.step,
            "steps": seen.steps,
            "norms": len(paths),
            "norm_change": first.change,
            "differ_above": DIFFER,
        },
        fix=both(
            "Normalize the features of each step alone (LayerNorm or RMSNorm over the last axis), not over time.",
            "只对每一步的特征归一化（最后一轴上的 LayerNorm 或 RMSNorm），不要跨时间。",
        ),
        counterfactual=effect(
            both("this norm held where its own input is unchanged", "在输入未变处保持该归一化的输出"),
            "change of the outputs up to the step",
            seen.change,
            seen.held,
        ),
    )


class _Norm(nn.Module):
    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(self.axes, keepdim=True) + 1e-5)


class _Decoder(nn.Module):
    """A causal convolution over two steps behind a norm."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), _Norm(axes)
        self.now, self.before, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        earlier = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.head((self.now(x) + self.before(earlier)).tanh())


def _target(axes: tuple[int, ...]) -> Target:
    return Target(model=_Decoder(axes).eval(), args=(torch.arange(18).view(2, 9) % 11,))


def bad() -> Target:
    """Return a causal model with a norm over all steps."""
    return _target((-2, -1))


def good() -> Target:
    """Return the same model, each step normalized alone."""
    return _target((-1,))
