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
from normwise.facts import Facts
from normwise.facts.sites import Site
from normwise.spec import Kind
from normwise.targets import Target

CODE = "PAR001"
SEVERITY = Severity.WARNING

# the span over which the pull is stated
STEPS = 1000


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
        raise NotKnown("needs the optimizer: pass optimizer=...")
    groups = _decaying(facts.target.optimizer)
    parameters = dict(facts.target.model.named_parameters(remove_duplicate=False))
    found: dict[tuple[Severity, Group], list[Site]] = {}
    for site in facts.sites:
        parameter = parameters.get(site.row.weight_path or "")
        group = groups.get(id(parameter))
        if group is not None and site.row.spec is not None and site.row.spec.weight_offset == 0:
            found.setdefault((_severity(site), group), []).append(site)
    for (severity, group), sites in found.items():
        yield _finding(severity, group, sites, type(facts.target.optimizer).__name__)


def _decaying(optimizer: Any) -> dict[int, Group]:
    """Return the group of every parameter with decay, by the parameter's identity."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise NotKnown(f"the optimizer ({type(optimizer).__name__}) has no param_groups")
    return {
        # a warm-up may start at a rate of 0, which the scheduler keeps as initial_lr
        id(p): Group(index=i, lr=float(g.get("lr") or g.get("initial_lr") or 0.0), decay=float(g["weight_decay"]))
        for i, g in enumerate(groups)
        if g.get("weight_decay")
        for p in g["params"]
    }


def _severity(site: Site) -> Severity:
    kind = site.row.spec.kind if site.row.spec is not None else Kind.OTHER
    return SEVERITY if kind in (Kind.LAYER, Kind.RMS) else Severity.INFO


def _finding(severity: Severity, group: Group, sites: list[Site], optimizer: str) -> Finding:
    gains = tuple(dict.fromkeys(s.row.weight_path for s in sites if s.row.weight_path))
    paths = tuple(dict.fromkeys(s.row.path for s in sites))
    return Finding(
        path=paths[0],
        paths=paths,
        severity=severity,
        basis=Basis.PROOF,
        message=f"{counted(len(gains), 'gain')} decayed toward 0 (weight decay {group.decay:g}, group {group.index})",
        evidence={
            "gains": list(gains),
            "optimizer": optimizer,
            "group": group.index,
            "lr": group.lr,
            "weight_decay": group.decay,
            f"kept_after_{STEPS}_steps": group.kept,
            "kinds": sorted({str(s.row.spec.kind) for s in sites if s.row.spec}),
        },
        fix="Give parameters with p.ndim <= 1 a group of their own with weight_decay=0.0.",
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
