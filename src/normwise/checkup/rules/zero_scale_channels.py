"""Single channels whose gain is exactly 0.

## What it finds
Norms in which some channels, not all, have an effective gain of exactly 0. Above 1 % of the channels of a LayerNorm or
RMSNorm in a trained model it is a warning. Whole vectors of 0 are a zero-init residual (or a matter of PAR010),
channels that are 0 in every norm of that width are padding of the width, zeros of a batch norm are pruning: no more
than information.

## Why it matters
The channel passes on its shift and nothing of the input. Kernels that recompute the normalized value in the backward
pass as (y - bias) / weight give NaN there.

## How to fix it
Find out who wrote the zeros: a cast to a type in which the gain underflows, a pruning step, a gain decayed to 0. Use a
kernel that keeps the input of the norm for its backward pass.

## Sources
Questions 6 and 61. https://github.com/ServiceNow/Fast-LLM/issues/220 (NaN where a kernel divides by the gain).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.facts import Facts
from normwise.facts.gains import Gain
from normwise.rendering import both
from normwise.spec import Kind
from normwise.targets import Target, Weights

CODE = "PAR005"
SEVERITY = Severity.WARNING
READS_CHECKPOINTS = True

SHARE = 0.01  # RULES: more than 1 % of the channels

ZH = """个别通道的增益恰为 0。

## 发现什么
部分（而非全部）通道的有效增益恰为 0 的归一化。在已训练模型的 LayerNorm 或 RMSNorm 中超过 1 % 的通道时为警告。整个向
量为 0 是零初始化残差（或属于 PAR010），在该宽度的每个归一化中都为 0 的通道是宽度填充，批归一化中的 0 是剪枝：只作为
信息。

## 为什么重要
该通道只输出偏移，不含任何输入。在反向传播中以 (y - bias) / weight 重新计算归一化值的内核会在此处给出 NaN。

## 如何修复
查明是谁写入了 0：转换到会下溢的类型、剪枝步骤、或衰减到 0 的增益。使用为反向传播保留归一化输入的内核。

## 来源
问题 6 和 61。https://github.com/ServiceNow/Fast-LLM/issues/220（内核除以增益而产生 NaN）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms with channels whose gain is exactly 0."""
    if facts.target.weights is Weights.RANDOM:
        return
    widths: dict[int, list[Gain]] = defaultdict(list)
    for gain in facts.gains.of(Kind.LAYER, Kind.RMS, Kind.BATCH, Kind.GROUP, Kind.INSTANCE):
        widths[len(gain.effective)].append(gain)
    for gains in widths.values():
        holed = [g for g in gains if g.zeros > 0 and g.constant is None]
        if holed:
            yield _finding(facts, holed, padded=_padded(gains))


def _padded(gains: list[Gain]) -> bool:
    """Whether the same channels are 0 in all of several norms: the width was padded."""
    first = gains[0].effective == 0
    return len(gains) > 1 and all(torch.equal(g.effective == 0, first) for g in gains)


def _finding(facts: Facts, gains: list[Gain], *, padded: bool) -> Finding:
    worst = max(gains, key=lambda g: g.zeros)
    trained = facts.gains.loaded or facts.gains.trained is True
    loud = trained and not padded and worst.kind in (Kind.LAYER, Kind.RMS) and worst.zeros > SHARE
    dead = int((worst.effective == 0).sum())
    ordered = [worst, *(g for g in gains if g is not worst)]
    paths = tuple(dict.fromkeys(g.site.row.path for g in ordered))
    return Finding(
        paths=paths,
        severity=SEVERITY if loud else Severity.INFO,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(gains), 'norm')}: up to {dead} of {len(worst.effective)} channels have a gain of exactly 0",
            f"{len(gains)} 个归一化：{len(worst.effective)} 个通道中最多有 {dead} 个增益恰为 0",
        ),
        evidence={
            "metric": "share of channels with an effective gain of 0",
            "value": worst.zeros,
            "channels": len(worst.effective),
            "norms": len(gains),
            "same_channels_everywhere": padded,
        },
        fix=both(
            "Find out who wrote the zeros (a cast, pruning, decay); the channels carry nothing of the input.",
            "查明是谁写入了 0（类型转换、剪枝、衰减）；这些通道不携带任何输入。",
        ),
    )


def _target(*, holes: int) -> Target:
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    for index, layer in enumerate(model):
        if isinstance(layer, nn.LayerNorm):
            gain = 1 + 0.1 * torch.randn(32, generator=random)
            gain[: holes if index == 1 else 0] = 0.0
            layer.load_state_dict({"weight": gain, "bias": torch.zeros(32)})
    stored = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    return Target(model=model, args=(torch.randn(3, 8, generator=random),), checkpoint=stored)


def bad() -> Target:
    """Return a loaded model with four dead channels of 32."""
    return _target(holes=4)


def good() -> Target:
    """Return the same model without."""
    return _target(holes=0)
