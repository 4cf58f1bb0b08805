"""Gains that training never moved.

## What it finds
A trained model in which most gains of its LayerNorms and RMSNorms are bit-exactly the neutral 1. With the checkpoint
the finding says whether its keys are there and hold the same numbers (then nothing was lost in loading), else whether
it has none. It is a warning only where the optimizer proves that an update was lost: a gain in half precision, with
steps taken, a gradient in the optimizer's averages and a learning rate, that still is its initial value; or gains that
want gradients and are in no group of the optimizer, although the matrices beside them are. The latter is a warning
where the optimizer has stepped and they still are 1, or where it trains other vectors (one for matrices alone has
another beside it). Frozen gains, and parts that are missing with their matrices (adapters, two networks), are sound.

Of a checkpoint by itself, gains that all are exactly 0 or 1 are a remark.

## Why it matters
The same signature has four causes: norms that nothing trains, norms trained without a gain and exported with ones
(harmless), gains lost in loading (garbage), and gains in bfloat16, which at 1.0 move only by steps of 1/256 or 1/128:
an AdamW step at usual rates is rounded away, every time.

## How to fix it
If the keys are there and equal, nothing. In half precision, train gains with float32 master weights, or store them
around 0 (`1 + weight`), where bfloat16 has fine steps.

## Sources
Question 41. https://github.com/huggingface/transformers/issues/24243 (every LayerNorm weight of OPT is 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.rules._examples import Float32RMSNorm
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.gains import Gain
from normwise.facts.optimizers import groups, left_out, mixed, states
from normwise.rendering import both
from normwise.spec import Kind
from normwise.targets import Target
from normwise.targets.checkpoint import Stored
from normwise.targets.checkpoint.keys import Keys

CODE = "PAR009"
SEVERITY = Severity.WARNING
READS_CHECKPOINTS = True

SEVERAL = 2  # one gain of 1 is no pattern: it may have been folded into a matrix
STARTS = (0.0, 1.0)  # of a gain that is stored: in a norm that adds 1 to it, and in a plain one
MOST = 0.5  # of the gains: with fewer, some are simply not trained

ZH = """训练从未移动过的增益。

## 发现什么
一个已训练的模型，其 LayerNorm 和 RMSNorm 的大多数增益逐位等于中性值 1。给出检查点时，会说明其中是否有这些键且
数值相同（那么加载没有丢失任何东西），还是根本没有。只有优化器能证明更新丢失时才是警告：半精度的增益，优化器走过若干
步、平均梯度不为零、学习率不为零，而增益仍是初始值；或需要梯度的增益不在优化器的任何组中，而旁边的矩阵都在。后者在优化器
已走过若干步而增益仍为 1，或优化器也训练其他向量时为警告（只管矩阵的优化器旁边还有另一个）。冻结的增益，以及连同矩阵一起
缺席的部分（适配器、两个网络）没有问题。只有检查点时，恰为 0 或 1 的增益只作提示。

## 为什么重要
同一现象有四种原因：没有优化器训练它；训练时归一化没有增益、导出时写成 1（无害）；加载时丢失（输出是垃圾）；增益为
bfloat16，在 1.0 处只能以 1/256 或 1/128 的步长移动，通常学习率下 AdamW 的每一步都被舍入掉。

## 如何修复
若键存在且相等，则无需修复。半精度时，用 float32 主权重训练增益，或以 0 为中心存储（`1 + weight`），bfloat16 在那里
步长很细。

## 来源
问题 41。https://github.com/huggingface/transformers/issues/24243（OPT 的所有 LayerNorm 权重都是 1）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report gains that are exactly 1 in a model that was trained."""
    if facts.target.stored is not None:
        yield from _in_checkpoint(facts.target.stored)
        return
    gains = facts.gains.of(Kind.LAYER, Kind.RMS)
    if not gains:
        return
    absent = _absent(facts, gains)
    if absent:
        yield _in_no_group(facts, absent, len(gains))
        return
    if not facts.gains.loaded and facts.gains.trained is not True:
        if facts.gains.trained is None:
            raise NotKnown(both("needs trained weights: pass checkpoint=...", "需要已训练的权重：传入 checkpoint=..."))
        return
    still = [g for g in gains if g.unmoved]
    lost = [g for g in still if _lost(g, facts.target.optimizer)]
    if lost:
        yield _lost_updates(lost, len(gains))
    elif len(still) >= max(SEVERAL, MOST * len(gains)):
        yield _unmoved(facts, still, len(gains))


def _in_checkpoint(stored: Stored) -> Iterator[Finding]:
    """Report gains of a checkpoint that are 0 or 1 in every channel: where norms of either convention start."""
    norms = [n for n in stored.norms if n.keys is not Keys.RUNNING and n.tensors["weight"].numel() > 1]
    still = [n for n in norms if any(bool((n.tensors["weight"] == start).all()) for start in STARTS)]
    if len(still) < max(SEVERAL, MOST * len(norms)):
        return
    dtypes = {n.tensors["weight"].dtype for n in still}
    dtype = str(next(iter(dtypes))).removeprefix("torch.") if len(dtypes) == 1 else "mixed"
    step = max(torch.finfo(d).eps / 2 for d in dtypes)
    yield Finding(
        paths=tuple(n.path for n in still),
        severity=Severity.INFO,
        basis=Basis.PROOF,
        message=both(
            f"{len(still)} of {counted(len(norms), 'gain')} ({dtype}) are exactly what a fresh norm starts with",
            f"{len(norms)} 个增益（{dtype}）中有 {len(still)} 个恰为新建归一化的初始值",
        ),
        evidence={"gains": len(still), "of": len(norms), "dtype": dtype, "smallest_step_at_1": step},
        fix=both(
            "Nothing if they were frozen or exported so; in half precision keep float32 masters for them.",
            "若有意冻结或导出如此则无需修复；半精度时为其保留 float32 主权重。",
        ),
    )


def _absent(facts: Facts, gains: Sequence[Gain]) -> list[Gain]:
    optimizer = facts.target.optimizer
    if optimizer is None:
        return []
    try:
        names = set(left_out(facts.target.model, optimizer, [g.path for g in gains]))
    except NotKnown:
        return []
    return [g for g in gains if g.path in names]


def _in_no_group(facts: Facts, gains: Sequence[Gain], of: int) -> Finding:
    still = sum(g.unmoved for g in gains)
    # an optimizer for matrices alone has one for vectors beside it: then steps would have moved the gains
    stuck = still == len(gains) and bool(states(facts.target.optimizer))
    sure = stuck or mixed(facts.target.model, facts.target.optimizer)
    return Finding(
        paths=tuple(dict.fromkeys(g.site.row.path for g in gains)),
        severity=SEVERITY if sure else Severity.INFO,
        basis=Basis.PROOF,
        message=both(
            f"{len(gains)} of {counted(of, 'gain')} in no group of the optimizer; {still} still exactly 1",
            f"{of} 个增益中有 {len(gains)} 个不在优化器的任何组中；{still} 个仍恰为 1",
        ),
        evidence={"gains": len(gains), "of": of, "optimizer": type(facts.target.optimizer).__name__},
        fix=both(
            "Add them as a group with weight_decay=0.0, or set requires_grad=False where they are meant to stay.",
            "把它们作为 weight_decay=0.0 的一组加入；若有意不训练，则设 requires_grad=False。",
        ),
    )


def _state(gain: Gain, optimizer: Any) -> Mapping[str, Any]:
    return states(optimizer).get(id(gain.parameter), {})


def _rate(gain: Gain, optimizer: Any) -> float:
    try:
        return next((g.lr for g in groups(optimizer) for p in g.params if p is gain.parameter), 0.0)
    except NotKnown:
        return 0.0


def _lost(gain: Gain, optimizer: Any) -> bool:
    """Whether the optimizer stepped with a gradient for a gain in half precision that did not move."""
    half = gain.parameter.dtype in (torch.bfloat16, torch.float16)
    if not half or not gain.parameter.requires_grad or not _rate(gain, optimizer) > 0:
        return False
    averages = [v for k, v in _state(gain, optimizer).items() if k in ("exp_avg", "momentum_buffer")]
    return any(isinstance(a, torch.Tensor) and bool((a != 0).any()) for a in averages)


def _lost_updates(gains: Sequence[Gain], of: int) -> Finding:
    dtype = str(gains[0].parameter.dtype).removeprefix("torch.")
    paths = tuple(dict.fromkeys(g.site.row.path for g in gains))
    return Finding(
        paths=paths,
        severity=Severity.WARNING,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(gains), f'{dtype} gain')} of {of} still exactly 1 after steps with a gradient",
            f"{of} 个增益中有 {len(gains)} 个 {dtype} 增益在带梯度的更新后仍恰为 1",
        ),
        evidence={
            "gains": len(gains),
            "of": of,
            "dtype": dtype,
            "smallest_step_at_1": float(torch.finfo(gains[0].parameter.dtype).eps) / 2,
        },
        fix=both(
            "Keep float32 master weights for gains, or store them around 0 in a norm that computes 1 + weight.",
            "为增益保留 float32 主权重，或在计算 1 + weight 的归一化中以 0 为中心存储。",
        ),
    )


def _unmoved(facts: Facts, gains: Sequence[Gain], of: int) -> Finding:
    stored = facts.gains.stored_as_given(gains)
    paths = tuple(dict.fromkeys(g.site.row.path for g in gains))
    there = (
        both("no checkpoint to compare with", "没有可比较的检查点")
        if stored is None
        else both(f"{stored} of them equal in the checkpoint", f"其中 {stored} 个与检查点相同")
    )
    return Finding(
        paths=paths,
        severity=Severity.INFO,
        basis=Basis.PROOF,
        message=both(
            f"{len(gains)} of {counted(of, 'gain')} are exactly 1 in a trained model; {there}",
            f"已训练模型的 {of} 个增益中有 {len(gains)} 个恰为 1；{there.zh}",
        ),
        evidence={"gains": len(gains), "of": of, "equal_in_checkpoint": stored},
        fix=both(
            "Nothing if the checkpoint has these keys; otherwise find out why they were not loaded.",
            "若检查点中有这些键则无需修复；否则查明为何没有加载。",
        ),
    )


def _target(*, rate: float) -> Target:
    """Return a model trained for three steps in bfloat16."""
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Float32RMSNorm(), nn.Linear(16, 16))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0.0, 0.2, generator=random)
    model.to(torch.bfloat16)
    vectors, matrices = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (False, True))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=rate)
    x = torch.randn(8, 16, generator=random).to(torch.bfloat16)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - x.roll(1, -1)).float().square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return Target(model=model, args=(x,), optimizer=optimizer)


def bad() -> Target:
    """Return a model whose gains in bfloat16 a rate of 1e-3 cannot move."""
    return _target(rate=1e-3)


def good() -> Target:
    """Return the same model trained at a rate that moves them."""
    return _target(rate=1e-2)
