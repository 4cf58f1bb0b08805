"""Running statistics that differ from rank to rank.

## What it finds
Batch norms without synchronization whose running mean or variance is another one on each process. Run the check on
every rank, or give the ranks' state dicts as `config={"rank_states": [...]}`.

## Why it matters
Each rank evaluates with the statistics of its own data, so metrics that are averaged over ranks mix several models, and
the checkpoint of rank 0 is not the one that was measured. While training that is how plain batch norm works, and DDP
broadcasts the buffers of rank 0 before the next forward; it is worth knowing before an evaluation, not a fault.

## How to fix it
Average the buffers over the ranks before evaluating (or broadcast those of rank 0), or use a synchronized batch norm.

## Sources
Questions 16 and 17. https://github.com/open-mmlab/mmdetection/issues/2539 (buffers that differ between ranks).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.facts import Facts, ranks
from normwise.rendering import both
from normwise.targets import Target

CODE = "DST003"
SEVERITY = Severity.INFO

ZH = """各 rank 的运行统计量不同。

## 发现什么
未同步的批归一化，其运行均值或方差在每个进程上各不相同。在每个 rank 上运行检查，或以 `config={"rank_states": [...]}`
给出各 rank 的 state dict。

## 为什么重要
每个 rank 用自己数据的统计量评估，跨 rank 平均的指标混合了几个模型，而 rank 0 的检查点并不是被测量的那个。训练
时普通批归一化就是这样工作的，DDP 会在下一次前向前广播 rank 0 的缓冲区；评估前值得知道，但不是错误。

## 如何修复
评估前在各 rank 间平均缓冲区（或广播 rank 0 的），或使用同步批归一化。

## 来源
问题 16 和 17。https://github.com/open-mmlab/mmdetection/issues/2539（缓冲区在各 rank 间不同）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report running statistics that are each rank's own."""
    states = facts.ranks.states
    gaps: dict[str, float] = {}
    held = [r.path for r in facts.running if not ranks.synchronizes(facts.modules[r.path])]
    for path in held:
        names = [f"{path}.{b}" if path else b for b in ("running_mean", "running_var")]
        gap = max((g for n in names if (g := ranks.apart(states, n)) is not None), default=0.0)
        if gap > 0:
            gaps[path] = gap
    if gaps:
        yield _finding(gaps, len(held), len(states))


def _finding(gaps: dict[str, float], of: int, world: int) -> Finding:
    worst = max(gaps, key=lambda path: gaps[path])
    return Finding(
        path=worst,
        paths=(worst, *(p for p in gaps if p != worst)),
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(gaps), 'norm')} of {of}: running statistics differ between {world} ranks by up to"
            f" {gaps[worst]:.1e}",
            f"{of} 个归一化中有 {len(gaps)} 个的运行统计量在 {world} 个 rank 间最多相差 {gaps[worst]:.1e}",
        ),
        evidence={"metric": "relative difference between ranks", "value": gaps[worst], "ranks": world},
        fix=both(
            "Average or broadcast the buffers before evaluating, or use a synchronized batch norm.",
            "评估前平均或广播缓冲区，或使用同步批归一化。",
        ),
    )


def _target(*, apart: float) -> Target:
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    x = torch.randn(64, 4, generator=random)
    with torch.no_grad():
        seen = model[0](x)
    buffers = {"running_mean": seen.mean(0), "running_var": seen.var(0), "num_batches_tracked": torch.tensor(1000)}
    model[1].load_state_dict(buffers, strict=False)
    first = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    second = {key: tensor + apart if key == "1.running_mean" else tensor.clone() for key, tensor in first.items()}
    return Target(model=model, args=(x,), config={"rank_states": [first, second]})


def bad() -> Target:
    """Return a model whose two ranks saw different data."""
    return _target(apart=0.1)


def good() -> Target:
    """Return the same model with equal buffers."""
    return _target(apart=0.0)
