"""A trained batch norm whose running statistics are still those of the first moment.

## What it finds
A batch norm that has counted no batch, with a running mean of exactly 0 and a running variance of exactly 1, although
its shift has moved: the layer was trained or loaded, its statistics were not. Fresh models, where gain and
shift are untouched as well, and norms without a counter (folded or frozen ones) are no fault.

## Why it matters
In evaluation such a norm does not normalize: it takes any input for standard normal. The activations keep whatever
scale they have, and train and eval mode disagree. Typical ways there: only `parameters()` were saved, averaged or
exchanged (buffers are none), a load with `strict=False`, or a norm that always ran in eval mode while it was trained.

## How to fix it
Load the buffers with the weights (`state_dict()` holds both), or estimate them: run some training batches in train mode
without an optimizer step (`torch.optim.swa_utils.update_bn(loader, model)`).

## Sources
Questions 10, 11 and 39. https://docs.pytorch.org/docs/stable/optim.html (update_bn, and why averaged models need it);
Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, section 3.1 (inference with population statistics).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.running import RunningStatistics
from normwise.targets import Target

CODE = "BNS003"
SEVERITY = Severity.ERROR


def check(facts: Facts) -> Iterator[Finding]:
    """Report every batch norm that has counted no batch although its affine map was trained."""
    with_numbers = [r for r in facts.running if not r.var.is_meta]
    if facts.running and not with_numbers:
        raise NotKnown("the model holds no numbers: its running statistics are on the meta device")
    found = [r for r in with_numbers if _untouched(r) and _trained(r)]
    if found:
        yield _finding(found, len(with_numbers))


def _untouched(running: RunningStatistics) -> bool:
    no_mean = running.mean is None or bool((running.mean == 0).all())
    return running.counted == 0 and no_mean and bool((running.var == 1).all())


def _trained(running: RunningStatistics) -> bool:
    """Judge by the shift, which is 0 at the start everywhere; by the gain only without one, since some start random."""
    if running.bias is not None:
        return bool((running.bias != 0).any())
    return running.weight is not None and bool((running.weight != running.weight.reshape(-1)[0]).any())


def _finding(found: list[RunningStatistics], total: int) -> Finding:
    paths = tuple(r.path for r in found)
    shifts = [float(r.bias.abs().max()) for r in found if r.bias is not None]
    return Finding(
        path=paths[0],
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=f"{counted(len(found), 'trained batch norm')} never counted a batch: mean 0, variance 1",
        evidence={
            "norms": len(found),
            "of": total,
            "num_batches_tracked": 0,
            "running_mean": 0.0,
            "running_var": 1.0,
            "largest_shift": max(shifts, default=None),
        },
        fix="Load the buffers too, or run training batches through torch.optim.swa_utils.update_bn(loader, model).",
    )


def _target(*, updated: bool) -> Target:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    with torch.no_grad():
        model[1].get_parameter("weight").copy_(torch.tensor([0.8, 1.3, 1.1, 0.6]))
        model[1].get_parameter("bias").copy_(torch.tensor([0.2, -0.1, 0.0, 0.3]))
    images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    if updated:
        model.train()(images)
    return Target(model=model.eval(), args=(images,))


def bad() -> Target:
    """Return a model with trained gains and shifts, whose running statistics were never touched."""
    return _target(updated=False)


def good() -> Target:
    """Return the same model after a batch in train mode."""
    return _target(updated=True)
