"""Attention whose logits have grown until it is saturated, with no norm on queries and keys.

## What it finds
On the example inputs, an attention in which most heads are saturated: the logits of a query spread by a standard
deviation above 8, and the weights keep less than 10 % of the entropy they could have. Only where neither queries nor
keys pass a norm and no learned temperature scales the logits, and only on weights that are the user's or trained. A few
sharp heads are healthy; what counts is most heads of one layer. An attention that one oversized gain before it
saturates alone is left to PAR004.

## Why it matters
The common scale of queries and keys has no bound: it drifts up during training, softmax turns into a hard choice, its
gradient vanishes and the run diverges late, often after tens of thousands of steps.

## How to fix it
Normalize queries and keys per head before the dot product (`nn.RMSNorm(head_dim)` on each), or cap the logits. Both
change the function: train with them. Lowering the learning rate only delays it.

## Sources
Questions 61 and 64. https://github.com/Tsinghua-MARS-Lab/OMG/pull/8 (diverges at step 55,895); Dehghani et al. 2023,
https://arxiv.org/abs/2302.05442 (QK norm in ViT-22B); Wortsman et al. 2023, https://arxiv.org/abs/2309.14322.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts, needs
from normwise.facts.logits import ENTROPY, HEADS, SPREAD, Attention
from normwise.facts.repairs import effect
from normwise.rendering import both
from normwise.targets import InputsFrom, Target

ZH = """注意力的 logits 增长到饱和，而查询和键没有归一化。

## 发现什么
在示例输入上，某个注意力的大多数头已饱和：一个查询的 logits 标准差超过 8，且权重的熵不到可能值的 10%。
仅当查询和键都不经过归一化、也没有可学习的温度时才报告，且只看用户自己的或训练过的权重。
少数尖锐的头是健康的；只有一层中大多数头都如此才算。仅由前面一个过大的增益造成的饱和由 PAR004 报告。

## 为什么重要
查询和键的共同尺度没有上界：它在训练中不断上升，softmax 变成硬选择，梯度消失，训练在后期（常在数万步之后）发散。

## 如何修复
在点积之前对每个头的查询和键做归一化（各用 `nn.RMSNorm(head_dim)`），或给 logits 设上限。
两者都会改变函数：要带着它们训练。降低学习率只会推迟问题。

## 来源
问题 61 和 64。https://github.com/Tsinghua-MARS-Lab/OMG/pull/8（第 55,895 步发散）；
Dehghani 等 2023，https://arxiv.org/abs/2302.05442（ViT-22B 的 QK 归一化）；
Wortsman 等 2023，https://arxiv.org/abs/2309.14322。
"""

CODE = "PLC010"
SEVERITY = Severity.WARNING


def check(facts: Facts) -> Iterator[Finding]:
    """Report the layers in which most heads are saturated."""
    if not facts.target.weights.magnitudes_count:
        raise NotKnown(needs.TRAINED_WEIGHTS)
    if facts.target.inputs_from is InputsFrom.NONE:
        raise NotKnown(both("needs example inputs: give inputs=...", "需要示例输入：给出 inputs=..."))
    hit = [a for a in facts.attentions if a.bare and a.saturated(SPREAD, ENTROPY) >= HEADS]
    hit = [a for a in hit if a.op not in facts.driven_attentions]
    if hit:
        yield _finding(hit, len(facts.attentions))


def _finding(hit: list[Attention], total: int) -> Finding:
    worst = max(hit, key=lambda a: _mean(a.measured.spread))
    spread, entropy = _mean(worst.measured.spread), _mean(worst.measured.entropy)
    repair = None
    if worst.with_norm is not None:
        change = both("queries and keys RMS-normalized per head", "每个头的查询和键做 RMS 归一化")
        repair = effect(change, "logit_standard_deviation", spread, _mean(worst.with_norm.spread))
    paths = tuple(dict.fromkeys(a.path for a in hit))
    return Finding(
        path=worst.path,
        paths=(worst.path, *(p for p in paths if p != worst.path)),
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"{len(hit)} of {total} attentions saturated, no QK norm: logits sd {spread:.1f}, entropy {entropy:.0%}",
            f"{total} 个注意力中 {len(hit)} 个饱和且无 QK 归一化：logits 标准差 {spread:.1f}，熵 {entropy:.0%}",
        ),
        evidence={
            "metric": "logit_standard_deviation",
            "value": spread,
            "floor": SPREAD,
            "entropy_share": entropy,
            "saturated_heads": worst.saturated(SPREAD, ENTROPY),
            "keys": worst.keys,
            "attentions": total,
        },
        counterfactual=repair,
        fix=both(
            "Normalize queries and keys per head before the dot product, or cap the logits; train with it.",
            "在点积之前对每个头的查询和键做归一化，或给 logits 设上限；并带着它训练。",
        ),
    )


def _mean(numbers: tuple[float, ...]) -> float:
    return sum(numbers) / len(numbers)


class _Attention(nn.Module):
    def __init__(self, width: int, *, normed: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        head = width // 2
        self.qk = nn.ModuleList(nn.RMSNorm(head) if normed else nn.Identity() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in parts)
        y = nn.functional.scaled_dot_product_attention(self.qk[0](q), self.qk[1](k), v)
        return y.transpose(1, 2).flatten(2)


def _target(*, normed: bool) -> Target:
    torch.manual_seed(0)
    model = _Attention(32, normed=normed)
    with torch.no_grad():
        model.qkv.weight[:64] *= 12
    return Target(model=model, args=(torch.randn(2, 16, 32),))


def bad() -> Target:
    """Return an attention whose queries and keys have grown."""
    return _target(normed=False)


def good() -> Target:
    """Return the same attention with a norm on both."""
    return _target(normed=True)
