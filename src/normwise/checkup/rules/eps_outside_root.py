"""An eps outside the square root: finite forward, no finite gradient.

## What it finds
A norm written by hand that divides by `sqrt(var) + eps` (or by `sqrt(var)` clamped from below) instead of
`sqrt(var + eps)`. The norm is run by itself, forward and backward, on rows of 0, 0.1, 1 and 3.7; it is reported only
where the forward is finite and the gradient is not. `x.std() + eps` and `x.norm() + eps` usually pass, because torch
masks their gradient at 0.

## Why it matters
The derivative of the root at 0 is infinite, and 0 * inf is NaN. One constant row (padding, an isolated node, a dead
channel) makes every gradient of the step NaN while all activations and the loss stay finite, so a watch on the forward
sees nothing and anomaly mode names `SqrtBackward0`, not the norm.

## How to fix it
Move eps into the root: `x * torch.rsqrt(var + eps ** 2)` keeps the size of the guard, `torch.rsqrt(var + 1e-5)` is
usual.

## Sources
Questions 5, 54 and 61. https://github.com/pyg-team/pytorch_geometric/pull/2917 (NaN gradients of a graph network,
fixed by moving eps); https://github.com/harvardnlp/annotated-transformer/issues/122 (the tutorial norm with std + eps).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.rows import alike
from normwise.facts.sites import Site
from normwise.targets import Target

CODE = "NUM004"
SEVERITY = Severity.WARNING

# A row of zeros is exact at every width. The others show which constants a centred norm trips on as well: whether
# the mean of n equal numbers is exactly that number depends on the number and on n.
CONSTANTS = (0.0, 0.1, 1.0, 3.7)


def check(facts: Facts) -> Iterator[Finding]:
    """Report every norm with its eps outside the root whose gradient is not finite on a constant row."""
    outside = [s for s in facts.sites if not s.row.native and s.calls[0].eps_outside]
    caught: dict[tuple[float, ...], list[Site]] = {}
    unknown: NotKnown | None = None
    for group in alike(outside, facts.recording):
        try:
            failing = _failing(facts, group[0])
        except NotKnown as why:
            unknown = why
            continue
        if failing:
            caught.setdefault(failing, []).extend(group)
    for failing, sites in caught.items():
        yield _finding(failing, sites)
    if unknown is not None and not caught:
        raise unknown


def _failing(facts: Facts, site: Site) -> tuple[float, ...]:
    answers = {number: facts.rows.constant(site.calls[0], number) for number in CONSTANTS}
    return tuple(n for n, a in answers.items() if a.forward_finite and not a.gradient_finite)


def _finding(failing: tuple[float, ...], sites: list[Site]) -> Finding:
    paths = tuple(s.row.path for s in sites)
    return Finding(
        path=paths[0],
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=f"{counted(len(paths), 'norm')}: eps outside the root, a constant row has no finite gradient",
        evidence={
            "norms": len(paths),
            "eps": sites[0].row.spec.eps if sites[0].row.spec else None,
            "rows_tried": list(CONSTANTS),
            "rows_without_finite_gradient": list(failing),
        },
        fix="Move eps into the root: x * torch.rsqrt(var + eps ** 2) instead of x / (sqrt(var) + eps).",
    )


class _LayerNorm(nn.Module):
    def __init__(self, hidden_size: int, *, inside: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(hidden_size)), nn.Parameter(torch.zeros(hidden_size))
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        var = x.square().mean(-1, keepdim=True)
        root = (var + 1e-6).sqrt() if self.inside else var.sqrt() + 1e-3
        return self.weight * (x / root) + self.bias


def _target(*, inside: bool) -> Target:
    model = nn.Sequential(nn.Linear(6, 8, bias=False), _LayerNorm(8, inside=inside), nn.Linear(8, 2))
    return Target(model=model, args=(torch.randn(3, 6, generator=torch.Generator().manual_seed(0)),))


def bad() -> Target:
    """Return a model that divides by sqrt(var) + eps."""
    return _target(inside=False)


def good() -> Target:
    """Return a model that divides by sqrt(var + eps)."""
    return _target(inside=True)
