"""One norm instance that normalizes at several places.

## What it finds
A norm whose one set of parameters is used at several depths of a forward pass. For LayerNorm and RMSNorm that is a
design (weight sharing across layers, ALBERT) and only worth knowing. A norm with running statistics is a warning where
one call depends on the output of another and the channels' means or spreads differ by more than 6 standard errors and a
quarter of a deviation: its buffers are then the average of several distributions and right for none. Calls beside each
other (a siamese network, real and generated images) are not reported above information.

## Why it matters
In training each call normalizes with its own batch; in evaluation all use one mixture, so the gap between train and
eval stays however long one trains. It also counts several updates a step.

## How to fix it
One norm for each place (or for each time step), or a norm without running statistics (GroupNorm, LayerNorm).

## Sources
Question 11. https://arxiv.org/abs/1603.09025 (Cooijmans et al.: recurrent batch norm needs statistics of each time
step).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.calls import NormCall
from normwise.rendering import both
from normwise.targets import Target, Weights
from normwise.targets.target import InputsFrom

CODE = "PAR008"
SEVERITY = Severity.WARNING

SIGMAS = 6.0  # of the standard error of a mean, or of a logarithm of a deviation
EFFECT = 0.25  # of a deviation (RULES, BNS004): differences below it do not matter however sure they are
CHANNELS = 0.5  # share of the channels that must differ

ZH = """同一个归一化实例用于多个位置。

## 发现什么
一组参数在一次前向中用于多个深度的归一化。对 LayerNorm 和 RMSNorm 这是一种设计（跨层共享权重，ALBERT），只作提示。
带运行统计量的归一化，若一次调用依赖另一次调用的输出，且各通道的均值或离散程度相差超过 6 个标准误差和四分之一个标准
差，则为警告：其缓冲区是几种分布的平均，对哪一种都不对。并列的调用（孪生网络、真实与生成图像）最多只作提示。

## 为什么重要
训练时每次调用用自己的批统计；评估时都用同一个混合值，所以无论训练多久，train 与 eval 的差距都在。它每步还会更新多次。

## 如何修复
为每个位置（或每个时间步）使用单独的归一化，或使用没有运行统计量的归一化（GroupNorm、LayerNorm）。

## 来源
问题 11。https://arxiv.org/abs/1603.09025（Cooijmans 等：循环批归一化需要每个时间步的统计量）。
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """One norm that runs several times."""

    path: str
    calls: int
    running: bool
    differing: float | None  # share of channels
    loud: bool


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms whose parameters or buffers serve several places."""
    owners: dict[int, list[NormCall]] = defaultdict(list)
    for call in facts.norm_calls.norms:
        held = next((v for v in (call.running_var, call.weight) if v is not None), None)
        if held is not None:
            owners[held].append(call)
    roles: dict[object, list[_Shared]] = defaultdict(list)
    for held, calls in owners.items():
        if len(calls) > 1:
            shared = _read(facts, facts.graph.values[held].names[0].rpartition(".")[0], calls)
            roles[shared.loud, len(calls), re.sub(r"\d+", "*", shared.path)].append(shared)
    for alike in roles.values():
        yield _finding(alike)


def _read(facts: Facts, path: str, calls: Sequence[NormCall]) -> _Shared:
    running = calls[0].running_var is not None
    differing = _differing(facts, calls) if running else None
    loud = differing is not None and differing >= CHANNELS and _in_series(facts, calls)
    return _Shared(path=path, calls=len(calls), running=running, differing=differing, loud=loud)


def _finding(alike: Sequence[_Shared]) -> Finding:
    first = max(alike, key=lambda s: s.differing or 0.0)
    en = f", {first.differing:.0%} of channels differ" if first.differing is not None else ""
    zh = f"，{first.differing:.0%} 的通道不同" if first.differing is not None else ""
    return Finding(
        path=first.path,
        paths=(first.path, *(s.path for s in alike if s is not first)),
        severity=SEVERITY if first.loud else Severity.INFO,
        basis=Basis.MEASURED if first.loud else Basis.PROOF,
        message=both(
            f"{counted(len(alike), 'norm')} called {first.calls} times in a pass{en}",
            f"{len(alike)} 个归一化在一次前向中各调用 {first.calls} 次{zh}",
        ),
        evidence={
            "metric": "share of channels whose input differs between the calls",
            "value": first.differing,
            "norms": len(alike),
            "calls": first.calls,
            "running_statistics": first.running,
        },
        fix=both(
            "Give each place a norm of its own, or use a norm without running statistics.",
            "为每个位置使用单独的归一化，或使用没有运行统计量的归一化。",
        ),
    )


def _differing(facts: Facts, calls: Sequence[NormCall]) -> float | None:
    """Return the share of channels whose distributions differ between two calls, on data that means something."""
    if facts.target.weights is Weights.RANDOM or facts.target.inputs_from is not InputsFrom.GIVEN:
        return None
    try:
        inputs = [_by_channel(facts.runs.base.of(c.input)) for c in calls]
    except NotKnown:
        return None
    if any(len(x) < 2 or x.shape[1] != inputs[0].shape[1] for x in inputs):
        return None
    return max(_differs(a, b) for i, a in enumerate(inputs) for b in inputs[:i])


def _by_channel(x: torch.Tensor) -> torch.Tensor:
    return x.double().movedim(1, -1).flatten(0, -2) if x.ndim > 1 else x.double()[:, None]


def _differs(a: torch.Tensor, b: torch.Tensor) -> float:
    # a map of one sample is one draw more than many: the spread of its values is what is compared
    deviation = ((a.var(0) + b.var(0)) / 2).sqrt().clamp_min(1e-12)
    error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt().clamp_min(1e-12)
    gap = (a.mean(0) - b.mean(0)).abs()
    shifted = (gap > SIGMAS * error) & (gap > EFFECT * deviation)
    ratio = (a.std(0).clamp_min(1e-12) / b.std(0).clamp_min(1e-12)).log().abs()
    spread = (ratio > SIGMAS * (1 / (2 * len(a)) + 1 / (2 * len(b))) ** 0.5) & (ratio > EFFECT)
    return float((shifted | spread).double().mean())


def _in_series(facts: Facts, calls: Sequence[NormCall]) -> bool:
    """Whether one call reads what another made."""
    ordered = sorted(calls, key=lambda c: c.op.id)
    reached = {ordered[0].output, ordered[0].core}
    for op in facts.graph.ops[ordered[0].op.id :]:
        if any(i in reached for i in op.inputs):
            reached.update(op.outputs)
    return any(c.input in reached for c in ordered[1:])


class _TwoDepths(nn.Module):
    def __init__(self, *, norms: int) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norms = nn.ModuleList([nn.BatchNorm1d(4) for _ in range(norms)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](self.first(x))
        return self.head(self.norms[-1](4 * torch.relu(self.second(x)) + 3))


def _target(*, norms: int) -> Target:
    random = torch.Generator().manual_seed(0)
    return Target(model=_TwoDepths(norms=norms), args=(torch.randn(256, 4, generator=random),))


def bad() -> Target:
    """Return a model with one batch norm at two depths."""
    return _target(norms=1)


def good() -> Target:
    """Return the same model with two."""
    return _target(norms=2)
