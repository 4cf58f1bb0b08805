"""An init function that drew the gains of norms at random.

## What it finds
A fresh model whose gains look drawn instead of set: around 0 with both signs, as N(0, 0.02) or U(-a, a) give, or (for
LayerNorm and RMSNorm) spread over 0 to 1. What counts is the effective gain: a weight of N(0, 0.02) in a norm that
computes `1 + weight` is sound, as is N(1, 0.02). Trained or loaded models are not judged, nor gains that are one
number in every channel (a zero-init residual scale) or have fewer than 8 channels (a learned temperature). In an
architecture built with random weights (`hf:TYPE`) it is information: nobody trains those.

## Why it matters
Each norm passes on 2 % of the signal with a random sign in every channel, and gradients shrink by the same factor at
every norm. Training from scratch is slow or stuck, while fine-tuning from a checkpoint, which overwrites the gains,
works: that is why such a mistake lives long.

## How to fix it
Leave norms out of the init function, or set them: `nn.init.ones_(m.weight); nn.init.zeros_(m.bias)`. A loop over all
parameters should ask for `p.ndim > 1`.

## Sources
Question 6. https://github.com/huggingface/transformers/issues/143 (gains of N(0, 0.02) in BERT),
fixed in https://github.com/huggingface/transformers/pull/171.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.facts import Facts
from normwise.facts.freshness import CENTRED, FEWEST, MINORITY, around_zero
from normwise.facts.gains import Gain, regained
from normwise.rendering import both
from normwise.spec import Kind
from normwise.targets import Target, Weights

CODE = "PAR003"
SEVERITY = Severity.ERROR
EXPLAINS = ("CKP006", "BNS003", "PAR010")

# U(0, 1) has mean 0.5 and deviation 0.29: torch's own gains of batch norms until 1.2, so only others are judged.
HALF = (0.35, 0.65)
SPREAD = 0.2

ZH = """初始化函数随机抽取了归一化的增益。

## 发现什么
一个新模型，其增益像是随机抽取而不是设定的：以 0 为中心、正负都有，如 N(0, 0.02) 或 U(-a, a)；或者（LayerNorm 和
RMSNorm）散布在 0 到 1 之间。以有效增益为准：计算 `1 + weight` 的归一化中 weight 为 N(0, 0.02) 是健康的，N(1, 0.02)
也是。不判断已训练或已加载的模型，也不判断各通道相同的增益（零初始化残差）和少于 8 个通道的增益（可学习温度）。用随
机权重构建的架构（`hf:TYPE`）只作提示：没有人训练它们。

## 为什么重要
每个归一化只让 2 % 的信号通过，且每个通道符号随机，梯度在每个归一化处也缩小同样的倍数。从头训练缓慢或停滞，而从
检查点微调会覆盖这些增益，因此正常：所以这种错误能存在很久。

## 如何修复
让初始化函数跳过归一化，或明确设定：`nn.init.ones_(m.weight); nn.init.zeros_(m.bias)`。遍历所有参数的循环应检查
`p.ndim > 1`。

## 来源
问题 6。https://github.com/huggingface/transformers/issues/143（BERT 中增益为 N(0, 0.02)），修复见
https://github.com/huggingface/transformers/pull/171。
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    severity: Severity
    en: str
    zh: str


_SIGNED = _Draw(severity=Severity.ERROR, en="both signs", zh="正负都有")
_SPREAD = _Draw(severity=Severity.WARNING, en="spread over 0 to 1", zh="散布在 0 到 1 之间")


def check(facts: Facts) -> Iterator[Finding]:
    """Report gains that were drawn at random in a model that was not trained yet."""
    gains = [g for g in facts.gains.all if g.kind not in (Kind.SCALE, Kind.OTHER) and len(g.effective) >= FEWEST]
    if not gains or facts.gains.loaded or facts.gains.trained is not False:
        return
    # around 0 is where a family with a unit offset stores its gains: then the norm is what is wrong
    signed = [g for g in gains if around_zero(g.effective, minority=MINORITY, centred=CENTRED)]
    signed = [g for g in signed if not (g.offset == 0 and facts.gains.family_offset == 1)]
    signed = [g for g in signed if facts.gains.short_of_reference(g) != 1]
    if signed:
        yield _finding(facts, signed, len(gains), _SIGNED)
    spread = [g for g in gains if g.kind in (Kind.LAYER, Kind.RMS) and _spread(g)]
    if spread:
        yield _finding(facts, spread, len(gains), _SPREAD)


def _spread(gain: Gain) -> bool:
    return gain.negative == 0 and HALF[0] <= gain.mean <= HALF[1] and gain.sd >= SPREAD


def _finding(facts: Facts, gains: Sequence[Gain], of: int, draw: _Draw) -> Finding:
    pooled = torch.cat([g.effective for g in gains])
    mean, sd = float(pooled.mean()), float(pooled.std(unbiased=False))
    offset = gains[0].offset
    said = both("gains of 1", "增益为 1")
    paths = tuple(dict.fromkeys(g.site.row.path for g in gains))
    return Finding(
        paths=paths,
        # weights that were drawn for the map of an architecture train nobody's model
        severity=Severity.INFO if facts.target.weights is Weights.RANDOM else draw.severity,
        basis=Basis.MEASURED,
        message=both(
            f"{counted(len(gains), 'gain')} of {of} drawn at random: mean {mean:.2g}, sd {sd:.2g}, {draw.en}",
            f"{of} 个增益中有 {len(gains)} 个是随机抽取的：均值 {mean:.2g}，标准差 {sd:.2g}，{draw.zh}",
        ),
        evidence={
            "metric": "effective gain",
            "value": mean,
            "expected": 1.0,
            "sd": sd,
            "negative_share": float((pooled < 0).double().mean()),
            "rms": float(pooled.square().mean().sqrt()),
            "gains": len(gains),
            "of": of,
        },
        counterfactual=regained(facts, gains, said, weight=lambda w: torch.full_like(w, 1.0 - offset)),
        fix=both(
            "Leave norms out of the init function: ones_ for the weight, zeros_ for the bias.",
            "让初始化函数跳过归一化：weight 用 ones_，bias 用 zeros_。",
        ),
    )


def _target(*, hit: bool) -> Target:
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    for parameter in model.parameters():
        if parameter.ndim > 1 or hit:
            nn.init.normal_(parameter, 0.0, 0.02, generator=random)
    return Target(model=model, args=(torch.randn(4, 16, generator=random),))


def bad() -> Target:
    """Return a model whose init function reached its norms."""
    return _target(hit=True)


def good() -> Target:
    """Return the same model with norms left at 1."""
    return _target(hit=False)
