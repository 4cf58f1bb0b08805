"""An eps that vanishes in the dtype in which it is added.

## What it finds
A norm written by hand whose eps is added (or clamped to) in a dtype that rounds it away, so that a row of zeros comes
out as NaN or infinity. The norm is run by itself on a row of zeros, in the dtypes it really has. The number in a
configuration is no evidence: one in seven of the eps defaults in transformers is 1e-12 and sound, because it is added
in float32. An error where rows of the example run already come out so, else a warning.

## Why it matters
The smallest positive float16 is 6e-8: an eps of 1e-12, or the default of `F.normalize`, is 0 there, and a row of
zeros becomes 0/0. Such rows are common: padding embeddings, dead channels, masked positions. One of them makes the
loss NaN.

## How to fix it
Add eps in float32 (take the statistics there), or use an eps that the dtype holds: at least 1e-5 in float16.

## Sources
Questions 5, 41, 59 and 61. https://github.com/pytorch/pytorch/issues/41527 (NaN for constant rows with eps 1e-12 in
half precision); https://github.com/deepspeedai/DeepSpeed/issues/581 (the same in a fused kernel).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.repairs import effect
from normwise.facts.rows import alike
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.targets import Target

ZH = """在相加时所用 dtype 中消失的 eps。

## 发现什么
eps 在某个 dtype 中相加（或截断）时被舍入掉、以致全零行输出 NaN 或无穷的手写归一化。归一化用它真实的 dtype 单独在全零
行上运行。配置里的数字不是证据：transformers 中七分之一的 eps 默认值是 1e-12，它们没有问题，因为是在 float32 中相加。
若示例运行中已有这样的行，为错误，否则为警告。

## 为什么重要
float16 最小的正数是 6e-8：1e-12 的 eps，或 `F.normalize` 的默认值，在那里就是 0，全零行变成 0/0。这样的行很常见：补齐
嵌入、死通道、被掩码的位置。只要一行就使损失变成 NaN。

## 如何修复
在 float32 中加 eps（统计量也在 float32 中计算），或使用该 dtype 容得下的 eps：float16 中至少 1e-5。

## 来源
问题 5、41、59、61。https://github.com/pytorch/pytorch/issues/41527（半精度中 eps 为 1e-12 时常数行得到 NaN）；
https://github.com/deepspeedai/DeepSpeed/issues/581（融合内核中的同样问题）。
"""

CODE = "NUM003"
SEVERITY = Severity.ERROR
EXPLAINS = ("NUM001", "NUM005", "NUM006", "NUM009")  # what fails on these rows comes before what may fail on others


def check(facts: Facts) -> Iterator[Finding]:
    """Report every norm with an eps that turns a row of zeros into NaN all the same."""
    guarded = [s for s in facts.sites if not s.row.native and s.calls[0].guarded_value >= 0 and _eps(s) > 0]
    lost: dict[tuple[str, float], list[Site]] = {}
    unknown: NotKnown | None = None
    for group in alike(guarded, facts.recording):
        call = group[0].calls[0]
        try:
            finite = facts.rows.constant(call, 0.0).forward_finite
        except NotKnown as why:
            unknown = why
            continue
        if not finite:
            lost.setdefault((facts.graph.values[call.guarded_value].dtype, _eps(group[0])), []).extend(group)
    for (dtype, eps), sites in lost.items():
        yield _finding(facts, dtype, eps, sites)
    if unknown is not None and not lost:
        raise unknown


def _eps(site: Site) -> float:
    return (site.row.spec.eps or 0.0) if site.row.spec is not None else 0.0


def _finding(facts: Facts, dtype: str, eps: float, sites: list[Site]) -> Finding:
    numbers: Any = torch.finfo(getattr(torch, dtype))
    rounded = torch.tensor(eps, dtype=torch.float64).to(getattr(torch, dtype)).item()
    paths, failing = tuple(s.row.path for s in sites), _failing(facts, sites)
    return Finding(
        paths=paths,
        severity=Severity.ERROR if failing else Severity.WARNING,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'norm')}: eps {eps:.0e} is {rounded:g} in {dtype}, a row of zeros is not finite",
            f"{len(paths)} 个归一化：eps {eps:.0e} 在 {dtype} 中为 {rounded:g}，全零行非有限",
        ),
        evidence={
            "norms": len(paths),
            "metric": "eps in the dtype it is added in",
            "value": rounded,
            "floor": numbers.smallest_normal * numbers.eps,
            "eps": eps,
            "dtype": dtype,
            "eps_in_dtype": rounded,
            "smallest_positive": numbers.smallest_normal * numbers.eps,
            "zero_row": both("not finite", "非有限"),
            "norms_that_fail_on_the_example": failing,
        },
        counterfactual=_repair(facts, sites[0], dtype),
        fix=both(
            f"Add eps in float32 (x.float() before the statistics), or use at least {_enough(dtype):.0e} in {dtype}.",
            f"在 float32 中加 eps（统计量之前 x.float()），或在 {dtype} 中至少用 {_enough(dtype):.0e}。",
        ),
    )


def _failing(facts: Facts, sites: list[Site]) -> int:
    """Return how many of the norms hand on what is not finite in the example run."""
    try:
        return sum(any(facts.ranges.fails(c) for c in s.calls) for s in sites)
    except NotKnown:
        return 0


def _repair(facts: Facts, site: Site, dtype: str) -> dict[str, Any] | None:
    """Judge the same formula with an eps that the dtype holds on the row of zeros."""
    if site.row.spec is None:
        return None
    try:
        after = facts.rows.constant(site.calls[0], 0.0, replace(site.row.spec, eps=_enough(dtype)))
    except (NotKnown, ValueError, RuntimeError):
        return None
    change = both(f"eps {_enough(dtype):.0e}", f"eps 改为 {_enough(dtype):.0e}")
    return effect(change, "rows of zeros that are not finite", 1, int(not after.forward_finite))


def _enough(dtype: str) -> float:
    """Return an eps whose reciprocal root stays in range: 1e-5 in float16, 1e-6 where there is float32's range."""
    return 1e-5 if dtype == "float16" else 1e-6


class _Cosine(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.embed, self.head, self.eps = nn.Embedding(5, 8, padding_idx=0), nn.Linear(8, 3), eps

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(F.normalize(self.embed(ids), dim=-1, eps=self.eps))


def _target(eps: float) -> Target:
    return Target(model=_Cosine(eps).half().eval(), args=(torch.tensor([[1, 2, 0]]),))


def bad() -> Target:
    """Return a float16 model that normalizes padding with the default eps of ``F.normalize``."""
    return _target(1e-12)


def good() -> Target:
    """Return the same model with an eps that float16 holds."""
    return _target(1e-3)
