"""A deep post-norm stack, about to be trained at full rate, whose tokens and gradients collapse at the start.

## What it finds
All of these together: a post-norm stack of 24 sublayers or more, not trained yet; an optimizer that divides by the
gradient's size, whose schedule begins at half its peak or more; a first step that moves the weights by 0.5 % or more;
and, measured on the example inputs, a gradient of the median token that falls from the output into the stack while the
tokens become one vector, or one position holds the gradient. Depth alone is no fault: the same stack with small initial
weights, with DeepNorm, or with a warm-up is silent.

## Why it matters
With branches as large as the stream, attention averages the tokens until all are alike; then queries and keys get no
gradient, and Adam's first steps, of full size whatever the gradient, fix that state: the loss stays where a model
without context would be. The gradient norm of a layer hides it, as one position may hold nearly all of it.

## How to fix it
Warm the rate up from 0 over hundreds of steps, or make the branches small: DeepNorm, smaller initial weights on value,
output and MLP matrices. Or place the norms before the sublayers, with a final norm.

## Sources
Questions 46 to 50, and 62. https://github.com/pytorch/pytorch/issues/55270 (does not train beyond 12 layers); Xiong et
al. 2020, https://arxiv.org/abs/2002.04745; Noci et al. 2022, rank collapse, https://arxiv.org/abs/2206.03126.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts, needs, schedule
from normwise.facts.freshness import untrained
from normwise.facts.optimizers import groups
from normwise.facts.records import ProfileRow, StackKind
from normwise.facts.repairs import effect
from normwise.facts.rewiring import rewired
from normwise.facts.tokens import token_cosine
from normwise.rendering import both
from normwise.targets import Target, Weights

ZH = """很深的后置归一化堆叠即将以全速训练，而它的词元和梯度在起点就已塌缩。

## 发现什么
同时满足：24 个以上子层的后置归一化堆叠，尚未训练；优化器按梯度大小做归一，且学习率计划从峰值的一半以上开始；
第一步使权重变动 0.5% 以上；并且在示例输入上测得：中位词元的梯度从输出向内衰减，同时各词元变成同一个向量，
或一个位置占据了梯度。深度本身不是错：同样的堆叠用小的初始权重、DeepNorm 或预热就不会报告。

## 为什么重要
分支与残差流一样大时，注意力把词元平均到彼此相同；此后查询和键得不到梯度，而 Adam 的头几步无论梯度大小都走满步长，
把这个状态固定下来：损失停在没有上下文的模型的水平。一层的梯度范数看不出来，因为一个位置可能占据几乎全部梯度。

## 如何修复
让学习率从 0 用数百步预热；或让分支变小：DeepNorm，或减小 value、输出和 MLP 矩阵的初始权重。
或者把归一化放在子层之前，并加末端归一化。

## 来源
问题 46 至 50，以及 62。https://github.com/pytorch/pytorch/issues/55270（超过 12 层就训练不动）；
Xiong 等 2020，https://arxiv.org/abs/2002.04745；Noci 等 2022，秩塌缩，https://arxiv.org/abs/2206.03126。
"""

CODE = "PLC005"
SEVERITY = Severity.WARNING

# 12 blocks: where post-norm translation models stop training without warm-up, while 6 blocks still do
# (Wang et al. 2019, https://arxiv.org/abs/1906.01787)
SUBLAYERS = 24
# Adam's first step is the rate itself. A 12-block character model trains at 0.24 % of its weights' size a step and
# stays at the unigram entropy at 0.8 %.
UPDATE = 0.005
# The gradient of the median token at the output over its smallest inside: 1.7 where training fails at 12 blocks, 4 to
# 35 in causal ones; 1.2 with 24 blocks whose initial weights are small, which train, and 1.0 in pre-norm stacks, where
# it grows towards the input.
FALL = 1.5
# mean cosine of two tokens behind the last block, or the share of one position in the gradient
COLLAPSED = 0.9
SHARE = 0.5


def check(facts: Facts) -> Iterator[Finding]:
    """Report deep post-norm stacks that collapse and are about to be trained without a warm-up."""
    stacks = facts.placement.stacks
    deep = [i for i, s in enumerate(stacks) if s.kind is StackKind.POST and s.sublayers >= SUBLAYERS]
    if not deep:
        return
    optimizer = facts.target.optimizer
    if optimizer is None:
        raise NotKnown(needs.OPTIMIZER)
    if facts.target.weights is not Weights.GIVEN:
        raise NotKnown(both("needs the weights that training starts from", "需要训练开始时的权重"))
    if not untrained(facts) or not schedule.adaptive(optimizer):
        return
    matrices = [p for g in groups(optimizer) for p in g.params if p.dim() > 1 and p.numel() and not p.is_meta]
    rates = schedule.read(optimizer, facts.target.scheduler)
    update = _first_update(matrices, rates.rates[0])
    if rates.warms_up or update < UPDATE:
        return
    for index in deep:
        finding = _judged(facts, index, rates, update)
        if finding is not None:
            yield finding


def _first_update(matrices: list[torch.Tensor], rate: float) -> float:
    """Return a first step of full size relative to the median matrix's root mean square."""
    sizes = sorted(float(p.detach().float().square().mean().sqrt()) for p in matrices)
    middle = sizes[len(sizes) // 2] if sizes else 0.0
    return rate / middle if middle > 0 else 0.0


def _judged(facts: Facts, index: int, rates: schedule.Schedule, update: float) -> Finding | None:
    rows = [r for r in facts.profile if r.stack == index][1:]  # the first add still has the embedding's scale
    medians = [r.grad_median * r.residual_rms for r in rows if r.grad_median and r.residual_rms]
    cosine = rows[-1].token_cosine if rows else None
    if len(medians) < len(rows) or cosine is None:
        raise NotKnown(both("needs a stream of tokens [B, T, H] and its gradient", "需要 [B, T, H] 的词元流及其梯度"))
    fall, share = medians[-1] / min(medians), max(r.grad_first_share or 0.0 for r in rows)
    if fall < FALL or (cosine < COLLAPSED and share < SHARE):
        return None
    stack = facts.placement.stacks[index]
    alike = cosine >= COLLAPSED
    seen = f"tokens alike (cosine {cosine:.2f})" if alike else f"{share:.0%} on position 0"
    seen_zh = f"词元相同（余弦 {cosine:.2f}）" if alike else f"{share:.0%} 在位置 0"
    paths = tuple(dict.fromkeys(m.path for m in stack.members))
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"{stack.sublayers} post-norm sublayers, no warm-up: median token's gradient falls {fall:.1f}x, {seen}",
            f"{stack.sublayers} 个后置归一化子层且无预热：中位词元的梯度衰减 {fall:.1f} 倍，{seen_zh}",
        ),
        evidence={
            "metric": "median_token_gradient_output_over_smallest",
            "value": fall,
            "floor": FALL,
            "token_cosine_at_the_end": cosine,
            "share_of_position_0": share,
            "query_gradient_smallest_over_largest": _queries(facts, index),
            "branch_over_stream": _branch(rows),
            "first_rate_over_peak": rates.rates[0] / rates.peak,
            "schedule_given": rates.given,
            "first_update_over_weights": update,
            "sublayers": stack.sublayers,
        },
        counterfactual=_deepnorm(facts, index, cosine),
        fix=both(
            "Warm the learning rate up over hundreds of steps, scale branches as DeepNorm does, or place norms before.",
            "用数百步预热学习率，缩小分支（DeepNorm），或把归一化放到子层之前。",
        ),
    )


def _queries(facts: Facts, index: int) -> float | None:
    """Return the smallest gradient of the queries' weights by sublayer over the largest."""
    sizes = [r.query_grad for r in facts.profile if r.stack == index and r.query_grad is not None]
    return min(sizes) / max(sizes) if sizes and max(sizes) > 0 else None


def _branch(rows: list[ProfileRow]) -> float | None:
    ratios = sorted(r.branch_rms / r.residual_rms for r in rows if r.branch_rms is not None and r.residual_rms)
    return ratios[len(ratios) // 2] if ratios else None


def _deepnorm(facts: Facts, index: int, cosine: float) -> dict[str, Any] | None:
    """Run the batch with DeepNorm's scales: alpha on the skip, and branches as from weights of gain beta."""
    adds, blocks = facts.placed.streams[index].adds, facts.placement.stacks[index].depth
    alpha, beta = (2 * blocks) ** 0.25, (8 * blocks) ** -0.25
    try:
        run = rewired(facts, adds, lambda skip, branch: alpha * skip + beta**2 * branch, [adds[-1].out])
        after = token_cosine(run.of(adds[-1].out), 1)
    except NotKnown:
        return None
    if after is None:
        return None
    change = both("DeepNorm's scales on skip and branch", "跳连与分支采用 DeepNorm 的缩放")
    return effect(change, "cosine_between_tokens_at_the_end", cosine, after)


def _target(schedule_of: Callable[[int], float]) -> Target:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(16, 16), encoder, nn.Linear(16, 16))
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule_of)
    return Target(model=model, args=(torch.randint(0, 16, (4, 8)),), optimizer=optimizer, scheduler=scheduler)


def bad() -> Target:
    """Return a deep post-norm encoder with Xavier weights, at a constant rate."""
    return _target(lambda step: 1.0)


def good() -> Target:
    """Return the same encoder with a warm-up."""
    return _target(lambda step: min(1.0, (step + 1) / 400))
