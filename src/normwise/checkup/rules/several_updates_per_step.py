"""Buffers of a norm written between two forwards of one training step.

## What it finds
An error where your `train_step` raises because running statistics were written while the graph of an earlier forward
still needed them; proved by running the step again with the statistics kept apart: it then completes. Typical is a
wrapper that broadcasts buffers before every forward (DistributedDataParallel) around a discriminator that is called
twice before one backward pass. Only worth knowing: norms that update their statistics several times in one step
(a GAN's fake and real pass, a siamese encoder, gradient accumulation); that is how these are trained.

## Why it matters
The step fails with "one of the variables needed for gradient computation has been modified by an inplace operation",
which names neither the norm nor the write, and only in the distributed run. Several updates a step make the effective
momentum larger than the one that was set.

## How to fix it
Join the passes into one forward (`model(torch.cat([real, fake]))`), construct DistributedDataParallel with
`broadcast_buffers=False`, or use SyncBatchNorm.

## Sources
Questions 10 and 11. https://github.com/pytorch/pytorch/issues/175024 (two forwards through a distributed module before
one backward pass); https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.repairs import effect
from normwise.facts.trials import Trial, said
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS010"
SEVERITY = Severity.ERROR

ZH = """一个训练步骤的两次前向之间，归一化的缓冲区被改写。

## 发现什么
若你的 `train_step` 因运行统计量在前一次前向的计算图仍需要它们时被改写而抛出异常，则为错误；证明方式是把统计量隔开后
重新运行该步骤：它能完成。典型情形是在每次前向前广播缓冲区的包装（DistributedDataParallel），而判别器在一次反向之前被
调用两次。仅作提示：在一步内多次更新统计量的归一化（GAN 的真假两遍、孪生编码器、梯度累积），它们本来就这样训练。

## 为什么重要
该步骤以 “one of the variables needed for gradient computation has been modified by an inplace operation” 失败，
既不指明归一化也不指明写入者，而且只在分布式运行中出现。一步内多次更新使有效动量大于所设的值。

## 如何修复
把几遍合并为一次前向（`model(torch.cat([real, fake]))`），构造 DistributedDataParallel 时设
`broadcast_buffers=False`，或使用 SyncBatchNorm。

## 来源
问题 10 和 11。https://github.com/pytorch/pytorch/issues/175024（一次反向之前两次通过分布式模块）；
https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report steps that fail because of written buffers, and norms updated several times in one step."""
    if facts.target.train_step is not None and not facts.running:
        return
    trial = facts.training_step
    if trial.raised is None:
        trial = facts.trials.live_step
    if trial.raised is not None:
        found = _failed(facts, trial)
        if found is None:
            raise NotKnown(both(f"train_step raised {said(trial.raised)}", f"train_step 抛出异常 {said(trial.raised)}"))
        yield found
        return
    several = {p: n for p in facts.live_norms if (n := _updates(trial, p)) > 1}
    if several:
        yield _several(several, trial)


def _updates(trial: Trial, path: str) -> int:
    return sum(e.updated and not e.recomputed for e in trial.of(path))


def _failed(facts: Facts, trial: Trial) -> Finding | None:
    """Return a finding if the step completes once the statistics that an earlier graph needs stay as they were."""
    written = tuple(dict.fromkeys(e.path for e in trial.norms if e.rewritten))
    repeated = tuple(p for p in facts.live_norms if len(trial.of(p)) > 1)
    suspects = written or repeated
    if not isinstance(trial.raised, RuntimeError) or not suspects:
        return None
    again = facts.trials.step_with(partial(_apart, paths=suspects), repair=True)
    if again.raised is not None:
        return None
    change = both("statistics kept apart for each forward", "每次前向各用一份统计量")
    return Finding(
        path=suspects[0],
        paths=suspects,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"train_step fails: {counted(len(suspects), 'norm')} written between {trial.forwards} forwards",
            f"train_step 失败：{trial.forwards} 次前向之间改写了 {len(suspects)} 个归一化的统计量",
        ),
        evidence={
            "norms": len(suspects),
            "forwards": trial.forwards,
            "backward_passes": trial.backwards,
            "raised": said(trial.raised),
            "written_by": both("something other than the norm", "归一化以外的代码")
            if written
            else both("the norm", "归一化"),
        },
        counterfactual=effect(change, "steps that raise", 1, 0),
        fix=both(
            "Join the passes into one forward, or set broadcast_buffers=False, or use SyncBatchNorm.",
            "把几遍合并为一次前向，或设 broadcast_buffers=False，或使用 SyncBatchNorm。",
        ),
    )


def _apart(model: nn.Module, paths: tuple[str, ...]) -> None:
    """Give the norms new buffers before the step and after each of their calls, so that no graph's own is written."""

    def renew(module: nn.Module, *_: Any) -> None:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.detach().clone()

    for path in paths:
        module = model.get_submodule(path)
        renew(module)
        module.register_forward_hook(renew)


def _several(several: dict[str, int], trial: Trial) -> Finding:
    paths, most = tuple(several), max(several.values())
    return Finding(
        paths=paths,
        severity=Severity.INFO,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'norm')} updated up to {most} times in one step ({trial.backwards} backward passes)",
            f"{len(paths)} 个归一化在一步内至多更新 {most} 次（{trial.backwards} 次反向）",
        ),
        evidence={
            "norms": len(paths),
            "updates": most,
            "forwards": trial.forwards,
            "backward_passes": trial.backwards,
        },
        fix=both(
            "Join the passes into one forward where the statistics of each alone are not wanted.",
            "若不需要各自的统计量，把几遍合并为一次前向。",
        ),
    )


class _Broadcast(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for buffer in self.module.buffers():
                buffer.copy_(buffer.clone())
        return self.module(x)


def _two_passes(model: nn.Module, x: torch.Tensor) -> None:
    (model(x).mean() - model(x + 1).mean()).backward()


def _one_pass(model: nn.Module, x: torch.Tensor) -> None:
    real, fake = model(torch.cat([x, x + 1])).chunk(2)
    (real.mean() - fake.mean()).backward()


def _target(step: Callable[[nn.Module, torch.Tensor], None]) -> Target:
    torch.manual_seed(0)
    model = _Broadcast(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)))
    return Target(model=model.eval(), args=(torch.randn(64, 4),), train_step=step)


def bad() -> Target:
    """Return a discriminator in a wrapper that writes the buffers before each of its two forwards."""
    return _target(_two_passes)


def good() -> Target:
    """Return the same discriminator and wrapper with both passes in one forward."""
    return _target(_one_pass)
