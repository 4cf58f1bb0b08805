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
from normwise.rendering import both
from normwise.spec import Scope
from normwise.targets import InputsFrom, Target

ZH = """只对一个元素做归一化，等于忘掉输入。

## 发现什么
统计量只取自一个元素的归一化：`LayerNorm(1)`、在一个像素的图上每组一个通道的 `GroupNorm`、在一个像素的图上的实例归一
化、对一个数取均方根。元素个数来自实际运行，是精确的。

## 为什么重要
一个元素的均值就是它自己，`x - mean` 为 0，无论输入是什么，输出都是偏置：该特征及其梯度消失了。不减均值时只剩下符号。
没有任何报错，模型只是永远学不到它。

## 如何修复
在有多个元素的轴上归一化：先与其他特征拼接再归一化，用数据的统计量标准化（`BatchNorm1d` 或常数），减少组数，或去掉该
归一化。

## 来源
问题 3、20、24。https://github.com/pytorch/pytorch/issues/108956 （对单列做 LayerNorm 得到零）；
https://github.com/pytorch/pytorch/pull/12968 （实例归一化在训练中因同样原因报错）。
"""

CODE = "AXS007"
SEVERITY = Severity.ERROR
EXPLAINS = ("NUM005", "CKP006")


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
    left, left_zh = ("is its shift", "就是偏置") if centred else ("is the sign of its input", "只是输入的符号")
    where, where_zh = (" at this input size", "在此输入尺寸下") if by_size else ("", "")
    return Finding(
        paths=paths,
        severity=Severity.INFO if by_size else SEVERITY,
        basis=Basis.MEASURED if by_size else Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'norm')} over a single element{where}: the output {left}, whatever comes in",
            f"{where_zh}{len(paths)} 个归一化只覆盖一个元素：无论输入是什么，输出{left_zh}",
        ),
        evidence={
            "norms": len(paths),
            "elements": 1,
            "shapes": sorted({str(list(s.row.shape)) for s in sites}),
            "inputs": inputs_from,
        },
        fix=both(
            "Normalize over an axis with several elements (concatenate first, fewer groups), or drop this norm.",
            "在有多个元素的轴上归一化（先拼接，或减少组数），或去掉该归一化。",
        ),
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
