"""Last blocks of a trained model that hardly change the stream.

## What it finds
In a trained model, on the user's inputs: two or more blocks at the end of a stack whose every branch is below 2 % of
the stream, and without which the outputs change by less than 1 %. They are left out once to measure it. Only worth
knowing.

## Why it matters
In pre-norm stacks the stream grows while branches keep their size, so that the deepest blocks may have learned little:
depth that is paid for in every step and could be pruned, or used by another placement.

## How to fix it
Nothing is wrong with the function. To use the depth: scale branches down by depth (LayerNorm scaling), normalize the
branch (sandwich), or train fewer blocks; to save it, prune these blocks and measure the loss.

## Sources
Question 51. Gromov et al. 2024, https://arxiv.org/abs/2403.17887 (deep layers can be pruned); Sun et al. 2025, The
Curse of Depth, https://arxiv.org/abs/2502.05795.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.rules._examples import PreNormBlock
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.outcomes import outputs_of
from normwise.facts.records import StackKind
from normwise.facts.repairs import effect
from normwise.facts.rewiring import relative, rms
from normwise.rendering import both
from normwise.targets import InputsFrom, Target, Weights

ZH = """训练过的模型中几乎不改变残差流的末尾几块。

## 发现什么
在训练过的模型和用户的输入上：堆叠末尾有两块或更多，其每个分支都不到残差流的 2%，且去掉它们后输出变化不到 1%。
为此会去掉它们运行一次。只作提示。

## 为什么重要
前置归一化堆叠中残差流不断增长而分支大小不变，最深的几块可能学到很少：
每一步都为这些深度付费，却可以裁剪或换一种设计来利用。

## 如何修复
函数没有错。想利用深度：按深度缩小分支（LayerNorm scaling）、对分支归一化（三明治），或训练更少的块；
想节省：裁剪这些块并测量损失。

## 来源
问题 51。Gromov 等 2024，https://arxiv.org/abs/2403.17887（深层可裁剪）；
Sun 等 2025，The Curse of Depth，https://arxiv.org/abs/2502.05795。
"""

CODE = "PLC008"
SEVERITY = Severity.INFO

BRANCH = 0.02
# a loss near its minimum is quadratic in the outputs: 1 % of them is 0.01 % of it
OUTPUT = 0.01
BLOCKS = 2
_KINDS = (StackKind.PRE, StackKind.PARALLEL, StackKind.PARALLEL_SHARED, StackKind.NONE)


def check(facts: Facts) -> Iterator[Finding]:
    """Report stacks whose last blocks can be left out."""
    facts.placement  # noqa: B018 - without inputs nothing is known
    if not facts.target.weights.magnitudes_count or facts.target.inputs_from is not InputsFrom.GIVEN:
        raise NotKnown(both("needs trained weights and inputs of your data", "需要训练过的权重和你的数据"))
    if facts.gains.trained is not True:
        raise NotKnown(both("needs trained weights: these are as drawn", "需要训练过的权重：现在是初始值"))
    for index, stack in enumerate(facts.placement.stacks):
        idle = _idle(facts, index) if stack.kind in _KINDS and stack.depth > BLOCKS else []
        if len(idle) >= BLOCKS and (finding := _ablated(facts, index, idle)) is not None:
            yield finding


def _idle(facts: Facts, index: int) -> list[int]:
    """Return the blocks at the end whose branches are all small."""
    adds = facts.placed.streams[index].adds
    shares: dict[int, float] = {}
    base = facts.runs.base
    for add in adds:
        stream = rms(base.of(add.skip.values[0]))
        branch = max(rms(base.of(b)) for b in add.branches)
        layer = facts.placed.layers[add.index]
        shares[layer] = max(shares.get(layer, 0.0), branch / stream if stream > 0 else 1.0)
    found: list[int] = []
    for layer in sorted(shares, reverse=True):
        if shares[layer] >= BRANCH:
            break
        found.insert(0, layer)
    return found


def _ablated(facts: Facts, index: int, idle: list[int]) -> Finding | None:
    adds = facts.placed.streams[index].adds
    first = next(a for a in adds if facts.placed.layers[a.index] == idle[0])
    before, end = facts.runs.base.of(first.skip.values[0]), facts.runs.base.of(adds[-1].out)
    if before.numel() != end.numel() or before.shape[-1] != end.shape[-1]:
        return None
    before = before.reshape(end.shape)  # OPT adds on [B * T, H]; rows in another order would move the outputs

    def without(kept: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return before

    run = facts.runs.altered({adds[-1].out: without})
    change = relative(outputs_of(run)[0], outputs_of(facts.runs.base)[0])
    if change > OUTPUT:
        return None
    blocks = facts.placement.stacks[index].depth
    paths = tuple(dict.fromkeys(facts.graph.path(a.op) for a in adds if facts.placed.layers[a.index] in idle))
    said = both("these blocks left out", "去掉这些块")
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"the last {len(idle)} of {blocks} blocks can be left out: the outputs change by {change:.2%}",
            f"{blocks} 块中最后 {len(idle)} 块可以去掉：输出只变化 {change:.2%}",
        ),
        evidence={
            "metric": "relative_change_of_the_outputs",
            "value": change,
            "floor": OUTPUT,
            "idle_blocks": len(idle),
            "blocks": blocks,
            **_influence(facts, index, idle),
        },
        counterfactual=effect(said, "relative_change_of_the_outputs", 0.0, change),
        fix=both(
            "Prune these blocks and measure the loss, or use the depth: scale branches by depth or normalize them.",
            "裁剪这些块并测量损失；或利用这些深度：按深度缩放分支或对分支归一化。",
        ),
    )


def _influence(facts: Facts, index: int, idle: list[int]) -> dict[str, float]:
    """Return how far the idle blocks turn a token at most, and the median block, where it was measured."""
    try:
        rows = [row for row in facts.profile if row.stack == index]
    except NotKnown:
        return {}
    layers = [facts.placed.layers[add.index] for add in facts.placed.streams[index].adds]
    found = {layers[r.sublayer]: r.block_influence for r in rows if r.block_influence is not None}
    if not found.keys() >= set(idle):
        return {}
    largest = max(found[layer] for layer in idle)
    return {"block_influence_at_most": largest, "block_influence_of_the_median_block": median(found.values())}


def _target(*, factor: float) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(*(PreNormBlock() for _ in range(5)), nn.LayerNorm(8))
    with torch.no_grad():
        for i in (3, 4):
            for p in model[i].mlp.parameters():  # type: ignore[union-attr,operator]
                p.mul_(factor)
    return Target(model=model, args=(torch.randn(2, 3, 8),), weights=Weights.REAL)


def bad() -> Target:
    """Return a stack whose last two blocks write next to nothing."""
    return _target(factor=1e-3)


def good() -> Target:
    """Return the same stack with all blocks at work."""
    return _target(factor=1.0)
