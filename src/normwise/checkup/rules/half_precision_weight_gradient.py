"""The gradient of a gain summed in half precision.

## What it finds
Norms whose gain or shift is held in half precision and whose gradient, on many rows, is more than 10 % off. The op is
run by itself with an upstream gradient of which the true sums are known. It is a warning where the model is trained
in half precision (an optimizer or a train_step is given), else worth knowing: inference has no gradients.

## Why it matters
torch 2.13 adds these gradients up in the dtype of the input on the CPU: a sum of ones in bfloat16 stops at 256 or
512, where the next one is less than half a unit in the last place. With 16384 rows a shift gets 512 in place of
16384, so gains and shifts learn slower the larger the batch is, and nothing shows it.

## How to fix it
Keep gains and shifts in float32 (mixed precision with float32 parameters), or use `normwise.layers`, which sum in
float32.

## Sources
Questions 41 and 58. https://docs.pytorch.org/docs/stable/amp.html (float32 parameters under autocast).
"""

from __future__ import annotations

from collections.abc import Iterator

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
增益或平移以半精度保存、且其梯度在很多行上相差超过 10% 的归一化。该算子单独运行，上游梯度的真实和是已知的。若模型以半
精度训练（给出了 optimizer 或 train_step）则为警告，否则只作提示：推理没有梯度。

## 为什么重要
torch 2.13 在 CPU 上以输入的 dtype 累加这些梯度：bfloat16 中对 1 求和会停在 256 或 512，因为再加 1 已不到最后一位的一
半。16384 行时平移得到 512 而不是 16384；于是批越大，增益和平移学得越慢，而且没有任何迹象。

## 如何修复
让增益和平移保持 float32（参数为 float32 的混合精度），或使用在 float32 中求和的 `normwise.layers`。

## 来源
问题 41、58。https://docs.pytorch.org/docs/stable/amp.html（autocast 下参数为 float32）。
"""

CODE = "NUM013"
SEVERITY = Severity.WARNING

# Rounding every partial sum of a float32 accumulator costs 0.4 %; what is lost to a half-precision one is most of it
LOST = 0.1
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
    errors: list[tuple[float, int]] = []
    unknown: NotKnown | None = None
    for group in alike(sites, facts.recording):
        rows = max(FEWEST, min(ROWS, ELEMENTS // facts.graph.values[group[0].calls[0].input].shape[-1]))
        try:
            error = facts.rows.parameter_error(group[0].calls[0], rows)
        except NotKnown as why:
            unknown = why
            continue
        if error > LOST:
            found.extend(group)
            errors.append((error, rows))
    if found:
        yield _finding(facts, found, *max(errors))
    elif unknown is not None and not errors:
        raise unknown


def _finding(facts: Facts, sites: list[Site], error: float, rows: int) -> Finding:
    trained = facts.target.optimizer is not None or facts.target.train_step is not None
    dtype = facts.graph.values[sites[0].calls[0].input].dtype
    return Finding(
        path=sites[0].row.path,
        paths=tuple(s.row.path for s in sites),
        severity=Severity.WARNING if trained else Severity.INFO,
        basis=Basis.MEASURED,
        message=both(
            f"{counted(len(sites), 'norm')}: gain gradients are summed in {dtype}, {error:.0%} lost over {rows} rows",
            f"{len(sites)} 个归一化：增益的梯度在 {dtype} 中求和，{rows} 行损失 {error:.0%}",
        ),
        evidence={
            "metric": "relative error of the gradient of gain or shift",
            "value": error,
            "floor": LOST,
            "rows": rows,
            "dtype": dtype,
            "norms": len(sites),
        },
        fix=both(
            "Train with float32 gains and shifts (mixed precision), or use normwise.layers, which sum in float32.",
            "训练时让增益和平移为 float32（混合精度），或使用在 float32 中求和的 normwise.layers。",
        ),
    )


def _target(dtype: torch.dtype) -> Target:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == wide]} for wide in (True, False)]
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    return Target(model=model, args=(x,), optimizer=torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0))


def bad() -> Target:
    """Return a model trained in bfloat16."""
    return _target(torch.bfloat16)


def good() -> Target:
    """Return the same model in float32."""
    return _target(torch.float32)
