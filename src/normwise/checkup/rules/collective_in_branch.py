"""A synchronizing norm in a branch that some ranks may not take.

## What it finds
A norm that shares its statistics between processes and runs another number of times on the inputs of another rank
(`inputs_other_rank=...`), counted in a training forward of each. A batch norm without synchronization that does so is
only worth knowing: it waits for nobody, but its parameters get no gradient on some ranks.

## Why it matters
Each call of such a norm is a collective that waits for all ranks. A rank that takes another branch (an empty batch, a
missing modality, an early exit, a loop over a data-dependent number of items) never comes, and the run hangs until its
timeout, or the ranks exchange the statistics of different layers without noticing.

## How to fix it
Make every rank call the norm equally often: run the branch on a masked or dummy batch and drop the result, or use a
norm without synchronization there.

## Sources
Question 17. https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html (all processes take part).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.facts import Facts, branches
from normwise.rendering import both
from normwise.targets import Target

CODE = "DST004"
SEVERITY = Severity.ERROR

ZH = """同步归一化位于某些 rank 可能不走的分支中。

## 发现什么
在进程间共享统计量的归一化，在另一个 rank 的输入（`inputs_other_rank=...`）上运行的次数不同；次数由各自的一次训练前
向数得。不同步的批归一化若如此，只作提示：它不等待任何进程，但在某些 rank 上其参数没有梯度。

## 为什么重要
每次调用这样的归一化都是等待所有 rank 的集合通信。走了另一分支的 rank（空批次、缺失的模态、提前退出、次数依赖数据的
循环）永远不会到来，运行会挂起直到超时，或者各 rank 在不知不觉中交换了不同层的统计量。

## 如何修复
让每个 rank 调用该归一化的次数相同：在掩码或虚拟批次上运行该分支并丢弃结果，或在那里使用不同步的归一化。

## 来源
问题 17。https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html（所有进程都要参与）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms that the inputs of two ranks call differently often."""
    uneven = [c for c in branches.calls(facts) if c.here != c.there]
    for synchronizes in (True, False):
        found = [c for c in uneven if c.synchronizes == synchronizes]
        if found:
            yield _finding(found, SEVERITY if synchronizes else Severity.INFO)


def _finding(uneven: Sequence[branches.Calls], severity: Severity) -> Finding:
    first = uneven[0]
    loud = severity is SEVERITY
    return Finding(
        path=first.path,
        paths=tuple(c.path for c in uneven),
        severity=severity,
        basis=Basis.PROOF,
        message=both(
            f"called {first.here} times here, {first.there} times on another rank"
            + (": the ranks wait for each other" if loud else ""),
            f"此处调用 {first.here} 次，另一个 rank 上 {first.there} 次" + ("：各 rank 会互相等待" if loud else ""),
        ),
        evidence={
            "metric": "calls in a training forward",
            "value": first.here,
            "on_the_other_rank": first.there,
            "norms": len(uneven),
        },
        fix=both(
            "Make every rank call the norm equally often (a dummy batch), or do not synchronize it there.",
            "让每个 rank 调用该归一化的次数相同（虚拟批次），或在那里不做同步。",
        ),
    )


class _Branching(nn.Module):
    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.up, self.norm, self.always = nn.Linear(4, 8), nn.SyncBatchNorm(8), always

    def forward(self, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        if not self.always and not bool((extra != 0).any()):
            return self.up(x)
        return self.up(x) + self.norm(self.up(extra))


def _target(*, always: bool) -> Target:
    random = torch.Generator().manual_seed(0)
    x, extra = (torch.randn(32, 4, generator=random) for _ in range(2))
    model = _Branching(always=always)
    return Target(model=model, args=(x, extra), inputs_other_rank=(x, torch.zeros_like(extra)))


def bad() -> Target:
    """Return a norm that only ranks with a second input call."""
    return _target(always=False)


def good() -> Target:
    """Return a norm that every rank calls."""
    return _target(always=True)
