"""A norm that computes something else when decoding step by step.

## What it finds
All steps but the last go through the model with a cache, then the last by itself, and every value is compared with the
run of all steps at once, in eval mode and float32. Reported is a norm whose output differs at that step although its
own input agrees: statistics over time or heads that a single step does not have, another branch for one token, a
squeezed axis. It needs a model that takes `use_cache` and a cache (`past_key_values`, `cache`); behind an encoder the
inputs that begin with `decoder_` are decoded, the others stay whole.

## Why it matters
Training and scoring use the run of all steps, generation uses the cache. Where the two differ, the model generates from
another function than the one that was trained: perplexity is fine, the text is not.

## How to fix it
Make the norm a function of one position's features alone, with the same axes in both ways. A statistic over steps
needs a state that the cache carries.

## Sources
Questions 23, 38 and 65. https://huggingface.co/docs/transformers/kv_cache (what a cache must carry);
Shazeer 2019, Fast Transformer Decoding, https://arxiv.org/abs/1911.02150 (incremental decoding).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import percent
from normwise.facts import Facts
from normwise.facts.decoding import Decoding
from normwise.facts.repairs import effect
from normwise.rendering import both
from normwise.targets import Target

ZH = """逐步解码时归一化算的是另一回事。

## 发现什么
除最后一步外的全部步带缓存通过模型，再单独送入最后一步，在评估模式、float32 下把每个值与一次运行全部步的结果比较。报
告这样的归一化：该步输入一致，输出却不同，例如统计量跨越时间或注意力头而单步没有、单词元走另一分支、轴被压缩掉。需要
模型接受 `use_cache` 和缓存（`past_key_values`、`cache`）；有编码器时只解码以 `decoder_` 开头的输入，其余保持完整。

## 为什么重要
训练和打分一次运行全部步，生成使用缓存。两者不同，生成用的就不是训练出的函数：困惑度正常，文本不正常。

## 如何修复
让归一化只依赖一个位置的特征，两种方式使用同样的轴。跨步的统计量需要由缓存携带状态。

## 来源
问题 23、38、65。https://huggingface.co/docs/transformers/kv_cache （缓存必须携带什么）；Shazeer 2019，Fast
Transformer Decoding，https://arxiv.org/abs/1911.02150 （增量解码）。
"""

CODE = "AXS005"
SEVERITY = Severity.ERROR


def check(facts: Facts) -> Iterator[Finding]:
    """Report the norms that differ between the last step of the whole run and the same step decoded."""
    if not facts.norm_calls.norms:
        return
    seen = facts.decoding
    if seen.sites:
        yield _finding(seen)


def _finding(seen: Decoding) -> Finding:
    paths = tuple(s.row.path for s in seen.sites)
    assert seen.change_held is not None
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"step {seen.step} decoded with the cache differs by {percent(seen.change)} from the run of all steps",
            f"用缓存解码第 {seen.step} 步，与一次运行全部步相差 {percent(seen.change)}",
        ),
        evidence={
            "metric": "change of the outputs at the step, relative",
            "value": seen.change,
            "floor": seen.floor,
            "norm_change": seen.norm_change,
            "step": seen.step,
            "norms": len(paths),
        },
        fix=both(
            "Use the same axes in both ways: statistics of one position's features, or a state that the cache carries.",
            "两种方式使用同样的轴：只统计一个位置的特征，或由缓存携带状态。",
        ),
        counterfactual=effect(
            both("this norm's output taken from the run of all steps", "取全部步运行中该归一化的输出"),
            "change of the outputs at the step",
            seen.change,
            seen.change_held(),
        ),
    )


class _HeadNorm(nn.Module):
    """A norm of each head, or, for the fault, of all heads together once the time axis is squeezed away."""

    def __init__(self, *, squeezes: bool) -> None:
        super().__init__()
        self.squeezes = squeezes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axes = (-2, -1) if self.squeezes and x.shape[1] == 1 else (-1,)
        return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + 1e-5)


class _Decoder(nn.Module):
    """A running sum over steps as the whole memory."""

    def __init__(self, *, squeezes: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 8), _HeadNorm(squeezes=squeezes), nn.Linear(8, 11)

    def forward(
        self, ids: torch.Tensor, past_key_values: torch.Tensor | None = None, *, use_cache: bool = False
    ) -> dict[str, torch.Tensor] | torch.Tensor:
        x = self.norm(self.embed(ids).unflatten(-1, (2, 4))).flatten(-2)
        total = x.cumsum(1) if past_key_values is None else x.cumsum(1) + past_key_values
        logits = self.head(total)
        return {"logits": logits, "past_key_values": total[:, -1:]} if use_cache else logits


def _target(*, squeezes: bool) -> Target:
    return Target(model=_Decoder(squeezes=squeezes).eval(), args=(torch.arange(18).view(2, 9) % 11,))


def bad() -> Target:
    """Return a decoder whose heads are normalized together when one step is decoded."""
    return _target(squeezes=True)


def good() -> Target:
    """Return the same decoder with a norm of each head in both ways."""
    return _target(squeezes=False)
