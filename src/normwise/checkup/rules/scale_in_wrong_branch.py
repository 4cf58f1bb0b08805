"""A residual scale that stands on the wrong side of the add.

## What it finds
A constant on skip or branch that the placement it belongs to puts on the other one:
- DeepNorm's alpha = (2N)^(1/4) on the branch, `x + alpha * f(x)`, or a constant above 1 on the branch of blocks that
  hold a norm which never runs; right is `norm(alpha * x + f(x))`;
- DeepNorm's alpha on the skip of a stack in which no norm follows the add, so that the stream grows as alpha^N;
- the configuration's `residual_multiplier` on the skip, where the family multiplies the branch;
- a learned vector or a constant of 1/4 or less (LayerScale) on the skip alone, `x * gamma + f(norm(x))`.
Scales below 1 on the branch (Granite, MiniCPM, muP, LayerScale, ReZero), factors on both (1/sqrt(2), a and 1 - a),
gates computed from the data (highway) and momentum are healthy, and so is any other constant.

## Why it matters
On the branch, alpha does the reverse of what it is for: each block multiplies the stream by up to 1 + alpha, so that it
grows geometrically with depth, where DeepNorm keeps updates small. A multiplier below 1 on the skip forgets the input.

## How to fix it
`x = norm(alpha * x + f(x))` with alpha = (2N)^(1/4), and the initial gain (8N)^(-1/4) on value, output and MLP
matrices. A residual multiplier belongs to the branch: `x + m * f(norm(x))`.

## Sources
Questions 66 and 67. https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/145 (alpha on the
wrong term, norm never applied); Wang et al. 2022, DeepNet, https://arxiv.org/abs/2203.00555.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.conventions import setting
from normwise.facts.records import Stack, StackKind
from normwise.facts.repairs import effect
from normwise.facts.rewiring import Rewire, rewired, rms
from normwise.facts.skip_factors import skip_factor
from normwise.facts.streams import Residual
from normwise.rendering import both
from normwise.targets import Target

ZH = """残差缩放放在了相加的错误一侧。

## 发现什么
跳连或分支上的常数，按其所属的设计本应在另一侧：
- DeepNorm 的 alpha = (2N)^(1/4) 放在分支上，即 `x + alpha * f(x)`；或分支上有大于 1 的常数，而块中的归一化从不执行；
  正确写法是 `norm(alpha * x + f(x))`；
- DeepNorm 的 alpha 在跳连上，但相加之后没有归一化，残差流按 alpha^N 增长；
- 配置中的 `residual_multiplier` 放在了跳连上，而该模型族是乘在分支上；
- 可学习的向量或不大于 1/4 的常数（LayerScale）只乘在跳连上，即 `x * gamma + f(norm(x))`。
分支上小于 1 的缩放（Granite、MiniCPM、muP、LayerScale、ReZero）、两侧都有的系数（1/sqrt(2)、a 与 1 - a）、
由数据算出的门（highway）、动量以及其他常数都是健康的。

## 为什么重要
放在分支上时，alpha 的作用正好相反：每块最多把残差流乘以 1 + alpha，于是随深度几何增长，而 DeepNorm 本要让更新保持很小。
跳连上小于 1 的乘数会遗忘输入。

## 如何修复
`x = norm(alpha * x + f(x))`，alpha = (2N)^(1/4)，并对 value、输出和 MLP 矩阵用初始增益 (8N)^(-1/4)。
残差乘数属于分支：`x + m * f(norm(x))`。

## 来源
问题 66 和 67。https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/145
（alpha 乘错了项，归一化从未执行）；Wang 等 2022，DeepNet，https://arxiv.org/abs/2203.00555。
"""

CODE = "PLC011"
SEVERITY = Severity.WARNING
EXPLAINS = ("PAR006", "CKP006")

# Constants are written to four digits or computed: what lies within half a percent of DeepNorm's is DeepNorm's.
SAME = 0.005
# below three blocks (2N)^(1/4) is sqrt(2), which other designs use as well
BLOCKS = 3
# of the adds of a stack; a first or last one may be wired otherwise
SHARE = 0.85
# The stream of healthy stacks grows by 1 to 3 over all blocks, in OLMo-2 by 65 (RULES 0.6); alpha^N of three DeepNorm
# blocks is 4 already.
GROWTH = 4.0


# Momentum and muP keep half of the stream or more at each add; of 1/4 no more than 1/16 is left after one block of two.
FORGETS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class _Misplaced:
    scale: float
    said: tuple[str, str]
    rewire: Rewire
    idle: tuple[str, ...] = ()
    skips: Mapping[int, int] | None = None  # by add, the stream before its factor: the input is forgotten


def check(facts: Facts) -> Iterator[Finding]:
    """Report the stacks with a scale on the wrong side."""
    for index, stack in enumerate(facts.placement.stacks):
        found = _on_branch(facts, index, stack) or _on_skip(stack) or _multiplier(facts, stack)
        found = found or _forgets(facts, index)
        if found is not None and (finding := _finding(facts, index, found)) is not None:
            yield finding


def _common(scales: list[float]) -> float | None:
    """Return the constant that nearly all adds share."""
    middle = sorted(scales)[len(scales) // 2]
    same = sum(abs(s - middle) <= SAME * abs(middle) for s in scales)
    return middle if same >= SHARE * len(scales) else None


def _deepnorm(alpha: float, stack: Stack) -> bool:
    """Whether a constant is DeepNorm's for the depth: (2N)^(1/4), in a decoder beside an encoder (3N)^(1/4)."""
    depths = {stack.depth, stack.sublayers // 2, stack.sublayers}
    known = [(k * n) ** 0.25 for n in depths if n >= BLOCKS for k in (2, 3)]
    return any(abs(alpha - k) <= SAME * k for k in known)


def _on_branch(facts: Facts, index: int, stack: Stack) -> _Misplaced | None:
    alpha = _common([m.wiring.branch_scale for m in stack.members])
    plain = _common([m.wiring.skip_scale for m in stack.members]) == 1.0
    if alpha is None or alpha <= 1 + SAME or not plain or stack.kind not in (StackKind.NONE, StackKind.POST):
        return None
    idle = _idle(facts, facts.placed.streams[index].adds)
    if not idle and not _deepnorm(alpha, stack):
        return None
    norms = f"; {len(idle)} norms never run" if idle else ""
    norms_zh = f"；{len(idle)} 个归一化从不执行" if idle else ""
    closes = stack.kind is StackKind.NONE
    return _Misplaced(
        scale=alpha,
        said=(f"{alpha:.3f} scales the branch, not the skip{norms}", f"{alpha:.3f} 乘在分支而不是跳连上{norms_zh}"),
        rewire=lambda skip, branch: _closed(alpha * skip + branch / alpha, closes),
        idle=idle,
    )


def _closed(stream: torch.Tensor, closes: bool) -> torch.Tensor:
    return nn.functional.layer_norm(stream, stream.shape[-1:]) if closes else stream


def _idle(facts: Facts, adds: list[Residual]) -> tuple[str, ...]:
    """Return the norms that never run in the modules that hold the adds, the model itself left out."""
    graph = facts.graph
    lines = [{c.path for c in graph.ancestors(a.op.call)} - {""} for a in adds]
    own = set().union(*lines) - (set.intersection(*lines) if len(lines) > 1 else set())
    return tuple(p for p in facts.not_executed if p.rpartition(".")[0] in own)


def _on_skip(stack: Stack) -> _Misplaced | None:
    alpha = _common([m.wiring.skip_scale for m in stack.members])
    plain = _common([m.wiring.branch_scale for m in stack.members]) == 1.0
    open_ended = not any(m.wiring.after_add for m in stack.members)
    if alpha is None or alpha <= 1 + SAME or not plain or not open_ended or not _deepnorm(alpha, stack):
        return None
    return _Misplaced(
        scale=alpha,
        said=(f"{alpha:.3f} scales the skip, and no norm follows the add", f"{alpha:.3f} 乘在跳连上，相加后没有归一化"),
        rewire=lambda skip, branch: _closed(skip + branch, closes=True),
    )


def _multiplier(facts: Facts, stack: Stack) -> _Misplaced | None:
    given = setting(facts.target.config, _KEY)
    if not isinstance(given, (int, float)) or isinstance(given, bool) or given in (0, 1):
        return None
    skip = _common([m.wiring.skip_scale for m in stack.members])
    branch = _common([m.wiring.branch_scale for m in stack.members])
    if skip is None or branch != 1.0 or abs(skip - given) > SAME * abs(given):
        return None
    return _Misplaced(
        scale=float(given),
        said=(f"{_KEY} {given:.3g} scales the skip, not the branch", f"{_KEY} {given:.3g} 乘在跳连而不是分支上"),
        rewire=lambda skip, branch: skip / given + given * branch,
    )


_KEY = "residual_multiplier"


def _forgets(facts: Facts, index: int) -> _Misplaced | None:
    if not facts.target.weights.magnitudes_count:
        return None
    adds = facts.placed.streams[index].adds
    factors = {add.index: f for add in adds if (f := skip_factor(facts, add)) is not None and f.size <= FORGETS}
    if len(adds) < 2 or len(factors) < SHARE * len(adds):
        return None
    size = sorted(f.size for f in factors.values())[len(factors) // 2]
    kind, kind_zh = ("learned ", "可学习的") if all(f.learned for f in factors.values()) else ("", "")
    return _Misplaced(
        scale=size,
        said=(
            f"a {kind}factor of {size:.2g} scales the skip, not the branch",
            f"{kind_zh}系数 {size:.2g} 乘在跳连而不是分支上",
        ),
        rewire=lambda skip, branch: skip + size * branch,
        skips={add: f.before for add, f in factors.items()},
    )


def _finding(facts: Facts, index: int, found: _Misplaced) -> Finding | None:
    stack, adds = facts.placement.stacks[index], facts.placed.streams[index].adds
    try:
        base = facts.runs.base
        start = (found.skips or {}).get(adds[0].index, adds[0].skip.root)
        growth = _ratio(rms(base.of(adds[-1].out)), rms(base.of(start)))
        change = both("the scale on the other side of the add", "把缩放放到相加的另一侧")
        changed = adds if found.skips is None else [a for a in adds if a.index in found.skips]
        wanted = [start, adds[-1].out, *(found.skips or {}).values()]
        run = rewired(facts, changed, found.rewire, wanted, skips=found.skips)
        # behind a norm the stream is 1 either way: what the scale decides is how much of the input is left
        closed = stack.kind is StackKind.POST or found.skips is not None
        metric = "cosine_of_first_and_last_stream" if closed else "stream_rms_at_the_last_add"
        before, after = (_measure(r.of(start), r.of(adds[-1].out), closed) for r in (base, run))
        repair = effect(change, metric, before, after)
    except NotKnown:
        growth, repair = None, None
    grows = stack.kind is not StackKind.POST and found.skips is None
    if repair is None or (grows and growth is not None and 1 / GROWTH < growth < GROWTH):
        severity = Severity.INFO
    else:
        severity = SEVERITY
    paths = tuple(dict.fromkeys(m.path for m in stack.members))
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.PATTERN if repair is None else Basis.MEASURED,
        message=both(
            found.said[0] + (f"; the stream grows x{growth:.3g}" if growth is not None and growth > GROWTH else ""),
            found.said[1] + (f"；残差流增长 {growth:.3g} 倍" if growth is not None and growth > GROWTH else ""),
        ),
        evidence={
            "stack": index,
            "scale": found.scale,
            "adds": stack.sublayers,
            "blocks": stack.depth,
            "norms_that_never_run": len(found.idle),
            **({"metric": "stream_growth", "value": growth, "floor": GROWTH} if growth is not None else {}),
        },
        counterfactual=repair,
        fix=both(
            "DeepNorm: x = norm(alpha * x + f(x)); a multiplier or LayerScale: x = x + m * f(norm(x)).",
            "DeepNorm：x = norm(alpha * x + f(x))；残差乘数或 LayerScale：x = x + m * f(norm(x))。",
        ),
    )


def _ratio(last: float, first: float) -> float | None:
    return last / first if first > 0 and math.isfinite(last) else None


def _measure(first: torch.Tensor, last: torch.Tensor, closed: bool) -> float:
    if not closed:
        return min(rms(last), 1e300)
    if first.shape != last.shape:
        raise NotKnown(both("the stream changes its shape", "残差流改变了形状"))
    return float(nn.functional.cosine_similarity(first.double().flatten(), last.double().flatten(), dim=0))


class _Block(nn.Module):
    def __init__(self, alpha: float, *, wrong: bool) -> None:
        super().__init__()
        self.mix, self.norm, self.alpha, self.wrong = nn.Linear(8, 8), nn.LayerNorm(8), alpha, wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.alpha * self.mix(x)) if self.wrong else self.norm(self.alpha * x + self.mix(x))


def _target(*, wrong: bool, **evidence: Any) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(16**0.25, wrong=wrong) for _ in range(8)))
    with torch.no_grad():
        for block in model:
            nn.init.xavier_normal_(block.mix.weight, gain=64**-0.25)  # type: ignore[union-attr,arg-type]
    return Target(model=model, args=(torch.randn(2, 3, 8),), **evidence)


def bad() -> Target:
    """Return eight post-norm blocks with DeepNorm's alpha on the branch."""
    return _target(wrong=True)


def good() -> Target:
    """Return the same blocks with alpha on the skip."""
    return _target(wrong=False)
