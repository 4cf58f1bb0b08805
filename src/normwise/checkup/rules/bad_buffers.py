"""Running statistics that no data can have produced.

## What it finds
Running variances that are NaN, infinite or negative, running means that are NaN or infinite (errors), and running
variances that are exactly 0 in a channel whose gain is not 0 (a warning). Read from the buffers, exact.

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
from dataclasses import dataclass

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.running import RunningStatistics
from normwise.targets import Target

CODE = "BNS011"
SEVERITY = Severity.ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Channels of one norm by what is wrong with them."""

    not_finite: int
    negative: int
    zero: int

    @property
    def broken(self) -> int:
        """Channels that evaluation cannot use."""
        return self.not_finite + self.negative


def check(facts: Facts) -> Iterator[Finding]:
    """Report every norm whose running statistics are impossible."""
    counted_by_path = {r.path: _counts(r) for r in facts.running if not r.var.is_meta}
    if facts.running and not counted_by_path:
        raise NotKnown("the model holds no numbers: its running statistics are on the meta device")
    broken = {p: c for p, c in counted_by_path.items() if c.broken}
    zero = {p: c for p, c in counted_by_path.items() if c.zero and not c.broken}
    if broken:
        channels = counted(sum(c.broken for c in broken.values()), "channel")
        yield _finding(SEVERITY, broken, f"{channels} of running statistics negative or not finite")
    if zero:
        channels = counted(sum(c.zero for c in zero.values()), "channel")
        yield _finding(Severity.WARNING, zero, f"{channels} with a running variance of exactly 0")


def _counts(running: RunningStatistics) -> Counts:
    finite = running.var.isfinite()
    if running.mean is not None and running.mean.shape == running.var.shape:
        finite &= running.mean.isfinite()
    used = torch.ones_like(finite) if running.weight is None else running.weight.reshape(-1) != 0
    zero = (running.var == 0) & (used if used.shape == finite.shape else torch.ones_like(finite))
    return Counts(
        not_finite=int((~finite).sum()),
        negative=int((finite & (running.var < 0)).sum()),
        zero=int((finite & zero).sum()),
    )


def _finding(severity: Severity, norms: dict[str, Counts], message: str) -> Finding:
    paths = tuple(norms)
    return Finding(
        path=paths[0],
        paths=paths,
        severity=severity,
        basis=Basis.PROOF,
        message=message,
        evidence={
            "norms": len(paths),
            "channels_not_finite": sum(c.not_finite for c in norms.values()),
            "channels_negative": sum(c.negative for c in norms.values()),
            "channels_zero": sum(c.zero for c in norms.values()),
        },
        fix="Estimate them again: norm.reset_running_stats(), then some training batches in train mode without a step.",
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
