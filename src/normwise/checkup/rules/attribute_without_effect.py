"""A declared group count, axis or shape that the norm does not follow.

## What it finds
A norm whose module declares `num_groups`, a negative `axis` or `dim`, a `normalized_shape`, or a layout
("channels_first", "NHWC", ...; whatever the attribute is called), and computes something else. One element of the
norm's input is moved, in float64, and the elements of its output that move with it show which share a statistic. Only
modules that hold nothing but a norm are judged; an axis that a batch norm keeps, as Keras names it, is no
contradiction.

## Why it matters
The configuration says one thing and the model does another: an ablation of the group count compares a model with
itself, and a port that follows the declaration gives other numbers with the same weights. Nothing fails.

## How to fix it
Pass the attribute on to the arithmetic (reshape to groups before the statistics, reduce `dim=self.dim`), or remove it
where the weights were trained without it.

## Sources
Questions 4 and 20. Wu and He 2018, Group Normalization, https://arxiv.org/abs/1803.08494 (one group is layer norm, one
channel a group is instance norm).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.reach import Contradiction, Reach, contradictions, measure
from normwise.facts.rows import alike
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.targets import Target

ZH = """声明了却不起作用的组数、轴或形状。

## 发现什么
模块声明了 `num_groups`、负的 `axis` 或 `dim`、`normalized_shape` 或布局（"channels_first"、"NHWC" 等，
属性名不限），归一化算的却是另一回事。在 float64 下移动归一化输入的一个元素，看输出中哪些元素随之移动，
它们就共用一个统计量。只判断只含归一化的模块；批归一化按 Keras 的叫法所保留的轴不算矛盾。

## 为什么重要
配置说一套，模型做一套：对组数做消融是在拿模型与自己比较；按声明移植的实现用同样的权重得到不同的数。没有任何报错。

## 如何修复
让运算用上该属性（先按组重排再取统计量，归约 `dim=self.dim`）；若权重训练时就没有用它，则删除该属性。

## 来源
问题 4、20。Wu 与 He 2018，Group Normalization，https://arxiv.org/abs/1803.08494 （一组即层归一化，每通道一组即实例
归一化）。
"""

CODE = "AXS009"
SEVERITY = Severity.WARNING
EXPLAINS = ("AXS002", "AXS003", "CKP006")


def check(facts: Facts) -> Iterator[Finding]:
    """Report every attribute of a norm's module that the measured reach of its statistics contradicts."""
    found: dict[tuple[str, str, str], list[tuple[Site, Contradiction, Reach]]] = {}
    for group in alike(facts.sites, facts.recording):
        try:
            reach = measure(facts, group[0].calls[0])
        except (NotKnown, ValueError, RuntimeError, IndexError):
            continue  # a norm that does not run alone is judged by the other rules
        for site in group:
            for each in contradictions(facts, site.calls[0], reach):
                key = each.attribute, str(each.declared), str(each.measured)
                found.setdefault(key, []).append((site, each, reach))
    for hits in found.values():
        yield _finding(hits)


def _finding(hits: list[tuple[Site, Contradiction, Reach]]) -> Finding:
    paths = tuple(site.row.path for site, _, _ in hits)
    _, found, reach = hits[0]
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'norm')} declares {found.attribute}={found.declared}, measured: {found.measured}",
            f"{len(paths)} 个归一化声明 {found.attribute}={found.declared}，实测 {found.measured}",
        ),
        evidence={
            "norms": len(paths),
            "attribute": found.attribute,
            "declared": found.declared,
            "measured": found.measured,
            "shape": list(reach.shape),
            "moved_with_one_element": list(reach.moved),
        },
        fix=both(
            f"Let the arithmetic follow {found.attribute}, or remove it where the weights were trained without it.",
            f"让运算遵循 {found.attribute}；若权重训练时未用到它，则删除它。",
        ),
    )


class _Grouped(nn.Module):
    def __init__(self, num_groups: int, channels: int, *, used: bool) -> None:
        super().__init__()
        self.num_groups, self.used = num_groups, used
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = self.num_groups if self.used else 1
        y = x.view(x.shape[0], groups, -1)
        y = y - y.mean(-1, keepdim=True)
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).view(x.shape)
        return y * self.weight[:, None, None] + self.bias[:, None, None]


def _target(*, used: bool) -> Target:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), _Grouped(4, 8, used=used), nn.ReLU())
    return Target(model=model.eval(), args=(torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)),))


def bad() -> Target:
    """Return a model whose norm declares four groups and takes one."""
    return _target(used=False)


def good() -> Target:
    """Return the same model with four groups."""
    return _target(used=True)
