"""A norm over a single element, which forgets its input.

## What it finds
A norm whose statistics are taken over one element: `LayerNorm(1)`, a `GroupNorm` with one channel a group on a map of
one pixel, an instance norm on a map of one pixel, a root mean square of one number. The count is exact, from the run.

## Why it matters
The mean of one element is that element, so `x - mean` is 0 and the output is the shift, whatever the input: the
feature and its gradient are gone. Without centring what is left is the sign. Nothing fails, the model only never learns
from it.

## How to fix it
Normalize over an axis that holds something: concatenate the feature with others before the norm, standardize it with
statistics of the data (a `BatchNorm1d`, or constants), use fewer groups, or drop the norm.

## Sources
Questions 3, 20 and 24. https://github.com/pytorch/pytorch/issues/108956 (LayerNorm of a single column gives zeros);
https://github.com/pytorch/pytorch/pull/12968 (the error instance norm raises in training for the same reason).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.facts import Facts
from normwise.facts.sites import Site
from normwise.spec import Scope
from normwise.targets import InputsFrom, Target

CODE = "AXS007"
SEVERITY = Severity.ERROR


def check(facts: Facts) -> Iterator[Finding]:
    """Report every norm that takes its statistics of this call over one element."""
    found: dict[tuple[bool, bool], list[Site]] = {}
    for site in facts.sites:
        if all(c.count == 1 and c.uses_batch for c in site.calls):
            found.setdefault((_centred(site), _by_size(facts, site)), []).append(site)
    for (centred, by_size), sites in found.items():
        yield _finding(centred, by_size, sites, str(facts.target.inputs_from))


def _centred(site: Site) -> bool:
    return site.row.spec is None or site.row.spec.center


def _by_size(facts: Facts, site: Site) -> bool:
    """Whether only the size of inputs that normwise chose leaves one element: another image would leave more."""
    spec = site.row.spec
    spatial = spec is not None and spec.scope in (Scope.GROUP, Scope.INSTANCE) and len(site.row.shape) > 2
    return spatial and facts.target.inputs_from is not InputsFrom.GIVEN


def _finding(centred: bool, by_size: bool, sites: list[Site], inputs_from: str) -> Finding:
    paths = tuple(s.row.path for s in sites)
    left = "is its shift" if centred else "is the sign of its input"
    where = " at this input size" if by_size else ""
    return Finding(
        path=paths[0],
        paths=paths,
        severity=Severity.INFO if by_size else SEVERITY,
        basis=Basis.MEASURED if by_size else Basis.PROOF,
        message=f"{counted(len(paths), 'norm')} over a single element{where}: the output {left}, whatever comes in",
        evidence={
            "norms": len(paths),
            "elements": 1,
            "shapes": sorted({str(list(s.row.shape)) for s in sites}),
            "inputs": inputs_from,
        },
        fix="Normalize over an axis with several elements (concatenate first, fewer groups), or drop this norm.",
    )


class _Tabular(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.embed, self.head = norm, nn.Embedding(5, 7), nn.Linear(8, 2)

    def forward(self, number: torch.Tensor, category: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.norm(number), self.embed(category)], -1))


def _target(norm: nn.Module) -> Target:
    return Target(model=_Tabular(norm).eval(), args=(torch.tensor([[2.0], [5.0]]), torch.tensor([1, 3])))


def bad() -> Target:
    """Return a model that layer-normalizes one column."""
    return _target(nn.LayerNorm(1))


def good() -> Target:
    """Return a model that standardizes the column by the data."""
    return _target(nn.BatchNorm1d(1))
