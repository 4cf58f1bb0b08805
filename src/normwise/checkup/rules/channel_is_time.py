"""A batch or group norm that takes time steps for channels.

## What it finds
A batch norm, or group norm, whose channel axis is the time axis: `BatchNorm1d(T)` on `[B, T, H]`. The axes are named by
running the model again with another batch size and another length; a batch norm that was built for one length stops
such a run, which still names the axes before it. With token ids the finding is a proof. With floating inputs axis 1 is
only taken for time: it is a warning where a linear map read the last axis and the model never swaps the two, and
not checked otherwise, because `[N, C, L]` data looks the same.

## Why it matters
`BatchNorm1d` reads `[B, C, T]`. Given `[B, T, H]` it keeps one mean, one variance, one gain and one shift for each
*position*, taken over the batch and all features: features of any scale are mixed, the model runs at one length only,
and position 7 is scaled by what stood at position 7 in training.

## How to fix it
Transpose around the norm, `norm(x.transpose(1, 2)).transpose(1, 2)` with `BatchNorm1d(H)`, or use a norm of the last
axis, `LayerNorm(H)`, which needs no transpose. The gains and running statistics do not carry over.

## Sources
Questions 3, 4, 14 and 24. https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html (input `(N, C, L)`);
Shen et al. 2020, PowerNorm, https://arxiv.org/abs/2003.07845 (batch statistics in sequence models).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.labels import counts_tokens, time_varies
from normwise.facts.sites import Site
from normwise.facts.vocabulary import CONV
from normwise.rendering import both
from normwise.spec import Scope
from normwise.targets import Target

ZH = """把时间步当作通道的批归一化或组归一化。

## 发现什么
通道轴其实是时间轴的批归一化或组归一化：对 `[B, T, H]` 用 `BatchNorm1d(T)`。轴名通过改变批次大小和长度再运行得到；为
固定长度建的批归一化会使这样的运行中断，但中断之前的轴仍能命名。输入为词元编号时是证明。输入为浮点数时，第 1 轴只是
被当作时间：若有线性层读取最后一轴且模型从不交换这两轴，则为警告，否则不判断，因为 `[N, C, L]` 数据看起来一样。

## 为什么重要
`BatchNorm1d` 读取 `[B, C, T]`。给它 `[B, T, H]`，它就为每个*位置*保留一组均值、方差、增益和偏移，统计跨越批次和全部
特征：不同尺度的特征混在一起，模型只能在一种长度下运行，第 7 个位置按训练中第 7 个位置的内容缩放。

## 如何修复
在归一化前后转置，用 `BatchNorm1d(H)`：`norm(x.transpose(1, 2)).transpose(1, 2)`；或改用只看最后一轴的
`LayerNorm(H)`，无需转置。增益和运行统计量不能沿用。

## 来源
问题 3、4、14、24。https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html （输入 `(N, C, L)`）；
Shen 等 2020，PowerNorm，https://arxiv.org/abs/2003.07845 （序列模型中的批统计量）。
"""

CODE = "AXS006"
SEVERITY = Severity.ERROR
EXPLAINS = ("AXS002", "AXS003")

# torch's layout for batch and group norms: [N, C, *]
CHANNELS = 1
_SWAPS = frozenset({"transpose", "permute", "t", "mT", "swapaxes", "swapdims", "movedim", "moveaxis"} | CONV)


def check(facts: Facts) -> Iterator[Finding]:
    """Report every batch and group norm whose channel axis grows with the length of the input."""
    suspects = [s for s in facts.sites if _has_channels(s) and len(s.row.shape) >= 3]
    if not suspects or not time_varies(facts.target):
        return
    wrong = [s for s in suspects if _channels_are(facts, s) == "time"]
    certain = counts_tokens(facts.graph)
    if certain and wrong:  # the run with another length stopped at the first: its like have the same axes
        shapes = {s.row.shape for s in wrong}
        wrong = [s for s in suspects if s in wrong or (s.row.shape in shapes and _channels_are(facts, s) == "unknown")]
    likely = [s for s in wrong if _features_last(facts, s)]
    if wrong and (certain or likely):
        yield _finding(facts, wrong if certain else likely, certain=certain)
        return
    unnamed = wrong or [s for s in suspects if _channels_are(facts, s) == "unknown"]
    if unnamed:
        path = unnamed[0].row.path
        raise NotKnown(
            both(
                f"whether axis 1 of {path}'s input is channels or time cannot be told from runs",
                f"无法从运行判断 {path} 输入的第 1 轴是通道还是时间",
            )
        )


def _has_channels(site: Site) -> bool:
    return site.row.native and site.row.spec is not None and site.row.spec.scope in (Scope.BATCH, Scope.GROUP)


def _channels_are(facts: Facts, site: Site) -> str:
    axes = facts.labels.get(site.calls[0].input)
    return axes[CHANNELS] if axes else "unknown"


def _features_last(facts: Facts, site: Site) -> bool:
    """Whether a linear map made the last axis, and no op of the run swaps it with the channels'."""
    call, graph = site.calls[0], facts.graph
    swapped = any(op.short in _SWAPS and len(graph.values[op.inputs[0]].shape) == 3 for op in graph.ops if op.inputs)
    return facts.flow.learned[call.input] and not swapped


def _finding(facts: Facts, sites: list[Site], *, certain: bool) -> Finding:
    paths = tuple(s.row.path for s in sites)
    first = sites[0]
    width = first.row.shape[-1]
    return Finding(
        paths=paths,
        severity=SEVERITY if certain else Severity.WARNING,
        basis=Basis.PROOF if certain else Basis.MEASURED,
        message=both(
            f"{counted(len(paths), 'norm')} with time for channels: one mean and one gain for each position",
            f"{len(paths)} 个归一化把时间当作通道：每个位置一个均值和一个增益",
        ),
        evidence={
            "norms": len(paths),
            "shape": list(first.row.shape),
            "axes": list(facts.labels[first.calls[0].input]),
            "channels": first.row.shape[CHANNELS],
            "scope": str(first.row.spec.scope) if first.row.spec else None,
        },
        fix=both(
            f"Give it {width} channels and transpose: norm(x.transpose(1, 2)).transpose(1, 2); or LayerNorm({width}).",
            f"设 {width} 个通道并转置：norm(x.transpose(1, 2)).transpose(1, 2)；或用 LayerNorm({width})。",
        ),
    )


class _Encoder(nn.Module):
    def __init__(self, channels: int, *, transposed: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 6), nn.BatchNorm1d(channels), nn.Linear(6, 3)
        self.transposed = transposed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) if self.transposed else self.norm(x)
        return self.head(x)


def _target(channels: int, *, transposed: bool) -> Target:
    ids = torch.arange(18).view(2, 9) % 11
    return Target(model=_Encoder(channels, transposed=transposed).eval(), args=(ids,))


def bad() -> Target:
    """Return a model whose batch norm was given one channel for each of nine steps."""
    return _target(9, transposed=False)


def good() -> Target:
    """Return the same model with its features as channels."""
    return _target(6, transposed=True)
