"""Gradients of replicated norms that are each rank's own.

## What it finds
Gains and shifts that are the same on every rank while their gradients differ, although the gradients of other weights
that the ranks share are equal (or the other weights are sharded). Run the check on every rank after `backward` and
before the optimizer's step, or give `config={"rank_states": [...], "rank_gradients": [...]}`.

## Why it matters
Under tensor and sequence parallelism each rank sees a part of the positions or features, so its gradient of a
replicated norm is a partial sum. Without a sum over the group the norms get a wrong update and drift apart; the
matrices, which are sharded, train on. Where all gradients differ, they were not reduced yet: nothing is said.

## How to fix it
All-reduce (sum) the gradients of norms over the tensor-parallel group, as Megatron-LM does for parameters marked
`sequence_parallel`.

## Sources
Question 17. https://github.com/microsoft/DeepSpeed/pull/1801 (training of BLOOM, whose norms drifted apart);
Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198 (sequence parallelism).
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

CODE = "DST005"
SEVERITY = Severity.ERROR
EXPLAINS = ("DST002",)

# A reduced gradient is the same on every rank up to the order of a sum: 1e-3 in half precision, partial sums are
# apart by their own size.
APART = 1e-2

ZH = """复制的归一化的梯度各 rank 不同。

## 发现什么
各 rank 上相同的增益和偏移，其梯度却不同，而各 rank 共有的其他权重的梯度相同（或其他权重是分片的）。在 `backward` 之
后、优化器更新之前于每个 rank 上运行检查，或给出 `config={"rank_states": [...], "rank_gradients": [...]}`。

## 为什么重要
在张量并行和序列并行下，每个 rank 只看到一部分位置或特征，所以它对复制的归一化的梯度只是部分和。若不在组内求和，归一
化得到错误的更新并逐渐分离；分片的矩阵照常训练。若所有梯度都不同，说明尚未归约，不作判断。

## 如何修复
在张量并行组内对归一化的梯度做 all-reduce（求和），如 Megatron-LM 对标记为 `sequence_parallel` 的参数所做的那样。

## 来源
问题 17。https://github.com/microsoft/DeepSpeed/pull/1801（BLOOM 的训练，其归一化在各 rank 间分离）；Korthikanti 等
2022，https://arxiv.org/abs/2205.05198（序列并行）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report replicated norms whose gradients were not reduced."""
    gradients, states = facts.ranks.gradients, facts.ranks.states
    shared = [n for n in states[0] if n in gradients[0] and ranks.apart(states, n) == 0]
    norms = set(facts.ranks.norm_names())
    gaps = {n: gap for n in shared if (gap := ranks.apart(gradients, n)) is not None}
    partial = {n: gap for n, gap in gaps.items() if n in norms and gap > APART}
    if not partial:
        return
    others = [gap for n, gap in gaps.items() if n not in norms]
    if others and sum(gap > APART for gap in others) * 2 > len(others):
        raise NotKnown(both("no gradient was reduced yet: check after the reduction", "梯度尚未归约：请在归约之后检查"))
    yield _finding(partial, sum(n in norms for n in gaps), len(states))


def _finding(partial: dict[str, float], of: int, world: int) -> Finding:
    worst = max(partial, key=lambda name: partial[name])
    ordered = [worst, *(n for n in partial if n != worst)]
    paths = tuple(dict.fromkeys(n.rpartition(".")[0] for n in ordered))
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"{counted(len(partial), 'norm gradient')} of {of} differ between {world} ranks"
            f" by up to {partial[worst]:.0%}",
            f"{of} 个归一化梯度中有 {len(partial)} 个在 {world} 个 rank 间最多相差 {partial[worst]:.0%}",
        ),
        evidence={
            "metric": "relative difference of gradients between ranks",
            "value": partial[worst],
            "floor": APART,
            "tensors": ordered,
            "ranks": world,
        },
        fix=both(
            "All-reduce (sum) the gradients of norms over the tensor-parallel group before the optimizer's step.",
            "在优化器更新之前，于张量并行组内对归一化的梯度做 all-reduce（求和）。",
        ),
    )


def _target(*, reduced: bool) -> Target:
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    x = torch.randn(4, 4, generator=random)
    parts = []
    for half in x.chunk(2):
        gradients = torch.autograd.grad(model(half).square().sum(), list(model.parameters()))
        parts.append(dict(zip(dict(model.named_parameters()), gradients, strict=True)))
    total = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    ranked = [{n: total[n] if reduced or not n.startswith("1.") else part[n] for n in total} for part in parts]
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    config = {"rank_states": [state, state], "rank_gradients": ranked}
    return Target(model=model, args=(x,), config=config)


def bad() -> Target:
    """Return a model of which only the matrices' gradients were summed."""
    return _target(reduced=False)


def good() -> Target:
    """Return the same model with all gradients summed."""
    return _target(reduced=True)
