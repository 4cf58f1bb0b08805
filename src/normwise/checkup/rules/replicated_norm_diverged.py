"""Norms that should be the same on every rank and are not.

## What it finds
Gains, shifts and synchronized running statistics whose bits differ between the processes of a run, although each holds
them whole. Run the check on every rank after `init_process_group`, or give the ranks' state dicts as
`config={"rank_states": [...]}`. Sharded tensors are not compared; where everything else differs as well and the norms
are far apart, the ranks hold different parts of the model and nothing is said.

## Why it matters
Replicated parameters stay equal only if every rank applies the same update. One missed reduction or one broadcast too
few at loading, and they drift apart slowly: the loss looks normal, but every rank evaluates another model and saving
keeps one of them.

## How to fix it
Broadcast the norms from rank 0, then find the update that is not the same everywhere: norm gradients must be reduced
over the tensor-parallel group as well.

## Sources
Question 17. https://github.com/microsoft/DeepSpeed/pull/1801 (training of BLOOM, whose norms drifted apart).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts, ranks
from normwise.rendering import both
from normwise.targets import Target

CODE = "DST002"
SEVERITY = Severity.ERROR

REPLICAS = 0.9  # share of the other tensors that are equal where ranks hold copies of one model
DRIFT = 0.1  # copies drift by small steps; parts of a model are as far apart as their sizes

ZH = """本应在各 rank 上相同的归一化却不同。

## 发现什么
各进程都完整持有的增益、偏移和同步的运行统计量，其比特却不同。在 `init_process_group` 之后于每个 rank 上运行检查，或
以`config={"rank_states": [...]}` 给出各 rank 的 state dict。分片的张量不比较；若其他一切也不同且归一化相差很大，说
明各 rank 持有模型的不同部分，不作判断。

## 为什么重要
只有每个 rank 应用相同的更新，复制的参数才会保持相同。漏掉一次归约，或加载时少一次广播，它们就会慢慢分离：损失看起来
正常，但每个 rank 评估的是不同的模型，保存时只留下其中一个。

## 如何修复
从 rank 0 广播归一化参数，然后找出不一致的更新：归一化的梯度也必须在张量并行组内归约。

## 来源
问题 17。https://github.com/microsoft/DeepSpeed/pull/1801（BLOOM 的训练，其归一化在各 rank 间分离）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report replicated norms whose bits differ between ranks."""
    states = facts.ranks.states
    modules = dict(facts.target.model.named_modules())
    synced = [f"{p}.{b}" if p else b for p, m in modules.items() if ranks.synchronizes(m) for b in _BUFFERS]
    norms = (*facts.ranks.norm_names(), *synced)
    far = {name: gap for name in norms if (gap := ranks.apart(states, name)) is not None}
    if not far:
        raise NotKnown(both("no norm is held whole by every rank", "没有任何归一化被每个 rank 完整持有"))
    diverged = {name: gap for name, gap in far.items() if gap > 0}
    if not diverged:
        return
    # the running statistics of a norm that does not synchronize are each rank's own
    others = [ranks.apart(states, n) for n in states[0] if n not in far and not n.endswith(_BUFFERS)]
    same = sum(g == 0 for g in others) / len(others) if others else 0.0
    if same < REPLICAS and max(diverged.values()) > DRIFT:
        raise NotKnown(both("the ranks hold different parts of the model", "各 rank 持有模型的不同部分"))
    yield _finding(facts, diverged, len(far), len(states))


_BUFFERS = ("running_mean", "running_var")


def _finding(facts: Facts, diverged: dict[str, float], of: int, world: int) -> Finding:
    worst = max(diverged, key=lambda name: diverged[name])
    ordered = [worst, *(n for n in diverged if n != worst)]
    paths = tuple(dict.fromkeys(n.rpartition(".")[0] for n in ordered))
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(diverged), 'norm tensor')} of {of} differ between {world} ranks,"
            f" by up to {diverged[worst]:.1e}",
            f"{of} 个归一化张量中有 {len(diverged)} 个在 {world} 个 rank 间不同，最多相差 {diverged[worst]:.1e}",
        ),
        evidence={
            "metric": "relative difference between ranks",
            "value": diverged[worst],
            "tensors": ordered,
            "ranks": world,
        },
        fix=both(
            "Broadcast the norms from rank 0 and reduce their gradients over every group that replicates them.",
            "从 rank 0 广播归一化参数，并在复制它们的每个组内归约其梯度。",
        ),
    )


def _target(*, drift: float) -> Target:
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    first = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    second = {key: tensor + drift if key == "1.weight" else tensor.clone() for key, tensor in first.items()}
    x = torch.randn(3, 4, generator=random)
    return Target(model=model, args=(x,), config={"rank_states": [first, second]})


def bad() -> Target:
    """Return a model whose gains differ between two ranks."""
    return _target(drift=1e-3)


def good() -> Target:
    """Return the same model, equal on both."""
    return _target(drift=0.0)
