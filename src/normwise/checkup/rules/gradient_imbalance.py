"""Blocks that learn a thousand times faster than others.

## What it finds
One call of `train_step` is watched: the gradient of each block's weights relative to the weights. Reported is a spread
of more than 1000 between the blocks of a stack, with its placement. Only worth knowing from
one step: initial LayerScale and zero-initialised branches look the same at first, and lasting imbalance is for a watch
of the training to see. Blocks without any gradient (frozen, gated by 0) do not count.

## Why it matters
With one learning rate for all, either the slow blocks stay as drawn or the fast ones diverge; optimizers that divide by
the gradient's size hide it until the gradient falls below their eps.

## How to fix it
Compare branch and stream by depth in the profile: a placement with a path around the norms, smaller initial branches or
a warm-up evens it out.

## Sources
Questions 47, 48, 49 and 62. Xiong et al. 2020, https://arxiv.org/abs/2002.04745; Liu et al. 2020,
https://arxiv.org/abs/2004.08249 (unbalanced gradients are not all of it).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts, needs
from normwise.facts.stepping import Gradients, watched
from normwise.rendering import both
from normwise.targets import Target

ZH = """有些块比其他块学得快一千倍。

## 发现什么
观察一次 `train_step`：各块权重的梯度相对于权重的大小。同一堆叠的块之间相差 1000 倍以上时报告，并给出归一化位置。
只看一步时只作提示：初始的 LayerScale 和零初始化的分支开始时也是这样，持续的不平衡由训练监视来看。
没有任何梯度的块（冻结、被 0 门控）不计。

## 为什么重要
所有块共用一个学习率时，要么慢的块停在初始值，要么快的块发散；
按梯度大小归一的优化器会掩盖它，直到梯度低于其 eps。

## 如何修复
在曲线中按深度比较分支与残差流：有绕过归一化路径的设计、更小的初始分支或预热可以使其均衡。

## 来源
问题 47、48、49 和 62。Xiong 等 2020，https://arxiv.org/abs/2002.04745；
Liu 等 2020，https://arxiv.org/abs/2004.08249（梯度不平衡不是全部原因）。
"""

CODE = "DYN001"
SEVERITY = Severity.INFO

SPREAD = 1e3


def check(facts: Facts) -> Iterator[Finding]:
    """Report stacks whose blocks' relative gradients differ by more than a thousand."""
    if facts.target.train_step is None:
        raise NotKnown(needs.TRAIN_STEP)
    stacks = facts.placement.stacks
    if not stacks:
        return
    gradients = watched(facts)
    for index in range(len(stacks)):
        ratios = _by_block(facts, index, gradients)
        if len(ratios) > 1 and max(ratios.values()) > SPREAD * min(ratios.values()):
            yield _finding(facts, index, ratios)


def _by_block(facts: Facts, index: int, gradients: Gradients) -> dict[int, float]:
    """Return the gradient over the weights of each block: all parameters that its branches read."""
    graph = facts.graph
    squares: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    counted: set[str] = set()
    for add in facts.placed.streams[index].adds:
        for op in (graph.ops[o] for o in sorted(add.region)):
            for value in (graph.values[i] for i in op.inputs):
                name = value.names[0] if value.names else ""
                if name not in gradients or name in counted or len(value.shape) < 2:
                    continue
                counted.add(name)
                gradient, weight = gradients[name]
                block = squares[facts.placed.layers[add.index]]
                block[0] += gradient**2
                block[1] += weight**2
    ratios = {layer: math.sqrt(g / w) for layer, (g, w) in squares.items() if g > 0 and w > 0}
    return {layer: ratio for layer, ratio in ratios.items() if math.isfinite(ratio)}


def _finding(facts: Facts, index: int, ratios: dict[int, float]) -> Finding:
    stack, adds = facts.placement.stacks[index], facts.placed.streams[index].adds
    slow, fast = min(ratios, key=lambda k: ratios[k]), max(ratios, key=lambda k: ratios[k])
    spread = ratios[fast] / ratios[slow]

    def path(layer: int) -> str:
        return next(facts.graph.path(a.op) for a in adds if facts.placed.layers[a.index] == layer)

    return Finding(
        path=path(slow),
        paths=tuple(dict.fromkeys((path(slow), path(fast)))),
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"block {slow} gets a gradient {spread:.3g}x smaller than block {fast}, relative to its weights",
            f"第 {slow} 块相对权重的梯度比第 {fast} 块小 {spread:.3g} 倍",
        ),
        evidence={
            "metric": "relative_gradient_largest_over_smallest",
            "value": spread,
            "floor": SPREAD,
            "placement": stack.name or str(stack.kind),
            "token_cosine_at_the_end": _cosine(facts, index),
            "blocks": stack.depth,
            "relative_gradient_by_block": {str(k): v for k, v in sorted(ratios.items())},
        },
        fix=both(
            "Compare branch and stream by depth; smaller initial branches, another placement or a warm-up even it out.",
            "按深度比较分支与残差流；更小的初始分支、另一种归一化位置或预热可以使其均衡。",
        ),
    )


def _cosine(facts: Facts, index: int) -> float | None:
    """Return how alike the tokens are where the stream ends; in a collapsed stack queries and keys get no gradient."""
    try:
        rows = [row for row in facts.profile if row.stack == index]
    except NotKnown:
        return None
    return rows[-1].token_cosine if rows else None


class _Block(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.norm, self.mlp, self.scale = nn.LayerNorm(8), nn.Linear(8, 8), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.mlp(self.norm(x))


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def _target(*, scale: float) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(scale if i == 1 else 0.5) for i in range(4)), nn.LayerNorm(8), nn.Linear(8, 2))
    return Target(model=model, args=(torch.randn(2, 3, 8),), train_step=_step)


def bad() -> Target:
    """Return a stack in which one branch is scaled by 1e-5."""
    return _target(scale=1e-5)


def good() -> Target:
    """Return the same stack with equal branches."""
    return _target(scale=0.5)
