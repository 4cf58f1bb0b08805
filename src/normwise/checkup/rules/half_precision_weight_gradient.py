"""The gradient of a gain summed in half precision.

## What it finds
Norms whose gain or shift is held in half precision and whose gradient, on 16384 rows, is more than 10 % off. The op is
run by itself, in one thread, with an upstream gradient of which the true sums are known. It is a warning where the
model is trained in half precision (an optimizer or a train_step is given) and the rows of the example (batch x time)
lose more than 1 % already. Else it is worth knowing, with the number of rows from which it matters: small batches lose
nothing, and inference has no gradients.

## Why it matters
torch 2.13 adds these gradients up in the dtype of the input on the CPU: a sum of ones in bfloat16 stops at 256 or
512, where the next one is less than half a unit in the last place. With 16384 rows a shift gets 512 in place of
16384, so gains and shifts learn slower the larger the batch is, and nothing shows it. Several threads add up a share of
the rows each: n of them lose as little on n times the rows.

## How to fix it
Keep gains and shifts in float32 (mixed precision with float32 parameters), or use `normwise.layers`, which sum in
float32.

## Sources
Questions 41 and 58. https://docs.pytorch.org/docs/stable/amp.html (float32 parameters under autocast).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.ranges import HALF
from normwise.facts.rows import alike
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.targets import Target

ZH = """增益的梯度在半精度中求和。

## 发现什么
增益或偏移以半精度保存、且其梯度在 16384 行上相差超过 10% 的归一化。该操作在单线程中单独运行，上游梯度的真实和是已知
的。若模型以半精度训练（给出了 optimizer 或 train_step），且示例的行数（批 x 时间）已损失超过 1%，则为警告；否则只作提
示，并给出从多少行起有影响：小批次没有损失，推理没有梯度。

## 为什么重要
torch 2.13 在 CPU 上以输入的 dtype 累加这些梯度：bfloat16 中对 1 求和会停在 256 或 512，因为再加 1 已不到最后一位的一
半。16384 行时偏移得到 512 而不是 16384；于是批越大，增益和偏移学得越慢，而且没有任何迹象。多个线程各自累加一部分行：
n 个线程在 n 倍的行数上损失相同。

## 如何修复
让增益和偏移保持 float32（参数为 float32 的混合精度），或使用在 float32 中求和的 `normwise.layers`。

## 来源
问题 41、58。https://docs.pytorch.org/docs/stable/amp.html（autocast 下参数为 float32）。
"""

CODE = "NUM013"
SEVERITY = Severity.WARNING

# Rounding every partial sum of a float32 accumulator costs 0.4 %; what is lost to a half-precision one is most of it
LOST = 0.1
MATTERS = 0.01  # of a gradient: more than the rounding of the result, which is 0.4 % in bfloat16
ROWS = 16384  # a batch of 8 sequences of 2048
ELEMENTS = 2**19  # of the input made for it; fewer rows where they are long
FEWEST = 1024


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms in half precision whose parameters get wrong gradients from many rows."""
    parameters = facts.parameters
    halves = {torch.float16, torch.bfloat16}
    sites = [
        s
        for s in facts.sites
        if facts.graph.values[s.calls[0].input].dtype in HALF
        and (gain := parameters.get(s.row.weight_path or "")) is not None
        and gain.dtype in halves
        and s.row.spec is not None
        and s.row.spec.axes == (-1,)
    ]
    found: list[Site] = []
    losses: list[_Loss] = []
    unknown: NotKnown | None = None
    for group in alike(sites, facts.recording):
        rows = max(FEWEST, min(ROWS, ELEMENTS // facts.graph.values[group[0].calls[0].input].shape[-1]))
        try:
            loss = _loss(facts, group[0], rows)
        except NotKnown as why:
            unknown = why
            continue
        if loss is not None:
            found.extend(group)
            losses.append(loss)
    if found:
        yield _finding(facts, found, max(losses, key=lambda loss: loss.own))
    elif unknown is not None:
        raise unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """What the sums of a norm lose, in one thread."""

    own: float  # on as many rows as the example has
    own_rows: int
    error: float  # on many
    rows: int
    matters: int  # rows from which it matters


def _loss(facts: Facts, site: Site, rows: int) -> _Loss | None:
    """Return what is lost; None where the sums are taken in float32."""
    call = site.calls[0]
    error = facts.rows.parameter_error(call, rows)
    if error <= LOST:
        return None
    shape = facts.graph.values[call.input].shape
    own_rows = min(math.prod(shape[:-1]), rows)
    own = facts.rows.parameter_error(call, own_rows) if own_rows else 0.0
    matters = max(own_rows, 1)
    while own <= MATTERS and matters < rows:
        matters = min(2 * matters, rows)
        if facts.rows.parameter_error(call, matters) > MATTERS:
            break
    return _Loss(own=own, own_rows=own_rows, error=error, rows=rows, matters=matters)


def _finding(facts: Facts, sites: list[Site], loss: _Loss) -> Finding:
    trained = facts.target.optimizer is not None or facts.target.train_step is not None
    loses = loss.own > MATTERS
    if loses:
        said = both(
            f"{loss.own:.0%} lost over your {loss.own_rows} rows", f"你的 {loss.own_rows} 行损失 {loss.own:.0%}"
        )
    else:
        said = both(f"which loses from {loss.matters} rows on", f"从 {loss.matters} 行起有损失")
    dtype = facts.graph.values[sites[0].calls[0].input].dtype
    return Finding(
        path=sites[0].row.path,
        paths=tuple(s.row.path for s in sites),
        severity=Severity.WARNING if trained and loses else Severity.INFO,
        basis=Basis.MEASURED,
        message=both(
            f"{counted(len(sites), 'norm')}: gain gradients are summed in {dtype}, {said}",
            f"{len(sites)} 个归一化：增益的梯度在 {dtype} 中求和，{said.zh}",
        ),
        evidence={
            "metric": "relative error of the gradient of gain or shift",
            "value": loss.own,
            "floor": MATTERS,
            "rows": loss.own_rows,
            "matters_from_rows": loss.matters,
            "error_on_many_rows": loss.error,
            "many_rows": loss.rows,
            "threads": 1,
            "dtype": dtype,
            "norms": len(sites),
        },
        fix=both(
            "Train with float32 gains and shifts (mixed precision), or use normwise.layers, which sum in float32.",
            "训练时让增益和偏移为 float32（混合精度），或使用在 float32 中求和的 normwise.layers。",
        ),
    )


def _target(dtype: torch.dtype) -> Target:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == wide]} for wide in (True, False)]
    x = torch.randn(1024, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    return Target(model=model, args=(x,), optimizer=torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0))


def bad() -> Target:
    """Return a model trained in bfloat16."""
    return _target(torch.bfloat16)


def good() -> Target:
    """Return the same model in float32."""
    return _target(torch.float32)
