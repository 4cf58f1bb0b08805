"""Weight decay on the gain of a norm.

## What it finds
Gains of LayerNorms and RMSNorms, found in the graph and not by name, that sit in an optimizer group with weight decay.
A zero-centred gain (`1 + weight`) passes: decay pulls it to the identity. For batch, group and instance
norms, whose gain many recipes decay on purpose, and for the scale of an L2 norm, it is only worth knowing.

## Why it matters
A gain of 1 is neutral, decay pulls it to 0: by the factor (1 - lr * decay) a step where decay is decoupled (AdamW), so
by exp(-1000 * lr * decay) every 1000 steps without a gradient that resists. With lr 1e-3 and decay 0.1 that is a tenth
of the scale, and whatever reads the norm must grow to make up for it. Most often nobody decided it: lists of names such
as `LayerNorm.weight` miss `norm1`, `norm_f`, `ln_f`.

## How to fix it
Select by shape: vectors are gains and shifts.

```python
decayed = [p for p in model.parameters() if p.ndim > 1]
spared = [p for p in model.parameters() if p.ndim <= 1]
AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}], lr=lr)
```

## Sources
Questions 6 and 25. https://github.com/deepspeedai/DeepSpeedExamples/pull/755 (a list of names that missed every norm);
https://github.com/huggingface/transformers/pull/35927 (the same in a trainer); Loshchilov and Hutter 2019,
https://arxiv.org/abs/1711.05101 (decoupled decay).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts, needs
from normwise.facts.optimizers import groups
from normwise.facts.repairs import effect
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.spec import Kind
from normwise.targets import Target

CODE = "PAR001"
SEVERITY = Severity.WARNING

# the span over which the pull is stated
STEPS = 1000

ZH = """对归一化增益施加了权重衰减。

## 发现什么
LayerNorm 和 RMSNorm 的增益（在计算图中找到，而非按名称）位于带权重衰减的优化器组中。以 0 为中心的增益（`1 + weight`）
通过：衰减把它拉向恒等。对批归一化、组归一化和实例归一化（许多配方有意衰减其增益）以及 L2 归一化的缩放，只作提示。

## 为什么重要
增益为 1 是中性的，衰减把它拉向 0：解耦衰减（AdamW）时每步乘以 (1 - lr * decay)，若没有梯度抵抗，每 1000 步乘以
exp(-1000 * lr * decay)。lr 为 1e-3、decay 为 0.1 时失去十分之一，读取该归一化的层必须增大来补偿。多数情况下没有人有
意如此：`LayerNorm.weight` 之类的名称列表会漏掉 `norm1`、`norm_f`、`ln_f`。

## 如何修复
按形状选择：向量就是增益和偏移。

```python
decayed = [p for p in model.parameters() if p.ndim > 1]
spared = [p for p in model.parameters() if p.ndim <= 1]
AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}], lr=lr)
```

## 来源
问题 6 和 25。https://github.com/deepspeedai/DeepSpeedExamples/pull/755（名称列表漏掉了所有归一化）；
https://github.com/huggingface/transformers/pull/35927（训练器中的同一问题）；Loshchilov 与 Hutter 2019，
https://arxiv.org/abs/1711.05101（解耦衰减）。
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group of the optimizer."""

    index: int
    lr: float
    decay: float

    @property
    def kept(self) -> float:
        """The share of a gain that is left after ``STEPS`` steps of decoupled decay alone."""
        return math.exp(-self.lr * self.decay * STEPS)


def check(facts: Facts) -> Iterator[Finding]:
    """Report every gain with a neutral value of 1 that the optimizer decays."""
    if facts.target.optimizer is None:
        raise NotKnown(needs.OPTIMIZER)
    _belongs(facts)
    decaying = _decaying(facts.target.optimizer)
    parameters = facts.parameters
    found: dict[tuple[Severity, Group], list[Site]] = {}
    for site in facts.sites:
        parameter = parameters.get(site.row.weight_path or "")
        group = decaying.get(id(parameter))
        if group is not None and site.row.spec is not None and site.row.spec.weight_offset == 0:
            found.setdefault((_severity(site), group), []).append(site)
    for (severity, group), sites in found.items():
        yield _finding(severity, group, sites, type(facts.target.optimizer).__name__)


def _belongs(facts: Facts) -> None:
    """Raise NotKnown where the optimizer trains another model: its groups say nothing about this one's norms."""
    own = {id(p) for p in facts.target.model.parameters()}
    if own and not any(id(p) in own for group in groups(facts.target.optimizer) for p in group.params):
        raise NotKnown(both("the optimizer holds none of the model's parameters", "优化器中没有该模型的任何参数"))


def _decaying(optimizer: Any) -> dict[int, Group]:
    """Return the group of every parameter with decay, by the parameter's identity."""
    return {
        # a warm-up may start at a rate of 0
        id(p): Group(index=i, lr=group.lr or group.initial_lr, decay=group.decay)
        for i, group in enumerate(groups(optimizer))
        if group.decay
        for p in group.params
    }


def _severity(site: Site) -> Severity:
    kind = site.row.spec.kind if site.row.spec is not None else Kind.OTHER
    return SEVERITY if kind in (Kind.LAYER, Kind.RMS) else Severity.INFO


def _finding(severity: Severity, group: Group, sites: list[Site], optimizer: str) -> Finding:
    gains = tuple(dict.fromkeys(s.row.weight_path for s in sites if s.row.weight_path))
    paths = tuple(dict.fromkeys(s.row.path for s in sites))
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(gains), 'gain')} decayed toward 0 (weight decay {group.decay:g}, group {group.index})",
            f"{len(gains)} 个增益被衰减向 0（权重衰减 {group.decay:g}，第 {group.index} 组）",
        ),
        evidence={
            "gains": list(gains),
            "optimizer": optimizer,
            "group": group.index,
            "lr": group.lr,
            "weight_decay": group.decay,
            f"kept_after_{STEPS}_steps": group.kept,
            "kinds": sorted({str(s.row.spec.kind) for s in sites if s.row.spec}),
        },
        # not the share that is kept: one step of a small rate is below what counts as a movement
        counterfactual=effect(
            both("weight_decay=0.0 for these gains", "对这些增益设 weight_decay=0.0"),
            "pull_of_one_step_on_a_gain_of_1",
            group.lr * group.decay,
            0.0,
        )
        if group.lr
        else None,
        fix=both(
            "Give parameters with p.ndim <= 1 a group of their own with weight_decay=0.0.",
            "为 p.ndim <= 1 的参数单独设组，weight_decay=0.0。",
        ),
    )


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm1, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm1(self.up(x)))


def _target(*, spared: bool) -> Target:
    model = _Model()
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1 or not spared], "weight_decay": 0.1}]
    if spared:
        groups.append({"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0})
    return Target(model=model, args=(torch.ones(2, 6),), optimizer=torch.optim.AdamW(groups, lr=1e-3))


def bad() -> Target:
    """Return a model with one group for all parameters."""
    return _target(spared=False)


def good() -> Target:
    """Return the same model with its vectors in a group without decay."""
    return _target(spared=True)
