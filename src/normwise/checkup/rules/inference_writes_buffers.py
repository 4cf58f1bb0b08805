"""Running statistics that a forward in eval mode writes.

## What it finds
Norms that change their running statistics although their module is in eval mode: `F.batch_norm(..., training=True)`
with buffers, or a running average of one's own, whatever its buffers are called, that does not ask `self.training`.
Found in the traced run or by running the norm alone, and proved on one forward of the model by comparing the buffers
bit by bit. Caches, position buffers and other state that is no statistic of a norm are left out, and so is a norm in
train mode (see BNS001).

## Why it matters
Each inference changes the model: the second answer for the same input differs from the first, two servers drift apart,
and the data that is served becomes part of the weights.

## How to fix it
Guard the update: `if self.training: ...`, and pass `training=self.training` to `F.batch_norm`.

## Sources
Question 18. https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.batch_norm.html (its argument
`training` is False by default and is not tied to the module's mode).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.gaps import still
from normwise.facts.trials import Trial
from normwise.graph import ValueKind
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS002"
SEVERITY = Severity.ERROR
EXPLAINS = ("AXS001", "BNS004")

ZH = """评估模式下的前向改写运行统计量。

## 发现什么
模块处于评估模式却仍改变其运行统计量的归一化：带缓冲区调用 `F.batch_norm(..., training=True)`，或自写的滑动平均
（无论缓冲区叫什么）不检查 `self.training`。
从追踪的运行中找到，或单独运行该归一化发现，并通过模型的一次前向逐位比较缓冲区来证明。
缓存、位置缓冲区等不是归一化统计量的状态不算；处于训练模式的归一化也不算（由 BNS001 报告）。

## 为什么重要
每次推理都会改变模型：同一输入的第二次回答与第一次不同，两台服务器逐渐分离，被服务的数据成为权重的一部分。

## 如何修复
为更新加上条件：`if self.training: ...`，并把 `training=self.training` 传给 `F.batch_norm`。

## 来源
问题 18。https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.batch_norm.html（其参数 `training`
默认为 False，与模块的模式无关）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report every norm whose statistics a forward in eval mode changes."""
    suspects = {p for p, live in facts.live_norms.items() if live.writes_in_eval}
    suspects |= {p for p, keeper in facts.keepers.items() if keeper.writes_in_eval}
    unknown: NotKnown | None = None
    try:
        suspects |= _in_the_graph(facts)
    except NotKnown as why:
        unknown = why
    if not suspects:
        if unknown is not None and (facts.running or unknown.why):
            raise unknown
        return
    trial = facts.trials.forward(prepare=still)
    changed = {b: c for b, c in trial.changed.items() if b.rpartition(".")[0] in suspects}
    if changed:
        yield _finding(trial, tuple(dict.fromkeys(b.rpartition(".")[0] for b in changed)), list(changed))


def _in_the_graph(facts: Facts) -> set[str]:
    """Return the modules that execute a norm and write a buffer of floating-point numbers."""
    graph, found = facts.traced.graph, set()
    buffers = {v.id: v.names[0] for v in graph.values if v.kind is ValueKind.BUFFER and v.floating and v.names}
    holders = {graph.calls[n.call].path for n in facts.norm_calls.norms}
    for norm in facts.norm_calls.norms:
        if norm.uses_batch and norm.running_mean in buffers:
            found.add(buffers[norm.running_mean].rpartition(".")[0])
    for op in graph.ops:
        if op.name.endswith("_") and op.inputs and op.inputs[0] in buffers:
            holder = buffers[op.inputs[0]].rpartition(".")[0]
            if holder in holders:
                found.add(holder)
    return found


def _finding(trial: Trial, paths: tuple[str, ...], buffers: list[str]) -> Finding:
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"one forward in eval mode wrote the statistics of {counted(len(paths), 'norm')}",
            f"评估模式下的一次前向改写了 {len(paths)} 个归一化的统计量",
        ),
        evidence={
            "metric": "largest change of a buffer in one forward",
            "value": max(trial.changed[b].largest for b in buffers),
            "floor": 0.0,
            "norms": len(paths),
            "buffers": buffers,
        },
        fix=both(
            "Update the statistics only if self.training; pass training=self.training to F.batch_norm.",
            "仅在 self.training 时更新统计量；把 training=self.training 传给 F.batch_norm。",
        ),
    )


class _Norm(nn.Module):
    def __init__(self, channels: int, *, guarded: bool) -> None:
        super().__init__()
        self.guarded = guarded
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = self.get_buffer("running_mean"), self.get_buffer("running_var")
        normed = (x - mean) * (var + 1e-5).rsqrt()
        if self.training or not self.guarded:
            with torch.no_grad():
                mean.lerp_(x.mean(0), 0.1)
        return normed


def _target(*, guarded: bool) -> Target:
    model = nn.Sequential(nn.Linear(4, 6), _Norm(6, guarded=guarded), nn.Linear(6, 2)).eval()
    return Target(model=model, args=(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),))


def bad() -> Target:
    """Return a norm that updates its running mean in every mode."""
    return _target(guarded=False)


def good() -> Target:
    """Return the same norm, which updates in train mode only."""
    return _target(guarded=True)
