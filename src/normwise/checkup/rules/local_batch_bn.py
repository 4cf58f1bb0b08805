"""Batch norm on the small batch of one process.

## What it finds
A model that is trained on several processes (a process group, `config={"world_size": n}` or `inputs_other_rank=...`)
whose batch norms do not synchronize, while the batch of one process gives a channel fewer than 16 values. Norms that
`convert_sync_batchnorm` left as they were, because they are classes of their own, are named where others synchronize.
Frozen norms are not judged, and the example inputs (or the loader) must be the batch of one process.

## Why it matters
A variance estimated from N values has a relative error of sqrt(2/N): 0.35 at 16, 0.7 at 4. The global batch may be
large, but a plain batch norm sees only its own process, so adding processes instead of samples makes training noisier,
and the running statistics are those of rank 0.

## How to fix it
`nn.SyncBatchNorm.convert_sync_batchnorm(model)` before wrapping it; or a norm without batch statistics (GroupNorm), or
more samples on each process.

## Sources
Questions 16 and 17. https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html; Wu and He 2018,
https://arxiv.org/abs/1803.08494 (error of batch norm by batch size).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.ranks import synchronizes, world_size
from normwise.facts.repairs import effect
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.spec import Scope
from normwise.targets import Target
from normwise.targets.target import InputsFrom

CODE = "DST001"
SEVERITY = Severity.WARNING

FEWEST = 16  # values of a channel on one process (RULES): the deviation is off by 18 %, the variance by 35 %

ZH = """批归一化只用单个进程的小批次。

## 发现什么
模型在多个进程上训练（进程组、`config={"world_size": n}` 或 `inputs_other_rank=...`），其批归一化没有同步，而单个进
程的批次让每个通道少于 16 个值。若其他归一化已同步，会指出 `convert_sync_batchnorm` 因为是自定义类而没有转换的那些。
冻结的归一化不予判断，示例输入（或 loader）必须是单个进程的批次。

## 为什么重要
由 N 个值估计的方差，相对误差为 sqrt(2/N)：16 个值时 0.35，4 个值时 0.7。全局批次也许很大，但普通批归一化只看到自己
的进程，因此增加进程而不是样本会让训练更嘈杂，而运行统计量是 rank 0 的。

## 如何修复
在包装之前调用 `nn.SyncBatchNorm.convert_sync_batchnorm(model)`；或使用没有批统计量的归一化（GroupNorm），或增加每个
进程的样本。

## 来源
问题 16 和 17。https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html；Wu 与 He 2018，
https://arxiv.org/abs/1803.08494（批归一化误差随批大小的变化）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report batch norms of several processes that see few values each."""
    target = facts.target
    world = world_size(target)
    if world is None:
        raise NotKnown(
            both("needs the number of processes: config={'world_size': n}", "需要进程数：config={'world_size': n}")
        )
    if world < 2 or not _training(target):
        return
    local = [s for s in facts.sites if _local(facts, s)]
    if not local:
        return
    if target.inputs_from is not InputsFrom.GIVEN:
        raise NotKnown(both("needs the batch of one process: give inputs=...", "需要单个进程的批次：给出 inputs=..."))
    factor = _more_samples(facts)
    few = [(s, n) for s in local if (n := _values(s) * factor) < FEWEST]
    if few:
        yield _finding(facts, few, len(local), world)


def _training(target: Target) -> bool:
    return target.model.training or target.optimizer is not None or target.train_step is not None


def _local(facts: Facts, site: Site) -> bool:
    """Whether a site takes statistics of its own process's batch while the model trains."""
    spec, call = site.row.spec, site.calls[0]
    if spec is None or spec.scope is not Scope.BATCH or (call.running_var is None and not call.uses_batch):
        return False
    module = facts.target.model.get_submodule(site.row.path.split("#")[0])
    frozen = facts.target.model.training and not module.training
    return not synchronizes(module) and not frozen


def _values(site: Site) -> float:
    assert site.row.spec is not None
    return math.prod(site.row.shape[axis] for axis in site.row.spec.axes)


def _more_samples(facts: Facts) -> float:
    """Return how many times the loader's batch is larger than the example inputs."""
    try:
        usual = facts.batches.usual
    except NotKnown:
        return 1.0
    given = next((a.shape[0] for a in facts.target.args if isinstance(a, torch.Tensor) and a.ndim), 0)
    return usual / given if given else 1.0


def _finding(facts: Facts, few: Sequence[tuple[Site, float]], of: int, world: int) -> Finding:
    paths = tuple(dict.fromkeys(s.row.path for s, _ in few))
    least = min(n for _, n in few)
    error, together = math.sqrt(2 / least), math.sqrt(2 / (least * world))
    mixed = any(synchronizes(m) for m in facts.target.model.modules())
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'batch norm')} of {of} on {world} processes: {least:g} values a channel"
            + (", others synchronize" if mixed else ""),
            f"{world} 个进程上的 {of} 个批归一化中有 {len(paths)} 个：每通道 {least:g} 个值"
            + ("，其他的已同步" if mixed else ""),
        ),
        evidence={
            "metric": "relative error of a variance, sqrt(2/N)",
            "value": error,
            "values_per_channel": least,
            "floor": FEWEST,
            "world_size": world,
            "others_synchronize": mixed,
        },
        counterfactual=effect(
            both(f"statistics over {world} processes", f"在 {world} 个进程上统计"),
            "relative_error_of_a_variance",
            error,
            together,
        ),
        fix=both(
            "nn.SyncBatchNorm.convert_sync_batchnorm(model), or a norm without batch statistics.",
            "使用 nn.SyncBatchNorm.convert_sync_batchnorm(model)，或没有批统计量的归一化。",
        ),
    )


def _target(*, synchronized: bool) -> Target:
    random = torch.Generator().manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    if synchronized:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return Target(model=model, args=(torch.randn(8, 4, generator=random),), config={"world_size": 8})


def bad() -> Target:
    """Return a plain batch norm on eight processes of eight samples."""
    return _target(synchronized=False)


def good() -> Target:
    """Return a synchronized one."""
    return _target(synchronized=True)
