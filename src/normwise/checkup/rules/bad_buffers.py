"""Running statistics that no data can have produced.

## What it finds
Running variances that are NaN, infinite or negative, running means that are NaN or infinite (errors), and running
variances that are exactly 0 in a channel whose gain is not 0. Those are a warning where the example data is further
from the running mean than eps allows, so that the norm amplifies it; a channel that is dead on the data as well
(trained EfficientNets have over a hundred) is only worth knowing. Read from the buffers, exact; with inputs, the share
of the output that is not finite is measured before and after repair.

## Why it matters
In evaluation a batch norm divides by sqrt(running_var + eps). A negative variance makes its channel NaN, an infinite
one makes it constant, and a zero multiplies whatever arrives by 1/sqrt(eps), about 316. Training uses the batch's own
statistics and looks healthy, so the fault shows only after `eval()`.

## How to fix it
Find out how the buffers were filled (a mean copied into a variance, an average of checkpoints, a batch of one value, a
step that overflowed), then estimate them again: reset the running statistics and run some training batches in train
mode.

## Sources
Questions 10, 11 and 61. https://github.com/pytorch/pytorch/issues/106605 (negative running variance);
https://github.com/pytorch/pytorch/issues/10008 (running variance NaN or infinite).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.gaps import measure, recalibrated
from normwise.facts.repairs import effect
from normwise.facts.running import NO_NUMBERS, RunningStatistics, measured
from normwise.graph.capture import tensors_in
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS011"
SEVERITY = Severity.ERROR
READS_CHECKPOINTS = True
EXPLAINS = ("BNS004", "NUM009")

ZH = """任何数据都产生不出的运行统计量。

## 发现什么
为 NaN、无穷或负数的运行方差，为 NaN 或无穷的运行均值（错误）；以及增益不为 0 的通道上恰为 0 的运行方差：若示例数据与
运行均值的偏离超过 eps 所允许的，归一化就会放大它，为警告；在数据上同样是死的通道（训练好的 EfficientNet 有一百多个）
只作提示。从缓冲区读出，精确；给出输入时，在同一批上测量修复前后输出中非有限值所占的比例。

## 为什么重要
评估时批归一化除以 sqrt(running_var + eps)。负的方差使该通道成为 NaN，无穷的使其成为常数，零则把到来的一切乘以
1/sqrt(eps)，约 316。训练用批次自己的统计量，看起来正常，所以错误只在 `eval()` 之后显现。

## 如何修复
找出缓冲区是如何填入的（把均值复制成了方差、对检查点取平均、只有一个数值的批次、溢出的一步），然后重新估计：
重置运行统计量，并在训练模式下运行一些训练批次。

## 来源
问题 10、11 和 61。https://github.com/pytorch/pytorch/issues/106605（负的运行方差）；
https://github.com/pytorch/pytorch/issues/10008（运行方差为 NaN 或无穷）。
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Channels of one norm by what is wrong with them."""

    not_finite: int
    negative: int
    zero: int
    amplified: int = 0  # of those with a variance of 0: what the example data is amplified in

    @property
    def broken(self) -> int:
        """Channels that evaluation cannot use."""
        return self.not_finite + self.negative


def check(facts: Facts) -> Iterator[Finding]:
    """Report every norm whose running statistics are impossible."""
    counted_by_path = {r.path: _counts(r) for r in facts.running if not r.var.is_meta}
    if facts.running and not counted_by_path:
        raise NotKnown(NO_NUMBERS)
    broken = {p: c for p, c in counted_by_path.items() if c.broken}
    zero = {p: c for p, c in counted_by_path.items() if c.zero and not c.broken}
    if broken:
        channels = sum(c.broken for c in broken.values())
        message = both(
            f"{counted(channels, 'channel')} of running statistics negative or not finite",
            f"{channels} 个通道的运行统计量为负或非有限",
        )
        yield replace(_finding(SEVERITY, broken, message), counterfactual=_repaired(facts))
    zero = {p: replace(c, amplified=_amplified(facts, p)) for p, c in zero.items()}
    loud = {p: c for p, c in zero.items() if c.amplified}
    if loud:
        channels = sum(c.amplified for c in loud.values())
        message = both(
            f"{counted(channels, 'channel')} with a running variance of exactly 0 amplify the data",
            f"{channels} 个通道的运行方差恰为 0，放大了数据",
        )
        yield _finding(Severity.WARNING, loud, message)
    if quiet := {p: c for p, c in zero.items() if not c.amplified}:
        channels = sum(c.zero for c in quiet.values())
        message = both(
            f"{counted(channels, 'channel')} with a running variance of exactly 0, dead on the data or not seen",
            f"{channels} 个通道的运行方差恰为 0，在数据上没有变化，或未出现",
        )
        yield _finding(Severity.INFO, quiet, message)


def _amplified(facts: Facts, path: str) -> int:
    """Return how many channels of variance 0 the example data leaves by more than eps: their output exceeds 1."""
    running = next(r for r in facts.running if r.path == path)
    found = torch.zeros(running.var.shape, dtype=torch.bool)
    try:
        values = facts.graph.values
        for call in facts.norm_calls.norms:
            named = values[call.running_var].names if call.running_var is not None else ()
            if f"{path}.running_var" not in named or call.spec is None or call.uses_batch:
                continue
            data = measured(facts.target.model.get_submodule(path), facts.runs.base.of(call.input))
            if data is None:
                continue
            mean = 0.0 if running.mean is None else running.mean.cpu().double()
            away = data.var.cpu() + (data.mean.cpu() - mean).square()
            found |= away > (call.spec.eps or 0.0)
    except NotKnown:
        return 0
    return int((found & _zero(running).cpu()).sum())


def _zero(running: RunningStatistics) -> torch.Tensor:
    """Return which channels have a variance of 0 and a gain."""
    used = torch.ones_like(running.var, dtype=torch.bool)
    if running.weight is not None and running.weight.numel() == used.numel():
        used = running.weight.reshape(-1) != 0
    return (running.var == 0) & used


def _counts(running: RunningStatistics) -> Counts:
    finite = running.var.isfinite()
    if running.mean is not None and running.mean.shape == running.var.shape:
        finite &= running.mean.isfinite()
    return Counts(
        not_finite=int((~finite).sum()),
        negative=int((finite & (running.var < 0)).sum()),
        zero=int((finite & _zero(running)).sum()),
    )


def _repaired(facts: Facts) -> dict[str, Any] | None:
    """Run the example with statistics of that batch in place of all running ones; None where outputs are finite."""
    try:
        data = measure(facts, given=True)
        again = facts.trials.forward(prepare=recalibrated(data.live), repair=True)
    except NotKnown:
        return None
    before, after = (1 - _finite(trial.output) for trial in (data.still, again))
    change = both("running statistics of this batch", "用这一批的统计量作运行统计量")
    return effect(change, "share of the output that is not finite", before, after) if before else None


def _finite(output: Any) -> float:
    tensors = [t for t in tensors_in(output) if t.is_floating_point() and t.numel()]
    return float(torch.cat([t.isfinite().flatten() for t in tensors]).double().mean()) if tensors else 1.0


def _finding(severity: Severity, norms: dict[str, Counts], message: str) -> Finding:
    paths = tuple(norms)
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.PROOF,
        message=message,
        evidence={
            "norms": len(paths),
            "channels_not_finite": sum(c.not_finite for c in norms.values()),
            "channels_negative": sum(c.negative for c in norms.values()),
            "channels_zero": sum(c.zero for c in norms.values()),
            "channels_amplified": sum(c.amplified for c in norms.values()),
        },
        fix=both(
            "Estimate them again: norm.reset_running_stats(), then some training batches in train mode without a step.",
            "重新估计：先 norm.reset_running_stats()，再在训练模式下运行一些训练批次而不做优化步。",
        ),
    )


def _target(*, broken: bool) -> Target:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    mean = torch.tensor([0.3, -0.2, 0.1, -0.4])
    model[1].get_buffer("running_mean").copy_(mean)
    model[1].get_buffer("running_var").copy_(mean if broken else mean.abs())
    return Target(model=model, args=(torch.ones(1, 3, 5, 5),))


def bad() -> Target:
    """Return a model whose running means were copied into the running variances."""
    return _target(broken=True)


def good() -> Target:
    """Return the same model with variances that data could have had."""
    return _target(broken=False)
