"""A norm of a norm, with nothing but a gain and a shift between.

## What it finds
Two norms over the same axes in series, where only the second reads the first: no sublayer, no add and no other reader
stands between. The usual place is the end of a post-norm stack, whose last block ends in a norm of its own, under a
final norm; the same place in all blocks is one finding. Never more than worth knowing: `torch.nn.Transformer` ships it.
A norm before *and* after a sublayer (sandwich) is not this, nor is an embedding norm that the stream carries on.

## Why it matters
The statistics of the second norm undo the scale (and in a LayerNorm the mean) of the first, so the first gain is only
partly identifiable and the pass is wasted. The function stays sound; only counting norms, converting or pruning them
goes wrong.

## How to fix it
In a new model leave the outer norm out (`norm=None` for post-norm blocks). In a trained one keep it: its gain and shift
are part of the function.

## Sources
Questions 42, 44 and 67. https://github.com/pytorch/pytorch/issues/74092 (two LayerNorms at the end of nn.Transformer);
https://github.com/facebookresearch/detr/issues/94.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts import vocabulary as ops
from normwise.facts.calls import NormCall
from normwise.facts.rewiring import relative
from normwise.graph import Op
from normwise.rendering import both
from normwise.spec import Gate, Modulation
from normwise.targets import Target

ZH = """归一化之后紧接着又一次归一化，中间只有增益和偏移。

## 发现什么
同一轴上的两个归一化串联，且第一个只被第二个读取：中间没有子层、没有相加、也没有别的读取者。
常见位置是后置归一化堆叠的末端：最后一块自己以归一化结束，外面还有一个末端归一化。各块的同一位置合为一条。
只作提示：`torch.nn.Transformer` 自带如此。
子层前后各一个归一化（三明治）不是这种情况，残差流继续携带的嵌入归一化也不是。

## 为什么重要
第二个归一化的统计量抵消第一个的尺度（LayerNorm 还抵消均值），第一个增益只能部分辨识，这次计算是浪费的。
函数本身没有问题；只有清点、转换或裁剪归一化时会出错。

## 如何修复
新模型去掉外层归一化（后置归一化块用 `norm=None`）。已训练的模型保留它：它的增益和偏移是函数的一部分。

## 来源
问题 42、44 和 67。https://github.com/pytorch/pytorch/issues/74092（nn.Transformer 末端的两个 LayerNorm）；
https://github.com/facebookresearch/detr/issues/94。
"""

CODE = "PLC004"
SEVERITY = Severity.INFO

# what may stand between two norms in series: the same numbers moved or cast
_BETWEEN = ops.VIEW | ops.DROPOUT
_SHOWN = 26  # characters of a path's end, so that two fit into a line


def check(facts: Facts) -> Iterator[Finding]:
    """Report pairs of norms in series, grouped by the place of the second with numbers left out."""
    outputs = {n.output: n for n in facts.norm_calls.norms}
    pairs: dict[str, dict[tuple[str, str], tuple[NormCall, NormCall]]] = {}
    for norm in facts.norm_calls.norms:
        first = _before(facts, norm, outputs)
        if first is None:
            continue
        paths = (facts.graph.calls[first.call].path, facts.graph.calls[norm.call].path)
        role = re.sub(r"\d+", "*", paths[1])
        pairs.setdefault(role, {}).setdefault(paths, (first, norm))
    for alike in pairs.values():
        yield _finding(facts, alike)


def _before(facts: Facts, norm: NormCall, outputs: dict[int, NormCall]) -> NormCall | None:
    """Return the norm whose output, and nothing else, a norm reads, if nobody else reads it either."""
    value, readers = norm.input, norm.members | {norm.op.id}
    for _ in range(8):
        if any(op.id not in readers for op in facts.graph.consumers(value)) or value in facts.graph.outputs:
            return None
        if value in outputs:
            return outputs[value] if _alike(outputs[value], norm) else None
        op = facts.graph.producer(value)
        if op is None or op.short not in _BETWEEN or not _plain(facts, op):
            return None
        value, readers = op.inputs[0], {op.id}
    return None


def _plain(facts: Facts, op: Op) -> bool:
    """Whether an op hands all elements on: a pooled or selected part is another input."""
    return facts.graph.values[op.inputs[0]].numel == facts.graph.values[op.outputs[0]].numel


def _alike(a: NormCall, b: NormCall) -> bool:
    if a.spec is None or b.spec is None or a.spec.running or b.spec.running:
        return False
    plain = all(s.gate is Gate.NONE and s.modulation is Modulation.NONE for s in (a.spec, b.spec))
    return plain and (a.spec.scope, a.spec.axes, a.spec.groups) == (b.spec.scope, b.spec.axes, b.spec.groups)


def _finding(facts: Facts, alike: Mapping[tuple[str, str], tuple[NormCall, NormCall]]) -> Finding:
    paths, (first, second) = next(iter(alike.items()))
    norms = tuple(dict.fromkeys(p for pair in alike for p in reversed(pair)))
    evidence: dict[str, object] = {"first": paths[0], "second": paths[1], "norms": 2 * len(alike)}
    try:
        base = facts.runs.base
        evidence["change_by_second"] = relative(base.of(second.output), base.of(first.output))
    except NotKnown:
        pass
    a, b = (p[-_SHOWN:] or "the model" for p in paths)
    en, zh = (f", as in {len(alike) - 1} more", f"，另有 {len(alike) - 1} 处") if len(alike) > 1 else ("", "")
    return Finding(
        path=paths[1],
        paths=norms,
        severity=SEVERITY,
        basis=Basis.PATTERN,
        message=both(f"{b} normalizes the output of {a} again{en}", f"{b} 对 {a} 的输出又做一次归一化{zh}"),
        evidence=evidence,
        fix=both(
            "In a new model leave one of the two out (norm=None for post-norm blocks); keep both in a trained one.",
            "新模型去掉其中一个（后置归一化块用 norm=None）；已训练的模型两个都保留。",
        ),
    )


def _target(*, twice: bool) -> Target:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    norm = nn.LayerNorm(8) if twice else None
    model = nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=False)
    return Target(model=model.eval(), args=(torch.randn(2, 4, 8),))


def bad() -> Target:
    """Return a post-norm encoder with a final norm."""
    return _target(twice=True)


def good() -> Target:
    """Return the same encoder without it."""
    return _target(twice=False)
