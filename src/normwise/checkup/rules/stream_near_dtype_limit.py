"""A residual stream close to the end of float16.

## What it finds
Residual adds of a float16 run whose largest element exceeds half of 65504 on your data, with the token, the channel
and the module that wrote most of it. In a bfloat16 run the same magnitude is only worth knowing: it says that the
model does not fit float16. A stream that has already left the range is the matter of another finding.

## Why it matters
A pre-norm stream only grows: norms hide its size from the sublayers, so nothing pulls it back. One longer prompt or
one more fine-tuning step, and the add overflows; the next norm makes NaN of it.

## How to fix it
Run in bfloat16, or divide what writes the stream (the embedding, the last projection or the gain of each branch) by
one number: with norms before every sublayer and at the end the function stays the same.

## Sources
Questions 61 and 64. https://github.com/huggingface/transformers/pull/37226 (Gemma 3 in float16);
https://github.com/huggingface/transformers/issues/5651 (T5 in float16).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.facts import Facts
from normwise.facts.chains import Residual
from normwise.facts.ranges import HALF, peak
from normwise.facts.shares import need_true_weights
from normwise.rendering import both
from normwise.targets import Target

ZH = """接近 float16 上限的残差流。

## 发现什么
在你的数据上，float16 运行中最大元素超过 65504 一半的残差相加，并给出词元、通道和写入最多的模块。bfloat16 运行中同样
的大小只作提示：说明该模型不适合 float16。已经超出范围的残差流由另一条发现说明。

## 为什么重要
pre-norm 残差流只增不减：归一化使子层看不到它的大小，没有什么会把它拉回来。提示再长一些，或再微调一步，相加就会溢出，
下一个归一化把它变成 NaN。

## 如何修复
用 bfloat16 运行，或把写入残差流的部分（嵌入、每个分支的最后投影或增益）都除以同一个数：只要每个子层之前和末尾都有归一
化，函数就不变。

## 来源
问题 61、64。https://github.com/huggingface/transformers/pull/37226（float16 的 Gemma 3）；
https://github.com/huggingface/transformers/issues/5651（float16 的 T5）。
"""

CODE = "NUM008"
SEVERITY = Severity.WARNING

LIMIT = torch.finfo(torch.float16).max
# Half of the range is one more add of the same size away from its end
NEAR = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class High:
    """The highest point of one stream."""

    add: Residual
    size: float
    place: tuple[int, ...]
    writer: str
    dtype: str


def check(facts: Facts) -> Iterator[Finding]:
    """Report streams whose largest element is close to the end of float16."""
    values = facts.graph.values
    adds = [a for s in facts.placed.streams for a in s.adds if values[a.out].dtype in HALF]
    if not adds:
        return
    need_true_weights(facts)
    high = [h for a in adds if (h := _high(facts, a)) is not None]
    for dtype in HALF:
        near = [h for h in high if h.dtype == dtype]
        if near:
            yield _finding(facts, dtype, max(near, key=lambda h: h.size), near)


def _high(facts: Facts, add: Residual) -> High | None:
    stream = facts.runs.base.of(add.out)
    if stream.numel() == 0 or not bool(stream.isfinite().all()):
        return None
    size = peak(stream)
    if size <= NEAR * LIMIT:
        return None
    place = torch.unravel_index(stream.abs().argmax(), stream.shape)
    parts = {v: peak(facts.runs.base.of(v)) for v in dict.fromkeys(add.op.inputs) if facts.graph.values[v].floating}
    largest = max(parts, key=lambda v: parts[v])
    op = facts.graph.producer(largest)
    return High(
        add=add,
        size=size,
        place=tuple(int(i) for i in place),
        writer=facts.graph.path(op) if op is not None else "the input",
        dtype=facts.graph.values[add.out].dtype,
    )


def _finding(facts: Facts, dtype: str, worst: High, near: list[High]) -> Finding:
    stream = facts.runs.base.of(worst.add.out)
    channels = stream.detach().float().abs().flatten(0, -2).amax(0)
    paths = (facts.graph.path(worst.add.op), *(facts.graph.path(h.add.op) for h in near))
    token = list(worst.place[:-1])
    return Finding(
        path=paths[0],
        paths=tuple(dict.fromkeys(paths)),
        severity=Severity.WARNING if dtype == "float16" else Severity.INFO,
        basis=Basis.MEASURED,
        message=both(
            f"the stream reaches {worst.size:.0f} in {dtype}, {worst.size / LIMIT:.0%} of the range of float16",
            f"残差流在 {dtype} 中达到 {worst.size:.0f}，为 float16 范围的 {worst.size / LIMIT:.0%}",
        ),
        evidence={
            "metric": "largest element of the stream / 65504",
            "value": worst.size / LIMIT,
            "floor": NEAR,
            "largest": worst.size,
            "token": token,
            "channel": worst.place[-1],
            "channel_beside_median": float(channels[worst.place[-1]] / channels.median().clamp_min(1e-12)),
            "written_by": worst.writer,
            "adds_above": len(near),
        },
        fix=both(
            "Run in bfloat16, or divide the embedding and the gains or projections of all branches by one number.",
            "用 bfloat16 运行，或把嵌入和所有分支的增益或投影都除以同一个数。",
        ),
    )


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _target(size: float) -> Target:
    model = nn.Sequential(_Block(), _Block(), nn.LayerNorm(16), nn.Linear(16, 4)).half().eval()
    x = torch.linspace(-1, 1, 2 * 3 * 16).reshape(2, 3, 16) * size
    return Target(model=model, args=(x.half(),))


def bad() -> Target:
    """Return a float16 model whose stream holds 40000."""
    return _target(40000.0)


def good() -> Target:
    """Return the same model with a stream of 10."""
    return _target(10.0)
