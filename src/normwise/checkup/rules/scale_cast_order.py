"""A gain multiplied before the cast where the family multiplies after it, or the reverse.

## What it finds
Half-precision norms whose order of gain and cast differs from the one of the family that the configuration names
(`model_type`): Llama rounds to half precision and then multiplies, Gemma and OLMo-2 multiply in float32 and then
round. The change of the outputs by the family's order is measured.

## Why it matters
The two differ by one unit in the last place of half precision. Both are sound, but a port that differs from its
reference cannot be compared bit by bit, and greedy decoding may take another word.

## How to fix it
Llama: `weight * y.to(x.dtype)`. Gemma: `((1 + weight.float()) * y).to(x.dtype)`.

## Sources
Questions 35 and 58. https://github.com/huggingface/transformers/issues/33133 (the two orders);
https://github.com/NVIDIA/TransformerEngine/issues/1132 (differences of one unit in the last place).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.conventions import setting
from normwise.facts.ranges import HALF
from normwise.facts.repairs import effect, respecified
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.spec import FAMILIES, Cast, Gate, Modulation, NormSpec, Weight, family_name
from normwise.targets import Target

ZH = """增益在转换之前相乘，而该模型族在转换之后相乘（或相反）。

## 发现什么
增益与转换的先后顺序与配置所指模型族（`model_type`）不同的半精度归一化：Llama 先舍入到半精度再乘，Gemma 与 OLMo-2 先在
float32 中乘再舍入。报告测量改用该模型族的顺序后输出的变化。

## 为什么重要
两者相差半精度的最后一位。都没有错，但与参考实现顺序不同的移植无法逐位比较，贪心解码也可能选到另一个词。

## 如何修复
按模型族的顺序书写。Llama：`weight * y.to(x.dtype)`；Gemma：`((1 + weight.float()) * y).to(x.dtype)`。

## 来源
问题 35、58。https://github.com/huggingface/transformers/issues/33133（两种顺序）；
https://github.com/NVIDIA/TransformerEngine/issues/1132（相差最后一位）。
"""

CODE = "NUM010"
SEVERITY = Severity.INFO

_ORDERS = (Cast.BEFORE_WEIGHT, Cast.AFTER_WEIGHT)


def check(facts: Facts) -> Iterator[Finding]:
    """Report half-precision norms that multiply on the other side of the cast than their family."""
    values = facts.graph.values
    halves = [s for s in facts.sites if values[s.calls[0].input].dtype in HALF and _ordered(s.row.spec)]
    if not halves:
        return
    family, spec = _family(facts.target.config)
    other = [s for s in halves if s.row.spec is not None and s.row.spec.kind is spec.kind]
    other = [s for s in other if s.row.spec is not None and s.row.spec.cast is not spec.cast]
    if other and spec.cast in _ORDERS:
        yield _finding(facts, family, spec, other)


def _ordered(spec: NormSpec | None) -> bool:
    """Whether a norm has an order that its family prescribes: gated and modulated ones have their own."""
    plain = spec is not None and spec.gate is Gate.NONE and spec.modulation is Modulation.NONE
    return plain and spec is not None and spec.weight is Weight.VECTOR and spec.cast in _ORDERS


def _family(config: Any) -> tuple[str, NormSpec]:
    name = setting(config, "model_type")
    if not isinstance(name, str) or not name:
        raise NotKnown(
            both("needs the family: pass config=... with model_type", "需要模型族：给出含 model_type 的 config=...")
        )
    key = family_name(name).removesuffix("-text")
    if key not in FAMILIES:
        raise NotKnown(both(f"the norms of {name} are not in the table of families", f"模型族表中没有 {name} 的归一化"))
    return name, FAMILIES[key]


def _finding(facts: Facts, family: str, spec: NormSpec, sites: list[Site]) -> Finding:
    who = counted(len(sites), "norm")
    words = {Cast.BEFORE_WEIGHT: both("after", "之后"), Cast.AFTER_WEIGHT: both("before", "之前")}
    own = sites[0].row.spec
    assert own is not None
    change = _change(facts, spec, sites)
    return Finding(
        path=sites[0].row.path,
        paths=tuple(s.row.path for s in sites),
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"{who}: the gain is multiplied {words[own.cast]} the cast, in {family} {words[spec.cast]} it",
            f"{len(sites)} 个归一化：增益在转换{words[own.cast].zh}相乘，{family} 则在{words[spec.cast].zh}",
        ),
        evidence={
            "metric": "relative change of the outputs by the family's order",
            "value": change,
            "floor": torch.finfo(getattr(torch, facts.graph.values[sites[0].calls[0].input].dtype)).eps,
            "family": family,
            "cast": str(own.cast),
            "cast_of_family": str(spec.cast),
            "norms": len(sites),
        },
        counterfactual=effect(
            both(f"the order of {family}", f"{family} 的顺序"), "relative change of the outputs", 0.0, change
        )
        if change is not None
        else None,
        fix=both(
            "weight * y.to(x.dtype) rounds first (Llama), (weight.float() * y).to(x.dtype) last (Gemma, OLMo-2).",
            "weight * y.to(x.dtype) 先舍入（Llama）；(weight.float() * y).to(x.dtype) 后舍入（Gemma、OLMo-2）。",
        ),
    )


def _change(facts: Facts, spec: NormSpec, sites: list[Site]) -> float | None:
    calls = [c for s in sites for c in s.calls]
    outputs = [v for v in facts.traced.graph.outputs if facts.traced.graph.values[v].floating]
    try:
        run = respecified(facts, calls, lambda s: replace(s, cast=spec.cast))
        apart = sum(float((run.of(v).double() - facts.runs.base.of(v).double()).square().sum()) for v in outputs)
        size = sum(float(facts.runs.base.of(v).double().square().sum()) for v in outputs)
    except NotKnown:
        return None
    return (apart / size) ** 0.5 if size > 0 else None


class _RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, *, last: bool) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.linspace(0.5, 1.5, hidden_size)), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return (self.weight.float() * y).to(x.dtype) if self.last else self.weight * y.to(x.dtype)


def _target(*, last: bool) -> Target:
    model = nn.Sequential(nn.Linear(4, 16), _RMSNorm(16, last=last), nn.Linear(16, 2)).to(torch.bfloat16)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return Target(model=model, args=(x,), config={"model_type": "llama"})


def bad() -> Target:
    """Return a model called llama that multiplies before it rounds."""
    return _target(last=True)


def good() -> Target:
    """Return the same model with the order of Llama."""
    return _target(last=False)
