"""Running statistics that activation checkpointing updates twice.

## What it finds
Your `train_step` is run and every call of a batch norm watched. Reported are norms that update their running statistics
while a backward pass recomputes them. Micro-batches and second forwards are no recomputation and do not count.

## Why it matters
Recomputation is a second forward in train mode with the same batch: outputs and gradients agree with the plain block,
the running statistics do not. The batch enters twice, so the effective momentum is `1 - (1 - m)**2` (0.19 for 0.1) in
the checkpointed blocks only, and `num_batches_tracked` counts double.

## How to fix it
In checkpointed blocks set `momentum = 1 - sqrt(1 - momentum)`: two updates with the same batch are then exactly one of
the old kind. Or leave the norms out of the checkpointed part, or skip the update while recomputing.

## Sources
Question 11. https://github.com/pytorch/pytorch/issues/62471 (running averages of a checkpointed block differ);
https://docs.pytorch.org/docs/stable/checkpoint.html.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.repairs import effect
from normwise.facts.trials import Trial, completed
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS009"
SEVERITY = Severity.WARNING

ZH = """激活检查点使运行统计量更新两次。

## 发现什么
运行你的 `train_step` 并观察批归一化的每次调用。若某个归一化在反向传播重算它时更新运行统计量，则予以报告。
微批次和第二次前向不是重算，不计入。

## 为什么重要
重算是用同一批次在训练模式下的第二次前向：输出和梯度与普通的块一致，运行统计量却不一致。该批次进入两次，
因此只有被检查点包裹的块的有效动量是 `1 - (1 - m)**2`（0.1 时为 0.19），`num_batches_tracked` 也加倍。

## 如何修复
在被检查点包裹的块里设 `momentum = 1 - sqrt(1 - momentum)`：用同一批次更新两次就恰好等于原来的一次。
或把归一化移出检查点部分，或在重算时跳过更新。

## 来源
问题 11。https://github.com/pytorch/pytorch/issues/62471（被检查点包裹的块滑动平均不同）；
https://docs.pytorch.org/docs/stable/checkpoint.html。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms whose running statistics are written during recomputation."""
    if facts.target.train_step is not None and not any(live.updates for live in facts.live_norms.values()):
        return
    trial = facts.trials.live_step
    paths = tuple(dict.fromkeys(e.path for e in trial.norms if e.recomputed and e.updated))
    if paths:
        yield _finding(facts, paths, trial)
    else:
        completed(trial)


def _finding(facts: Facts, paths: tuple[str, ...], trial: Trial) -> Finding:
    calls = trial.of(paths[0])
    updates, recomputed = sum(e.updated for e in calls), sum(e.updated and e.recomputed for e in calls)
    apart = _from_once(trial, trial, paths)
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'norm')} updated {updates} times a step, {recomputed} of them while recomputing",
            f"{len(paths)} 个归一化每步更新 {updates} 次，其中 {recomputed} 次发生在重算时",
        ),
        evidence={
            "metric": _METRIC,
            "value": apart,
            "floor": 0.0,
            "norms": len(paths),
            "updates": updates,
            "while_recomputing": recomputed,
            "momentum": facts.live_norms[paths[0]].momentum if paths[0] in facts.live_norms else None,
        },
        counterfactual=_repaired(facts, paths, trial, apart) if apart else None,
        fix=both(
            "Set momentum to 1 - sqrt(1 - momentum) in checkpointed blocks, or skip the update while recomputing.",
            "在被检查点包裹的块里把 momentum 设为 1 - sqrt(1 - momentum)，或在重算时跳过更新。",
        ),
    )


_METRIC = "distance of the running means from one update, relative to that update"


def _from_once(once: Trial, trial: Trial, paths: tuple[str, ...]) -> float | None:
    """Return how far a step took the running means beyond one plain update; None after several plain ones."""
    apart = step = 0.0
    for path in paths:
        calls, change = once.of(path), trial.changed.get(f"{path}.running_mean")
        if sum(e.updated and not e.recomputed for e in calls) != 1 or "running_mean" not in calls[0].after:
            return None
        start, one = calls[0].before["running_mean"].double(), calls[0].after["running_mean"].double()
        end = start if change is None else change.after.double()
        apart += float((end - one).square().sum())
        step += float((one - start).square().sum())
    return math.sqrt(apart / step) if step else None


def _repaired(facts: Facts, paths: tuple[str, ...], once: Trial, before: float) -> dict[str, object] | None:
    try:
        again = facts.trials.step_with(partial(_halved, paths=paths), repair=True)
    except NotKnown:
        return None
    after = _from_once(once, again, paths)
    change = both("momentum 1 - sqrt(1 - momentum) in these norms", "这些归一化的动量取 1 - sqrt(1 - momentum)")
    return None if after is None else effect(change, _METRIC, before, after)


def _halved(model: nn.Module, paths: tuple[str, ...]) -> None:
    model.train()
    for path in paths:
        module = model.get_submodule(path)
        momentum = getattr(module, "momentum", None)
        if isinstance(momentum, float):
            vars(module)["momentum"] = 1 - math.sqrt(1 - momentum)


class _Net(nn.Module):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.stem, self.recompute = nn.Linear(4, 6), recompute
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        if not self.recompute:
            return self.block(hidden)
        out = checkpoint(self.block, hidden, use_reentrant=False)
        assert isinstance(out, torch.Tensor)
        return out


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def _target(*, recompute: bool) -> Target:
    torch.manual_seed(0)
    return Target(model=_Net(recompute=recompute), args=(torch.randn(64, 4),), train_step=_step)


def bad() -> Target:
    """Return a model with a checkpointed block."""
    return _target(recompute=True)


def good() -> Target:
    """Return the same model without checkpointing."""
    return _target(recompute=False)
