"""DeepNorm's constant on the skip without its initial gain, or the gain without the constant.

## What it finds
In a post-norm stack that is not trained yet: DeepNorm's alpha on the skip while the value, output and MLP matrices do
not have its initial gain beta (Xavier times (8N)^(-1/4) for N blocks), or all of them at that gain and no alpha. Ten
percent are tolerated, the encoder-decoder constants are accepted as well, and smaller weights are no fault. An alpha
that belongs to another depth is worth knowing.

## Why it matters
The bound on how far one step moves the output holds for both halves together: alpha keeps the stream, beta keeps the
branches small. Published code has used the inverse gain, (8N)^(+1/4), or one alpha for every depth.

## How to fix it
Xavier with gain (8N)^(-1/4) on value, output, fc1 and fc2, gain 1 on query and key, and `norm(alpha * x + f(x))` with
alpha = (2N)^(1/4).

## Sources
Questions 49, 66 and 67. Wang et al. 2022, DeepNet, https://arxiv.org/abs/2203.00555 (figure 2: both constants);
https://github.com/pixeli99/MixLN (a baseline with the inverse gain).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.freshness import untrained
from normwise.facts.initial_gains import matrix_gains
from normwise.facts.records import Stack, StackKind
from normwise.facts.repairs import effect
from normwise.facts.rewiring import rewired
from normwise.rendering import both
from normwise.targets import Target, Weights

ZH = """跳连上有 DeepNorm 的常数而没有它的初始增益，或反之。

## 发现什么
在尚未训练的后置归一化堆叠中：跳连上有 DeepNorm 的 alpha，而 value、输出和 MLP 矩阵没有它的初始增益 beta
（N 块时为 Xavier 乘以 (8N)^(-1/4)）；或者它们都是这个增益而没有 alpha。
容许 10% 的偏差，也接受编码器-解码器的常数；更小的权重不算错。alpha 属于另一深度时只作提示。

## 为什么重要
一步更新对输出影响的上界要求两半同时成立：alpha 保住残差流，beta 让分支保持很小。
公开代码中出现过用反向增益 (8N)^(+1/4)，或所有深度共用一个 alpha。

## 如何修复
value、输出、fc1 和 fc2 用增益 (8N)^(-1/4) 的 Xavier，查询和键用增益 1；
`norm(alpha * x + f(x))`，alpha = (2N)^(1/4)。

## 来源
问题 49、66 和 67。Wang 等 2022，DeepNet，https://arxiv.org/abs/2203.00555（图 2：两个常数）；
https://github.com/pixeli99/MixLN（基线用了反向增益）。
"""

CODE = "PLC006"
SEVERITY = Severity.WARNING

TOLERANCE = 0.1
# The reverse fault is told by many weights that all have one unusual gain. The sampling error of a standard deviation
# is 1 / sqrt(2 n): 2.2 % for 1024 numbers, of the median of six matrices less than half of that.
AGREE = 0.03
MATRICES = 6
# below, alpha and beta are what other designs use as well: sqrt(2) and 1/2
BLOCKS = 3


def check(facts: Facts) -> Iterator[Finding]:
    """Report post-norm stacks in which one of the two constants is missing."""
    stacks = [(i, s) for i, s in enumerate(facts.placement.stacks) if s.kind is StackKind.POST and s.depth >= BLOCKS]
    if not stacks or facts.target.weights is Weights.REAL:
        return
    if facts.target.weights is not Weights.GIVEN:
        raise NotKnown(both("needs the weights that training starts from", "需要训练开始时的权重"))
    if not untrained(facts):
        return
    for index, stack in stacks:
        alpha = _alpha(stack)
        gains = [each.gain for each in matrix_gains(facts, index)]
        if alpha is None or not gains:
            continue
        middle = sorted(gains)[len(gains) // 2]
        if alpha > 1 + TOLERANCE / 10:
            yield from _with_alpha(facts, index, alpha, middle, len(gains))
        elif _at_the_gain(gains, middle, _beta(stack.depth)):
            yield _finding(facts, index, alpha, middle, len(gains))


def _at_the_gain(gains: list[float], middle: float, beta: float) -> bool:
    """Whether all matrices were drawn with the gain of the depth."""
    alike = all(abs(g / beta - 1) < TOLERANCE for g in gains)
    return len(gains) >= MATRICES and alike and abs(middle / beta - 1) < AGREE


def _alpha(stack: Stack) -> float | None:
    scales = [m.wiring.skip_scale for m in stack.members if m.wiring.branch_scale == 1.0]
    same = len(scales) == stack.sublayers and max(scales) - min(scales) < 1e-3
    return scales[0] if same else None


def _beta(blocks: int) -> float:
    return (8 * blocks) ** -0.25


def _betas(blocks: int) -> tuple[float, ...]:
    """Return the gains of an encoder or a decoder alone, and of both beside one as deep (DeepNet, figure 2)."""
    return _beta(blocks), 0.87 * blocks ** (-5 / 16), (12 * blocks) ** -0.25


def _with_alpha(facts: Facts, index: int, alpha: float, gain: float, weights: int) -> Iterator[Finding]:
    stack = facts.placement.stacks[index]
    known = ((2 * stack.depth) ** 0.25, (3 * stack.depth) ** 0.25, 0.81 * stack.depth ** (5 / 16))
    meant = alpha**4 / 2  # the depth that an alpha of (2N)^(1/4) is for
    fits = any(abs(alpha / k - 1) < TOLERANCE for k in known)
    if not fits and abs(meant - round(meant)) > 0.02:
        return  # a constant of another design
    if gain > (1 + TOLERANCE) * max(_betas(stack.depth)):
        yield _finding(facts, index, alpha, gain, weights)
    elif not fits:
        yield _other_depth(stack, alpha, round(meant))


def _finding(facts: Facts, index: int, alpha: float, gain: float, weights: int) -> Finding:
    stack = facts.placement.stacks[index]
    beta, given = _beta(stack.depth), alpha > 1 + TOLERANCE / 10
    wanted = (2 * stack.depth) ** 0.25
    repair = _effect(facts, index, 1.0 if given else wanted, beta / gain if given else 1.0, weights)
    paths = tuple(dict.fromkeys(m.path for m in stack.members))
    if given:
        said = (
            f"alpha {alpha:.3f} on the skip, but initial gain {gain:.2f} instead of {beta:.2f} in the branches",
            f"跳连有 alpha {alpha:.3f}，但分支的初始增益是 {gain:.2f} 而不是 {beta:.2f}",
        )
    else:
        said = (
            f"the branches have initial gain {gain:.2f} of {stack.depth} blocks, but no alpha is on the skip",
            f"分支有 {stack.depth} 块的初始增益 {gain:.2f}，但跳连上没有 alpha",
        )
    return Finding(
        paths=paths,
        severity=SEVERITY if repair is not None else Severity.INFO,
        basis=Basis.MEASURED if repair is not None else Basis.PATTERN,
        message=both(*said),
        evidence={
            "metric": "initial_gain_relative_to_xavier",
            "value": gain,
            "floor": beta,
            "alpha": alpha,
            "alpha_of_the_depth": wanted,
            "blocks": stack.depth,
            "matrices": weights,
        },
        counterfactual=repair,
        fix=both(
            "Initialise value, output, fc1 and fc2 with Xavier gain (8N)^(-1/4) and use norm(alpha * x + f(x)).",
            "value、输出、fc1 和 fc2 用增益 (8N)^(-1/4) 的 Xavier 初始化，并用 norm(alpha * x + f(x))。",
        ),
    )


def _effect(facts: Facts, index: int, skip: float, gain: float, weights: int) -> dict[str, Any] | None:
    """Run the batch with the missing half: how much of the stream's first value is left at its end."""
    adds = facts.placed.streams[index].adds
    power = max(1, round(weights / len(adds)))  # matrices in a branch, each with the gain
    first, last = adds[0].skip.root, adds[-1].out
    try:
        base = facts.runs.base
        run = rewired(facts, adds, lambda x, f: skip * x + gain**power * f, [first, last])
        before, after = (_cosine(r.of(first), r.of(last)) for r in (base, run))
    except NotKnown:
        return None
    change = both("both of DeepNorm's constants", "同时采用 DeepNorm 的两个常数")
    return effect(change, "cosine_of_first_and_last_stream", before, after)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def _other_depth(stack: Stack, alpha: float, meant: int) -> Finding:
    paths = tuple(dict.fromkeys(m.path for m in stack.members))
    return Finding(
        paths=paths,
        severity=Severity.INFO,
        basis=Basis.PATTERN,
        message=both(
            f"alpha {alpha:.3f} is that of {meant} blocks, the stack has {stack.depth}",
            f"alpha {alpha:.3f} 属于 {meant} 块，而堆叠有 {stack.depth} 块",
        ),
        evidence={"alpha": alpha, "blocks": stack.depth, "blocks_of_alpha": meant},
        fix=both("Compute alpha from the depth: (2 * blocks) ** 0.25.", "由深度计算 alpha：(2 * blocks) ** 0.25。"),
    )


class _Block(nn.Module):
    def __init__(self, alpha: float, gain: float) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        self.norm, self.alpha = nn.LayerNorm(16), alpha
        for layer in (self.mlp[0], self.mlp[2]):
            nn.init.xavier_normal_(layer.weight, gain=gain)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.alpha * x + self.mlp(x))


def _target(*, gain: float) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(16**0.25, gain) for _ in range(8)))
    return Target(model=model, args=(torch.randn(2, 3, 16),))


def bad() -> Target:
    """Return eight blocks with alpha on the skip and plain Xavier weights."""
    return _target(gain=1.0)


def good() -> Target:
    """Return the same blocks with the gain of eight blocks."""
    return _target(gain=_beta(8))
