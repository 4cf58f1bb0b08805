"""A frozen part of the model whose batch norms still learn from the data.

## What it finds
Parts of a model in train mode in which no parameter is trained (`requires_grad=False`) while their batch norms are in
train mode: they normalize with the batch and move their running statistics, shown on one forward. Silent where the
norm's own gain or shift is trained, where the module says `train_bn = True`, where the frozen part is the copy of a
trained one (the momentum encoders of BYOL, MoCo and mean teachers keep their statistics live on purpose), and where
nothing at all is trained. Where only the norms are frozen and nothing around them it is only worth knowing.

## Why it matters
`requires_grad` says nothing about buffers. The "frozen" features change with every batch and depend on the other
samples in it, and after training they are not those of the checkpoint. Freezing with `eval()` once does not last: the
next `model.train()` sets every child back to train mode.

## How to fix it
Override `train()` and keep the frozen part in eval mode:

```python
def train(self, mode=True):
    super().train(mode)
    self.encoder.eval()
    return self
```

## Sources
Questions 10 and 11. https://github.com/pgniewko/gt-pyg/issues/112 (a frozen encoder that kept changing);
https://github.com/pytorch/pytorch/issues/86590; https://github.com/chemprop/chemprop/pull/952.
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
from normwise.facts.liveness import Scope, in_training
from normwise.facts.repairs import effect
from normwise.facts.trials import Trial
from normwise.graph import Graph
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS007"
SEVERITY = Severity.WARNING

ZH = """模型被冻结的部分里，批归一化仍在从数据中学习。

## 发现什么
处于训练模式的模型中，没有任何参数被训练（`requires_grad=False`）、而批归一化却处于训练模式的部分：它们用当前批次做归一化
并移动运行统计量，以一次前向为证。下列情况不报告：归一化自己的增益或偏移在训练；模块声明 `train_bn = True`；
冻结部分是某个被训练部分的副本（BYOL、MoCo 和 mean teacher 的动量编码器有意保持统计量更新）；整个模型都不训练。
若只冻结了归一化而其周围没有冻结，仅作提示。

## 为什么重要
`requires_grad` 与缓冲区无关。“冻结”的特征随每个批次改变，并依赖同批的其他样本；训练结束后它们已不是检查点中的特征。
只调用一次 `eval()` 并不持久：下一次 `model.train()` 会把所有子模块重新设为训练模式。

## 如何修复
重写 `train()`，让冻结部分保持评估模式：

```python
def train(self, mode=True):
    super().train(mode)
    self.encoder.eval()
    return self
```

## 来源
问题 10 和 11。https://github.com/pgniewko/gt-pyg/issues/112（一直在变的冻结编码器）；
https://github.com/pytorch/pytorch/issues/86590；https://github.com/chemprop/chemprop/pull/952。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report frozen parts of a model in training whose batch norms are live."""
    model = facts.target.model
    if not model.training or all(not p.requires_grad for p in model.parameters()):
        return
    live = [p for p in in_training(facts, Scope.BATCH) if facts.live_norms[p].updates]
    parts: dict[str, list[str]] = {}
    for path in live:
        part = _frozen_part(model, path)
        if part is not None and not _declared(model, path) and not _copy_of_a_trained_part(facts, part):
            parts.setdefault(part, []).append(path)
    if not parts:
        return
    try:
        trial = facts.trials.forward()
    except NotKnown:
        trial = None
    for part, norms in parts.items():
        yield _finding(facts, part, norms, trial)


def _frozen_part(model: nn.Module, path: str) -> str | None:
    """Return the largest part around a norm in which no parameter is trained; None where there is none."""
    found, names = None, path.split(".")
    for depth in range(len(names), 0, -1):
        part = ".".join(names[:depth])
        parameters = list(model.get_submodule(part).parameters())
        if any(p.requires_grad for p in parameters):
            break
        if parameters:
            found = part
    return found


def _declared(model: nn.Module, path: str) -> bool:
    names = path.split(".")
    around = (model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1))
    return any(getattr(module, "train_bn", None) is True for module in around)


def _copy_of_a_trained_part(facts: Facts, part: str) -> bool:
    """Whether another part has parameters of the same names and shapes and trains them: a momentum encoder.

    Blocks of one network look alike as well; of these, one feeds the other.
    """
    model = facts.target.model
    own = _shapes(model.get_submodule(part))
    return len(own) > _NORM_ALONE and any(
        _shapes(module) == own
        and any(p.requires_grad for p in module.parameters())
        and not _in_series(facts, part, path)
        for path, module in model.named_modules()
        if path and path != part
    )


def _in_series(facts: Facts, one: str, other: str) -> bool:
    """Whether what one part computes is read by the other."""
    return _feeds(facts.graph, one, other) or _feeds(facts.graph, other, one)


def _feeds(graph: Graph, source: str, reader: str) -> bool:
    reached: set[int] = set()
    for op in graph.ops:
        path = graph.path(op)
        fed = any(value in reached for value in op.inputs)
        if fed and (path == reader or path.startswith(f"{reader}.")):
            return True
        if fed or path == source or path.startswith(f"{source}."):
            reached.update(op.outputs)
    return False


_NORM_ALONE = 2  # a gain and a shift: every norm of that width looks alike


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]


def _finding(facts: Facts, part: str, norms: list[str], trial: Trial | None) -> Finding:
    drift = None if trial is None else trial.drift(norms)
    alone = part in norms
    size = sum(p.numel() for p in facts.target.model.get_submodule(part).parameters())
    return Finding(
        path=part,
        paths=(part, *(n for n in norms if n != part)),
        severity=Severity.INFO if alone else SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"frozen ({size:,} parameters), yet {counted(len(norms), 'batch norm')} in train mode",
            f"已冻结（{size:,} 个参数），但其中 {len(norms)} 个批归一化处于训练模式",
        ),
        evidence={
            "metric": _METRIC,
            "value": drift,
            "floor": 0.0,
            "norms": norms,
            "parameters": size,
            "parameters_trained": 0,
        },
        counterfactual=_repaired(facts, norms, drift) if drift else None,
        fix=both(
            "Override train() so that the frozen part stays in eval mode after every model.train().",
            "重写 train()，使冻结部分在每次 model.train() 之后仍处于评估模式。",
        ),
    )


_METRIC = "drift of a running mean in one forward, in standard deviations"


def _repaired(facts: Facts, norms: list[str], before: float) -> dict[str, object] | None:
    try:
        trial = facts.trials.forward(prepare=partial(_in_eval, norms=norms), repair=True)
    except NotKnown:
        return None
    change = both("the frozen part's batch norms in eval mode", "冻结部分的批归一化处于评估模式")
    return effect(change, _METRIC, before, trial.drift(norms))


def _in_eval(model: nn.Module, norms: list[str]) -> None:
    for path in norms:
        model.get_submodule(path).eval()


def _target(*, kept: bool) -> Target:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()).requires_grad_(False)
    model = nn.Sequential(encoder, nn.Linear(6, 2)).train()
    if kept:
        encoder.eval()
    return Target(model=model, args=(torch.randn(16, 4) + 1,))


def bad() -> Target:
    """Return a model whose frozen encoder is in train mode."""
    return _target(kept=False)


def good() -> Target:
    """Return the same model with the frozen encoder in eval mode."""
    return _target(kept=True)
