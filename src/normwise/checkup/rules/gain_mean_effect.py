"""A gain that doubles or silences what it scales.

## What it finds
Norms whose *effective* gain, measured on a unit row, is 2 where the norm computes `1 + weight` and the weight was
initialised with ones; and norms on the only path through the model (final, head, embedding, post-norm, query and key)
whose gain is 0 in every channel, stored or computed from a condition (`y * scale` where `y * (1 + scale)` was meant,
with a matrix of zeros behind it). The stored number alone says neither: 0 is dead in a plain norm and neutral in one
with a unit offset, 1 is neutral or doubles. A factor that is 0 because the example's condition is 0 is not judged.

## Why it matters
A gain of 2 doubles every normalized activation from the first step, which changes attention logits by 4 and the size
of every branch. A gain of 0 at the end makes the output a constant, whatever the input. Norms at the end of a residual
branch (zero-init residual, res-post-norm, the gates of adaLN-Zero) are 0 on purpose and not reported; computed factors
of 0 elsewhere in a branch are information. In an architecture built with random weights (`hf:TYPE`) all of it is.

## How to fix it
Initialise the weight of a norm that computes `1 + weight` with zeros, that of a plain norm with ones; an init function
that sets every norm to 1 must ask which of the two it has before it.

## Sources
Questions 6 and 60. https://github.com/huggingface/transformers/issues/40224 (unit-offset norms initialised with ones),
fixed in https://github.com/huggingface/transformers/pull/40796.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.gains import Gain, regained
from normwise.facts.modulation import silenced
from normwise.facts.records import Place
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.spec import Kind
from normwise.targets import Target, Weights

CODE = "PAR010"
SEVERITY = Severity.WARNING
READS_CHECKPOINTS = True
EXPLAINS = ("CKP006",)

# Everything passes through these. Elsewhere a gain of 0 is a branch that starts closed, or, on queries and keys, an
# attention that starts uniform: Zaya's learned scale of the keys begins at 0.
ONLY_PATH = frozenset({Place.FINAL, Place.HEAD, Place.EMBEDDING, Place.STEM, Place.POST})
# Fresh gains drawn around 1, as N(1, 0.02), give effective gains around 2 with that spread.
SPREAD = 0.1
# With this share of all gains at 0 nothing was closed on purpose.
ALL = 0.9
MOST = 0.5  # of the norms of a checkpoint

ZH = """增益使输出加倍或归零。

## 发现什么
用单位行测得的*有效*增益：计算 `1 + weight` 的归一化若以 1 初始化，有效增益为 2；位于模型唯一通路上的归一化（最终、
输出头、嵌入、post-norm、查询和键）若每个通道的增益都为 0，无论是存储的还是由条件算出的（本应为 `y * (1 + scale)`
却写成 `y * scale`，而其后的矩阵为 0）。单看存储的数值无法判断：0 在普通归一化中是死的，在带单位偏移的归一化中是中性
的。因示例的条件为 0 而为 0 的因子不作判断。

## 为什么重要
增益为 2 会从第一步起使每个归一化后的激活加倍，注意力 logits 变为 4 倍。末端增益为 0 时，无论输入是什么，输出都是常
数。残差分支末端的归一化（零初始化残差、res-post-norm、adaLN-Zero 的门）有意为 0，不予报告；分支中其他位置算出的 0
只作提示。用随机权重构建的架构（`hf:TYPE`）全部只作提示。

## 如何修复
计算 `1 + weight` 的归一化用 0 初始化，普通归一化用 1 初始化；把所有归一化都设为 1 的初始化函数必须先区分这两种。

## 来源
问题 6 和 60。https://github.com/huggingface/transformers/issues/40224（带单位偏移的归一化被初始化为 1），修复见
https://github.com/huggingface/transformers/pull/40796。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report gains of 2 by a unit offset, and gains of 0 where nothing passes beside them."""
    gains = facts.gains.of(Kind.LAYER, Kind.RMS)
    fresh = facts.gains.trained is False and not facts.gains.loaded
    doubled = [g for g in gains if g.offset == 1 and (g.constant == 2 or (fresh and _around(g, 2.0)))]
    if facts.target.stored is not None and len(doubled) < MOST * len(gains):
        doubled = []  # a family has plain norms beside those that add 1, and a checkpoint does not say which they are
    if doubled:
        yield _doubled(facts, doubled, len(gains))
    silent = [g for g in gains if g.constant == 0]
    if len(silent) < ALL * len(gains):
        silent = [g for g in silent if g.site.row.placement in ONLY_PATH]
    if silent:
        yield _silent(facts, silent, len(gains))
    try:
        dead = [s for s in silenced(facts) if s.row.placement is not Place.BRANCH]
    except NotKnown:
        if doubled or silent:
            return
        raise
    if dead:
        yield _modulated(facts, dead)


def _severity(facts: Facts) -> Severity:
    # weights that were drawn for the map of an architecture train nobody's model
    return Severity.INFO if facts.target.weights is Weights.RANDOM else SEVERITY


def _around(gain: Gain, number: float) -> bool:
    return abs(gain.mean - number) <= SPREAD and gain.sd <= SPREAD


def _evidence(gains: Sequence[Gain], of: int) -> dict[str, object]:
    first = gains[0]
    return {
        "metric": "effective gain of a unit row",
        "value": first.mean,
        "expected": 1.0,
        "norms": len(gains),
        "of": of,
        "stored_mean": float(first.stored.double().mean()),
        "weight_offset": first.offset,
    }


def _doubled(facts: Facts, gains: list[Gain], of: int) -> Finding:
    said = both("compute weight instead of 1 + weight: a gain of 1", "改为直接用 weight 而不是 1 + weight：增益为 1")
    paths = tuple(dict.fromkeys(g.site.row.path for g in gains))
    return Finding(
        paths=paths,
        severity=_severity(facts),
        basis=Basis.MEASURED,
        message=both(
            f"{counted(len(gains), 'norm')} of {of} compute 1 + weight with a weight of 1: the gain is 2",
            f"{of} 个归一化中有 {len(gains)} 个计算 1 + weight，而 weight 为 1：增益为 2",
        ),
        evidence=_evidence(gains, of),
        counterfactual=regained(facts, gains, said, spec=lambda s: replace(s, weight_offset=0.0)),
        fix=both(
            "Initialise the weight of a norm that computes 1 + weight with zeros.",
            "计算 1 + weight 的归一化应以 0 初始化 weight。",
        ),
    )


def _silent(facts: Facts, gains: list[Gain], of: int) -> Finding:
    said = both("a gain of 1", "增益为 1")
    offset = gains[0].offset
    paths = tuple(dict.fromkeys(g.site.row.path for g in gains))
    return Finding(
        paths=paths,
        severity=_severity(facts),
        basis=Basis.MEASURED,
        message=both(
            f"{counted(len(gains), 'norm')} of {of} on the only path have a gain of 0: nothing of the input passes",
            f"{of} 个归一化中有 {len(gains)} 个位于唯一通路上而增益为 0：输入完全无法通过",
        ),
        evidence=_evidence(gains, of),
        counterfactual=regained(facts, gains, said, weight=lambda w: torch.full_like(w, 1.0 - offset)),
        fix=both(
            "Initialise the weight of a plain norm with ones; zeros are neutral only where 1 + weight is computed.",
            "普通归一化应以 1 初始化 weight；只有计算 1 + weight 时 0 才是中性的。",
        ),
    )


def _modulated(facts: Facts, sites: list[Site]) -> Finding:
    ordered = sorted(sites, key=lambda s: s.row.placement not in ONLY_PATH)
    only = ordered[0].row.placement in ONLY_PATH
    paths = tuple(dict.fromkeys(s.row.path for s in ordered))
    return Finding(
        paths=paths,
        severity=_severity(facts) if only else Severity.INFO,
        basis=Basis.MEASURED,
        message=both(
            f"{counted(len(paths), 'norm')} times a computed scale of exactly 0: nothing of the input passes",
            f"{len(paths)} 个归一化乘以算出的缩放，而它恰为 0：输入完全无法通过",
        ),
        evidence={
            "metric": "effective gain",
            "value": 0.0,
            "expected": 1.0,
            "norms": len(paths),
            "placement": str(ordered[0].row.placement),
        },
        fix=both(
            "Multiply by 1 + scale where the matrix that makes the scale starts at 0.",
            "产生缩放的矩阵若以 0 初始化，应乘以 1 + scale。",
        ),
    )


class _UnitOffset(nn.Module):
    def __init__(self, hidden_size: int, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


def _target(weight: float) -> Target:
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), _UnitOffset(8, weight), nn.Linear(8, 8), _UnitOffset(8, weight))
    return Target(model=model, args=(torch.randn(3, 6, generator=random),))


def bad() -> Target:
    """Return a model whose unit-offset norms start at 1."""
    return _target(1.0)


def good() -> Target:
    """Return a model whose unit-offset norms start at 0."""
    return _target(0.0)
