"""A norm that turns a half-precision stream into a float32 one.

## What it finds
Norms that are given half precision and hand on float32 without a cast, where that result joins the residual stream: a
float32 gain in a half-precision model promotes the product, the add promotes the stream, at once or behind matrices
that are cast to the dtype of their input. The ops that run in float32 from there on are counted. Where the result is
cast back, or stays inside its branch, nothing is wrong: mixed precision is often built so.

## Why it matters
Everything after runs in float32 (twice the memory, a fraction of the speed) or the next half-precision matmul refuses
the dtype; a copy of the model that was cast as a whole computes something else.

## How to fix it
Cast the result back: `return y.to(x.dtype)`, or keep the gain in the dtype of the model. A stream kept in float32 on
purpose says so by casting its first value.

## Sources
Questions 35 and 41. https://github.com/huggingface/transformers/issues/33133 (gain before or after the cast);
https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc (how torch promotes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.facts import Facts
from normwise.facts import vocabulary as ops
from normwise.facts.ranges import HALF
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.targets import Target

ZH = """把半精度残差流变成 float32 的归一化。

## 发现什么
输入为半精度、输出为 float32 且没有转换、其结果又并入残差流的归一化：半精度模型中的 float32 增益使乘积提升，相加又使残
差流提升；结果可以直接并入，也可以先经过被转成其输入 dtype 的矩阵。报告统计此后以 float32 运行的操作数。若结果被转回，
或只留在分支内部，则没有问题：混合精度常常这样设计。

## 为什么重要
此后的一切都以 float32 运行（内存加倍，速度下降），或者下一个半精度矩阵乘拒绝该 dtype；整体转换后的模型副本计算的是另
一个函数。

## 如何修复
把结果转回：`return y.to(x.dtype)`，或让增益与模型的 dtype 相同。若有意让残差流保持 float32，应显式转换它的第一个值。

## 来源
问题 35、41。https://github.com/huggingface/transformers/issues/33133（增益在转换之前还是之后）；
https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc（torch 如何提升 dtype）。
"""

CODE = "NUM011"
SEVERITY = Severity.WARNING

_STEPS = 200  # ops between a norm and the add: an attention written out has a few dozen


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoted:
    """A norm and the stream that it promotes."""

    site: Site
    stream: int  # value of the first float32 sum
    after: int  # ops on data that run in float32 from there on


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms whose float32 output turns a half-precision stream into float32."""
    values = facts.graph.values
    suspects = [
        s
        for s in facts.sites
        if any(values[c.input].dtype in HALF and values[c.output].dtype == "float32" for c in s.calls)
    ]
    found = [p for s in suspects if (p := _promoted(facts, s)) is not None]
    if found:
        yield _finding(facts, found)


def _promoted(facts: Facts, site: Site) -> Promoted | None:
    streams = {a.op.id: a.out for s in facts.placed.streams for a in s.adds}
    graph = facts.graph
    for call in site.calls:
        pending, seen = [call.output], set()
        while pending and len(seen) < _STEPS:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            for op in graph.consumers(value):
                if op.short in ops.RECAST or graph.values[op.outputs[0]].dtype != "float32":
                    continue
                half = [i for i in op.inputs if graph.values[i].dtype in HALF and facts.flow.data[i]]
                if op.id not in streams:  # a matrix cast to the dtype of its input carries the float32 through
                    pending.extend(op.outputs)
                elif half:
                    return Promoted(site=site, stream=streams[op.id], after=_after(facts, op.id))
    return None


def _after(facts: Facts, start: int) -> int:
    values, data = facts.graph.values, facts.flow.data
    later = (o for o in facts.graph.ops[start:] if o.outputs and o.short not in ops.VIEW)
    return sum(values[o.outputs[0]].dtype == "float32" and data[o.outputs[0]] for o in later)


def _finding(facts: Facts, found: list[Promoted]) -> Finding:
    paths = tuple(dict.fromkeys(p.site.row.path for p in found))
    half, after = facts.graph.values[found[0].site.calls[0].input].dtype, max(p.after for p in found)
    parameters = facts.parameters
    gain = parameters.get(found[0].site.row.weight_path or "")
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{half} in, float32 out: the stream becomes float32, and {counted(after, 'op')} after it",
            f"输入 {half}，输出 float32：残差流变成 float32，之后有 {after} 个操作也是如此",
        ),
        evidence={
            "metric": "ops on data that run in float32 from here on",
            "value": after,
            "floor": 0,
            "input_dtype": half,
            "output_dtype": "float32",
            "gain_dtype": str(gain.dtype).removeprefix("torch.") if gain is not None else None,
        },
        fix=both(
            "Cast the result back (return y.to(x.dtype)), or keep the gain in the dtype of the model.",
            "把结果转回（return y.to(x.dtype)），或让增益与模型的 dtype 相同。",
        ),
    )


class _RMSNorm(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(x.dtype)


class _Block(nn.Module):
    def __init__(self, gain: torch.dtype) -> None:
        super().__init__()
        self.norm, self.map = nn.RMSNorm(8), nn.Linear(8, 8)
        self.to(torch.bfloat16)
        self.post = _RMSNorm(8).to(gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.post(self.map(self.norm(x).to(torch.bfloat16)))


def _target(gain: torch.dtype) -> Target:
    first, final = nn.Linear(4, 8).to(torch.bfloat16), nn.RMSNorm(8).to(gain)
    model = nn.Sequential(first, _Block(gain), _Block(gain), final, nn.Linear(8, 2).to(gain)).eval()
    return Target(model=model, args=(torch.ones(2, 3, 4, dtype=torch.bfloat16),))


def bad() -> Target:
    """Return a bfloat16 model whose norms at the ends of branches keep float32 gains."""
    return _target(torch.float32)


def good() -> Target:
    """Return the same model with every gain in bfloat16."""
    return _target(torch.bfloat16)
