"""An eps outside the square root: finite forward, no finite gradient.

## What it finds
A norm written by hand that divides by `sqrt(var) + eps` (or by `sqrt(var)` clamped from below; a `clamp(min=0)` under
the root guards nothing) instead of `sqrt(var + eps)`. Such a norm, and any whose eps is not known or 0, is run by
itself, forward and backward, on rows of 0, 0.1, 1 and 3.7; it is reported only where the forward is finite and the
gradient is not. `x.std() + eps` and `x.norm() + eps` usually pass, because torch masks
their gradient at 0.

## Why it matters
The derivative of the root at 0 is infinite, and 0 * inf is NaN. One constant row (padding, an isolated node, a dead
channel) makes every gradient of the step NaN while all activations and the loss stay finite, so a watch on the
forward sees nothing and anomaly mode names `SqrtBackward0`, not the norm.

## How to fix it
Move eps into the root: `x * torch.rsqrt(var + eps ** 2)` keeps the size of the guard, `torch.rsqrt(var + 1e-5)` is
usual.

## Sources
Questions 5, 54 and 61. https://github.com/pyg-team/pytorch_geometric/pull/2917 (NaN gradients of a graph network,
fixed by moving eps); https://github.com/harvardnlp/annotated-transformer/issues/122 (the tutorial norm with std +
eps).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.repairs import effect
from normwise.facts.rows import alike
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.spec import Kind
from normwise.targets import Target

ZH = """eps 在平方根之外：前向有限，梯度非有限。

## 发现什么
除以 `sqrt(var) + eps`（或从下方截断的 `sqrt(var)`；根号内的 `clamp(min=0)` 不起保护作用）而不是 `sqrt(var + eps)` 的
手写归一化。这样的归一化以及 eps 未知或为 0 的归一化，在全为 0、0.1、1 和 3.7 的行上单独运行前向和反向；只有前向有限而
梯度非有限时才报告。`x.std() + eps` 和 `x.norm() + eps` 通常没有问题，因为 torch 把它们在 0 处的梯度置零。

## 为什么重要
根号在 0 处的导数为无穷，而 0 * inf 为 NaN。只要一行是常数（补齐、孤立节点、死通道），这一步的所有梯度都变成 NaN，而激
活和损失都是有限的：监视前向的工具什么也看不到，anomaly mode 指向 `SqrtBackward0`，而不是归一化。

## 如何修复
把 eps 移进根号：`x * torch.rsqrt(var + eps ** 2)` 保持保护的大小，通常用 `torch.rsqrt(var + 1e-5)`。

## 来源
问题 5、54、61。https://github.com/pyg-team/pytorch_geometric/pull/2917（图网络的 NaN 梯度，移动 eps 后修复）；
https://github.com/harvardnlp/annotated-transformer/issues/122（教程中 std + eps 的归一化）。
"""

CODE = "NUM004"
SEVERITY = Severity.WARNING
EXPLAINS = ("NUM012",)

# A row of zeros is exact at every width. The others show which constants a centred norm trips on as well: whether
# the mean of n equal numbers is exactly that number depends on the number and on n.
CONSTANTS = (0.0, 0.1, 1.0, 3.7)


def check(facts: Facts) -> Iterator[Finding]:
    """Report every norm with its eps outside the root whose gradient is not finite on a constant row."""
    outside = [s for s in facts.sites if not s.row.native and (s.calls[0].eps_outside or _unclear(s))]
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
        yield _finding(facts, failing, sites)
    if unknown is not None and not caught:
        raise unknown


def _unclear(site: Site) -> bool:
    """Whether no eps is known: `x / where(s == 0, 1, s)` has a guard all the same."""
    return site.row.spec is None or site.row.spec.kind is Kind.OTHER or not site.row.spec.eps


def _failing(facts: Facts, site: Site) -> tuple[float, ...]:
    answers = {number: facts.rows.constant(site.calls[0], number) for number in CONSTANTS}
    return tuple(n for n, a in answers.items() if a.forward_finite and not a.gradient_finite)


def _finding(facts: Facts, failing: tuple[float, ...], sites: list[Site]) -> Finding:
    paths = tuple(s.row.path for s in sites)
    where = _OUTSIDE if all(s.calls[0].eps_outside for s in sites) else _UNGUARDED
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'norm')}: {where}, a constant row has no finite gradient",
            f"{len(paths)} 个归一化：{where.zh}，常数行没有有限的梯度",
        ),
        evidence={
            "norms": len(paths),
            "eps": sites[0].row.spec.eps if sites[0].row.spec else None,
            "rows_tried": list(CONSTANTS),
            "rows_without_finite_gradient": list(failing),
        },
        counterfactual=_repair(facts, sites[0], failing),
        fix=both(
            "Move eps into the root: x * torch.rsqrt(var + eps ** 2) instead of x / (sqrt(var) + eps).",
            "把 eps 移进根号：用 x * torch.rsqrt(var + eps ** 2) 代替 x / (sqrt(var) + eps)。",
        ),
    )


_OUTSIDE = both("eps outside the root", "eps 在根号之外")
_UNGUARDED = both("a root of 0", "根号内为 0")


def _repair(facts: Facts, site: Site, failing: tuple[float, ...]) -> dict[str, object] | None:
    """Judge the same formula with its eps, squared, inside the root on the rows that failed."""
    spec = site.row.spec
    if spec is None or spec.eps is None:
        return None
    # the square of a float16 eps of 1e-5 is 0 there
    inside = replace(
        spec, eps_inside=True, eps_clamp=False, eps=max(spec.eps**2, 1e-5 if _is_half(facts, site) else 0.0)
    )
    try:
        left = sum(not facts.rows.constant(site.calls[0], number, inside).gradient_finite for number in failing)
    except (NotKnown, ValueError, RuntimeError):
        return None
    return effect(both("eps inside the root", "eps 在根号之内"), "rows without a finite gradient", len(failing), left)


def _is_half(facts: Facts, site: Site) -> bool:
    return facts.graph.values[site.calls[0].statistic_value].dtype == "float16"


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
