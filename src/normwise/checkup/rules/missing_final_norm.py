"""A pre-norm stack whose last sum reaches the head without a norm.

## What it finds
A residual stack in which every sublayer reads a norm of the stream (pre-norm, in series or in parallel) while the
stream itself never passes one: there is no norm between the last add and what reads it. A warning where a linear map
(the head) reads the raw stream; only worth knowing where the stream itself is the model's output, or the memory of
another stack. An error where the checkpoint, or a reference, holds the closing norm and the model has no place for it:
it is put in and the batch run again. Stacks whose blocks normalize the branch, and heads that normalize further on, are
no fault.

## Why it matters
In x + F(N(x)) every sublayer sees a stream of unit scale, but the stream grows with every add. The final norm is part
of the design: without it the head sees a scale that depends on depth, on the token and on the state of training,
logits start too large, and a checkpoint trained with a final norm gives poor text without any error.

## How to fix it
Put one norm, of the kind the blocks use, between the last block and the head. That changes the function: train or load
its weights too. `torch.nn.TransformerEncoder(layer, n)` of `norm_first=True` layers takes `norm=nn.LayerNorm(d_model)`.

## Sources
Questions 51, 52, 53 and 64. https://github.com/huggingface/transformers/pull/17785 (a port without it: odd text in all
sizes); Xiong et al. 2020, https://arxiv.org/abs/2002.04745, section 3 (Pre-LN needs a final layer normalization).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.beyond import Reader, beyond
from normwise.facts.closing import Lost, lost, repaired
from normwise.facts.records import StackKind
from normwise.rendering import both
from normwise.targets import Target

ZH = """前置归一化堆叠的最后一个和未经归一化就进入输出头。

## 发现什么
残差堆叠的每个子层都读取残差流的归一化（前置归一化，串行或并行），而残差流本身从不经过归一化：最后一次相加与其读取者之间没有归一化。
由线性映射（输出头）直接读取时为警告；残差流本身就是模型输出、或作为另一堆叠的记忆时只作提示。
若检查点或参考模型带有末端归一化而模型没有它的位置，则为错误：把它放回去并重跑同一批数据。
分支上归一化的堆叠、以及之后自行归一化的输出头，都不算错。

## 为什么重要
在 x + F(N(x)) 中，每个子层看到的尺度都是 1，但残差流随每次相加增长。末端归一化是设计的一部分：
没有它，输出头看到的尺度取决于深度、词元和训练进度，logits 一开始就过大；
而带末端归一化训练的检查点会无声地给出很差的文本。

## 如何修复
在最后一块与输出头之间加一个与各块同类的归一化。这会改变函数：它的权重也要训练或加载。
`torch.nn.TransformerEncoder(layer, n)` 配 `norm_first=True` 时应传入 `norm=nn.LayerNorm(d_model)`。

## 来源
问题 51、52、53 和 64。https://github.com/huggingface/transformers/pull/17785（移植时漏掉它：各尺寸文本都不正常）；
Xiong 等 2020，https://arxiv.org/abs/2002.04745，第 3 节（Pre-LN 需要最终层归一化）。
"""

CODE = "PLC001"
SEVERITY = Severity.ERROR
EXPLAINS = ("CKP004", "CKP006")

# with one block nothing accumulates, and a single residual map is often a head of its own
BLOCKS = 2
KINDS = (StackKind.PRE, StackKind.PARALLEL, StackKind.PARALLEL_SHARED)
# The norm put in is the one that was lost if it takes away at least half of the distance to the reference: a model
# with a second fault keeps the rest of it.
CLOSER = 0.5


def check(facts: Facts) -> Iterator[Finding]:
    """Report every pre-norm stack whose stream is read without a norm."""
    for index, stack in enumerate(facts.placement.stacks):
        if stack.kind not in KINDS or stack.depth < BLOCKS or stack.final_norm:
            continue
        reach = beyond(facts.flow, facts.placed, facts.norm_calls.norms, index)
        if reach.reader in _READS:
            yield _finding(facts, index, reach.reader, reach.path)


_READS = {
    Reader.HEAD: (
        "{path} reads the sum of {adds} branches without a norm",
        "{path} 直接读取 {adds} 个分支之和，没有归一化",
    ),
    Reader.STAGE: (
        "{path} reads the sum of {adds} branches without a norm",
        "{path} 直接读取 {adds} 个分支之和，没有归一化",
    ),
    Reader.OUTPUT: (
        "the model returns the sum of {adds} branches without a norm",
        "模型直接返回 {adds} 个分支之和，没有归一化",
    ),
    Reader.MEMORY: (
        "{path} reads the sum of {adds} branches of another stack without a norm",
        "{path} 直接读取另一堆叠的 {adds} 个分支之和，没有归一化",
    ),
}


def _finding(facts: Facts, index: int, reader: Reader, path: str) -> Finding:
    stack = facts.placement.stacks[index]
    last = stack.members[-1].path
    norm = lost(facts, stack.width) if reader in (Reader.HEAD, Reader.OUTPUT) else None
    effect = _effect(facts, index, reader, norm)
    severity, basis = _judged(reader, norm, effect)
    if severity is Severity.INFO:
        effect = None
    shown = path if 0 < len(path) <= 40 else "the head"
    message = both(*(said.format(path=shown, adds=stack.sublayers) for said in _READS[reader]))
    if norm is not None and severity is Severity.ERROR:
        message = both(
            f"the stream of {stack.sublayers} branches ends without {norm.path[-30:]} of the {norm.source}",
            f"{stack.sublayers} 个分支的残差流结束时缺少 {_ZH_SOURCE[norm.source]}中的 {norm.path[-30:]}",
        )
    return Finding(
        path=last,
        paths=tuple(dict.fromkeys((last, path))) if path else (last,),
        severity=severity,
        basis=basis,
        message=message,
        evidence={
            "stack": index,
            "kind": str(stack.kind),
            "blocks": stack.depth,
            "adds": stack.sublayers,
            "width": stack.width,
            "read_by": str(reader),
            "reader": path,
            **({"lost_norm": norm.path, "held_by": norm.source} if norm else {}),
        },
        counterfactual=effect,
        fix=both(
            "Put a norm of the blocks' kind between the last block and what reads it, and train or load its weights.",
            "在最后一块与读取者之间加一个与各块同类的归一化，并训练或加载它的权重。",
        ),
    )


_ZH_SOURCE = {"checkpoint": "检查点", "reference": "参考模型"}


def _effect(facts: Facts, index: int, reader: Reader, norm: Lost | None) -> dict[str, Any] | None:
    """Put the norm in, where that can tell anything: under a head, or to come nearer to a reference."""
    if reader is not Reader.HEAD and (reader is not Reader.OUTPUT or facts.target.reference is None):
        return None
    try:
        return repaired(facts, index, norm)
    except NotKnown:
        return None


def _judged(reader: Reader, norm: Lost | None, effect: dict[str, Any] | None) -> tuple[Severity, Basis]:
    compared = effect if effect is not None and effect["metric"] == "relative_distance_to_reference" else None
    if compared and compared["after"] <= CLOSER * compared["before"]:
        return Severity.ERROR, Basis.PROOF
    if reader is not Reader.HEAD:
        return Severity.INFO, Basis.PATTERN
    if norm is not None and not compared:
        return Severity.ERROR, Basis.PROOF
    # a reference that does the same was built this way on purpose
    if effect is None or compared:
        return Severity.INFO, Basis.PATTERN
    return Severity.WARNING, Basis.MEASURED


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class _Classifier(nn.Module):
    def __init__(self, *, final: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(5, 8), nn.ModuleList(_Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(8) if final else nn.Identity(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _target(*, final: bool) -> Target:
    torch.manual_seed(0)
    reference, model = _Classifier(final=True), _Classifier(final=final)
    model.load_state_dict(reference.state_dict(), strict=False)
    return Target(model=model, args=(torch.randn(2, 3, 5),), reference=reference)


def bad() -> Target:
    """Return four pre-norm blocks and a head with nothing between, beside a reference with a final norm."""
    return _target(final=False)


def good() -> Target:
    """Return the same model with a final norm."""
    return _target(final=True)
