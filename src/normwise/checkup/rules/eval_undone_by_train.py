"""Batch norms that were put in eval mode and are set back by `train()`.

## What it finds
Batch norms in eval mode inside a model in train mode, which your `train_step` or `eval_fn` switches to train mode: a
`model.train()` at the start of the step or at the end of the evaluation reaches every child. Both are run as they are
and the modes compared before and after. Without either it is only worth knowing that the next `model.train()` would do
it. Models whose own `train()` keeps the norms in eval mode pass.

## Why it matters
Freezing by `norm.eval()` is a state, not a decision: from the first such call the statistics are those of the batch and
the running ones drift, although the code that froze them still stands there.

## How to fix it
Override `train()` of the model and put the norms back in eval mode there, or freeze after every `model.train()`.

## Sources
Question 10. https://github.com/pytorch/pytorch/issues/86590; https://github.com/chemprop/chemprop/pull/952 (the fix by
an overridden train()).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.liveness import Scope
from normwise.facts.trials import Trial, said
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS008"
SEVERITY = Severity.WARNING

ZH = """设为评估模式的批归一化被 `train()` 改了回去。

## 发现什么
处于训练模式的模型中原本处于评估模式、却被你的 `train_step` 或 `eval_fn` 切到训练模式的批归一化：步骤开头或评估结尾的
`model.train()` 会作用于每个子模块。两者都按原样运行，并比较前后的模式。
两者都没有时，只提示下一次 `model.train()` 会这样做。
自己的 `train()` 会让归一化保持评估模式的模型视为通过。

## 为什么重要
用 `norm.eval()` 冻结只是一个状态：从第一次这样的调用起，统计量就是当前批次的，运行统计量开始漂移，
尽管冻结它们的代码仍在那里。

## 如何修复
重写模型的 `train()`，在其中把这些归一化重新设为评估模式；或在每次 `model.train()` 之后重新冻结。

## 来源
问题 10。https://github.com/pytorch/pytorch/issues/86590；https://github.com/chemprop/chemprop/pull/952
（通过重写 train() 修复）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report batch norms in eval mode that the user's code puts in train mode."""
    model = facts.target.model
    held = [p for p, live in facts.live_norms.items() if live.scope is Scope.BATCH and _held(model, p)]
    would = tuple(p for p in held if facts.modes_in_training.get(p)) if model.training else ()
    if not would:
        return
    found: dict[str, tuple[str, ...]] = {}
    raised: BaseException | None = None
    for name, trial in _trials(facts):
        raised = raised or trial.raised
        flipped = tuple(p for p in would if trial.modes_after.get(p) or any(e.training for e in trial.of(p)))
        if flipped:
            found[name] = flipped
    if found:
        name, flipped = next(iter(found.items()))
        yield _finding(flipped, SEVERITY, name)
    elif raised is not None:
        raise NotKnown(both(f"your code raised {said(raised)}", f"你的代码抛出异常 {said(raised)}"))
    elif facts.target.train_step is None and facts.target.eval_fn is None:
        yield _finding(would, Severity.INFO, None)


def _held(model: nn.Module, path: str) -> bool:
    return not model.get_submodule(path).training


def _trials(facts: Facts) -> Iterator[tuple[str, Trial]]:
    if facts.target.train_step is not None:
        yield "train_step", facts.training_step
    if facts.target.eval_fn is not None:
        yield "eval_fn", facts.evaluation


def _finding(paths: tuple[str, ...], severity: Severity, where: str | None) -> Finding:
    norms = counted(len(paths), "batch norm")
    if where is None:
        message = both(
            f"{norms} in eval mode: the next model.train() puts them in train mode",
            f"{len(paths)} 个批归一化处于评估模式：下一次 model.train() 会把它们设为训练模式",
        )
    else:
        message = both(
            f"{where} put {norms} in train mode that were in eval mode",
            f"{where} 把原本处于评估模式的 {len(paths)} 个批归一化设为了训练模式",
        )
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.PROOF,
        message=message,
        evidence={"norms": len(paths), "in": where, "training_before": False, "training_after": True},
        fix=both(
            "Override train() so that these norms stay in eval mode, or freeze them after every model.train().",
            "重写 train() 使这些归一化保持评估模式，或在每次 model.train() 之后重新冻结。",
        ),
    )


class _Net(nn.Sequential):
    def __init__(self, *, sticky: bool) -> None:
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
        self.sticky = sticky
        self[1].eval()

    def train(self, mode: bool = True) -> _Net:
        super().train(mode)
        if self.sticky:
            self[1].eval()
        return self


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model.train()
    model(x).sum().backward()


def _target(*, sticky: bool) -> Target:
    torch.manual_seed(0)
    return Target(model=_Net(sticky=sticky), args=(torch.randn(64, 4),), train_step=_step)


def bad() -> Target:
    """Return a model whose norm is frozen once, and whose step calls model.train()."""
    return _target(sticky=False)


def good() -> Target:
    """Return a model whose train() keeps the norm frozen."""
    return _target(sticky=True)
