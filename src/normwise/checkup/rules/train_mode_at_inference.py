"""A batch norm in train mode while the model is evaluated.

## What it finds
Your `eval_fn` is run as it is. Reported are batch norms that were in train mode in the last call it made of them: they
normalize with the statistics of the evaluated batch and write these into the running statistics. An `eval_fn` that
first re-estimates the statistics (`update_bn`) and then evaluates in eval mode is healthy, and so are norms that
ignore train mode. Train mode by itself is no fault: without `eval_fn` a model in train mode is taken as being trained.

## Why it matters
The answer for one sample then depends on the other samples of its batch, the metric cannot be reproduced from the
saved weights, and test data leaks into the model: each evaluation moves the running statistics.

## How to fix it
Call `model.eval()` at the start of the evaluation and `model.train()` after it. `torch.no_grad()` does not do it.

## Sources
Questions 10, 18 and 38. https://github.com/microsoft/robustdg/issues/30 (test accuracy that nobody could reproduce);
https://docs.pytorch.org/docs/stable/notes/autograd.html (evaluation mode is not no_grad).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.liveness import Scope
from normwise.facts.repairs import effect
from normwise.facts.trials import Trial, said
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS001"
SEVERITY = Severity.ERROR
EXPLAINS = ("AXS001", "BNS002", "BNS004")

ZH = """评估时批归一化仍处于训练模式。

## 发现什么
按原样运行你的 `eval_fn`。若某个批归一化在其最后一次调用中处于训练模式，则予以报告：它用被评估批次的统计量做归一化，
并把它们写入运行统计量。先重新估计统计量（`update_bn`）再以评估模式评估的 `eval_fn` 是健康的，
不理会训练模式的归一化也是。
训练模式本身不是错误：没有 `eval_fn` 时，处于训练模式的模型视为正在训练。

## 为什么重要
此时一个样本的结果取决于同批的其他样本，指标无法由保存的权重重现，而且测试数据会泄漏进模型：每次评估都会移动运行统计量。

## 如何修复
评估开始时调用 `model.eval()`，结束后调用 `model.train()`。`torch.no_grad()` 不起这个作用。

## 来源
问题 10、18 和 38。https://github.com/microsoft/robustdg/issues/30（无人能重现的测试精度）；
https://docs.pytorch.org/docs/stable/notes/autograd.html（评估模式不同于 no_grad）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report every batch norm that the evaluation ran in train mode."""
    norms = [p for p, live in facts.live_norms.items() if live.scope is Scope.BATCH]
    if not norms:
        return
    if facts.target.eval_fn is None and not facts.target.model.training:
        return  # given in eval mode, and nothing says otherwise
    trial = facts.evaluation
    last = {e.path: e for e in trial.norms}
    found = tuple(p for p in norms if p in last and last[p].training)
    if found:
        yield _finding(facts, found, trial, len(norms))
    elif trial.raised is not None:
        raise NotKnown(both(f"eval_fn raised {said(trial.raised)}", f"eval_fn 抛出异常 {said(trial.raised)}"))


def _finding(facts: Facts, found: tuple[str, ...], trial: Trial, total: int) -> Finding:
    written = sum(facts.live_norms[p].updates for p in found)
    drift = trial.drift(found)
    return Finding(
        path=found[0],
        paths=found,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"the evaluation ran {counted(len(found), 'batch norm')} in train mode and wrote {written} of them",
            f"评估以训练模式运行了 {len(found)} 个批归一化，并改写了其中 {written} 个的统计量",
        ),
        evidence={
            "metric": "drift of a running mean in one evaluation, in standard deviations",
            "value": drift,
            "floor": 0.0,
            "norms": len(found),
            "of": total,
            "written": written,
            "forwards": trial.forwards,
        },
        counterfactual=_repaired(facts, found, drift) if drift else None,
        fix=both(
            "Call model.eval() at the start of the evaluation, and model.train() after it.",
            "评估开始时调用 model.eval()，结束后再调用 model.train()。",
        ),
    )


def _repaired(facts: Facts, paths: tuple[str, ...], before: float) -> dict[str, object] | None:
    try:
        trial = facts.trials.evaluation_with(partial(_held_in_eval, paths=paths), repair=True)
    except NotKnown:
        return None
    change = both("batch norms in eval mode during the evaluation", "评估期间批归一化处于评估模式")
    return effect(change, "drift of a running mean in one evaluation", before, trial.drift(paths))


def _held_in_eval(model: nn.Module, paths: tuple[str, ...]) -> None:
    for path in paths:
        model.get_submodule(path).register_forward_pre_hook(lambda module, _: setattr(module, "training", False))


def _target(*, evaluates: bool) -> Target:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))

    def evaluate(net: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        net.train(not evaluates)
        with torch.no_grad():
            return [net(batch) for batch in batches]

    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)) + 1
    return Target(model=model, args=(x,), eval_fn=evaluate)


def bad() -> Target:
    """Return a model whose evaluation leaves it in train mode."""
    return _target(evaluates=False)


def good() -> Target:
    """Return the same model with an evaluation in eval mode."""
    return _target(evaluates=True)
