"""A bias or a dropout right before a batch norm.

## What it finds
A convolution or linear layer with a trained bias whose only reader is a batch norm, and a dropout whose only reader is
one. Both are read off the graph and only worth knowing: the models work.

## Why it matters
The norm subtracts the batch mean, and with it any bias: in train mode the bias has no effect and a gradient of exactly
0, only weight decay moves it. Dropout scales what it keeps, so that means agree between train and eval mode but
variances do not: the running variance is that of the dropped activations, and evaluation divides by a number that is
too large (the factor is 1/(1-p) for activations of mean 0).

## How to fix it
`bias=False` in the layer before the norm; dropout after the last batch norm.

## Sources
Question 13. Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, section 3.2 (the bias can be left out);
Li et al. 2018, https://arxiv.org/abs/1801.05134 (dropout before batch norm).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.facts import Facts
from normwise.facts.calls import NormCall
from normwise.facts.liveness import Scope
from normwise.graph import Graph, Op, Ref, ValueKind
from normwise.rendering import both
from normwise.targets import Target

CODE = "BNS014"
SEVERITY = Severity.INFO

# argument in which each op takes its bias
_BIASED = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d", "convolution"), 2),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), 2),
    "addmm": 0,
}
_DROPOUTS = ("dropout", "feature_dropout", "native_dropout")

ZH = """批归一化之前紧挨着偏置或 dropout。

## 发现什么
带有可训练偏置、且输出只被一个批归一化读取的卷积或线性层，以及输出只被批归一化读取的 dropout。两者都从计算图读出，
仅作提示：模型能正常工作。

## 为什么重要
归一化减去批均值，任何偏置也随之消去：训练模式下偏置没有作用，其梯度恰为 0，只有权重衰减会移动它。
dropout 会放大保留下来的值，使均值在训练与评估模式间一致，方差却不一致：运行方差是被丢弃后的激活的，评估时除以的数偏大
（对均值为 0 的激活，比例是 1/(1-p)）。

## 如何修复
归一化之前的层设 `bias=False`；dropout 放在最后一个批归一化之后。

## 来源
问题 13。Ioffe 和 Szegedy 2015，https://arxiv.org/abs/1502.03167，3.2 节（偏置可以省去）；
Li 等 2018，https://arxiv.org/abs/1801.05134（批归一化之前的 dropout）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report biases and dropouts that only a batch norm reads."""
    norms = {p for p, live in facts.live_norms.items() if live.scope is Scope.BATCH}
    if not norms:
        return
    graph = facts.graph
    calls = [n for n in facts.norm_calls.norms if graph.calls[n.call].path in norms]
    biases = [p for n in calls if (p := _bias_before(facts, graph, n)) is not None]
    if biases:
        yield _biases(tuple(dict.fromkeys(biases)), facts)
    dropped = _after_dropout(facts, norms)
    if dropped:
        yield _dropouts(dropped)


def _only_read_by(graph: Graph, value: int, norm: NormCall) -> bool:
    return all(use in norm.members or use == norm.op.id for use in graph.values[value].uses)


def _bias_before(facts: Facts, graph: Graph, norm: NormCall) -> str | None:
    op = graph.producer(norm.input)
    if op is None or op.short not in _BIASED or not _only_read_by(graph, norm.input, norm):
        return None
    bias = _argument(op, _BIASED[op.short])
    if bias is None or graph.values[bias].kind is not ValueKind.PARAM or not graph.values[bias].names:
        return None
    name = graph.values[bias].names[0]
    parameters = facts.parameters
    return name if name in parameters and parameters[name].requires_grad else None


def _argument(op: Op, index: int) -> int | None:
    given = op.args[index] if index < len(op.args) else op.kwargs.get("bias")
    return given.value if isinstance(given, Ref) else None


def _after_dropout(facts: Facts, norms: Collection[str]) -> tuple[str, ...]:
    """Return the norms that read the output of a dropout: an op of the run, or a module that is idle in eval mode."""
    graph = facts.traced.graph
    droppers = {p for p, m in facts.modules.items() if getattr(m, "p", 0) and _is_dropout(m)}
    dropped: set[tuple[int, ...]] = set()  # what dropouts have given out so far
    found: list[str] = []
    for call in graph.calls:
        if call.path in norms and call.inputs:
            op = graph.producer(call.inputs[0])
            if (op is not None and op.short in _DROPOUTS) or call.inputs in dropped:
                found.append(call.path)
        elif call.path in droppers:
            dropped.add(call.outputs)
    return tuple(dict.fromkeys(found))


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout)


def _biases(names: tuple[str, ...], facts: Facts) -> Finding:
    parameters = facts.parameters
    paths = tuple(dict.fromkeys(n.rpartition(".")[0] for n in names))
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(names), 'layer')} with a bias before a batch norm, which subtracts it in training",
            f"批归一化之前的 {len(names)} 个偏置在训练中没有作用：归一化会减去它们",
        ),
        evidence={"biases": list(names), "count": len(names), "numbers": sum(parameters[n].numel() for n in names)},
        fix=both("Set bias=False in the layers before batch norms.", "批归一化之前的层设 bias=False。"),
    )


def _dropouts(paths: tuple[str, ...]) -> Finding:
    return Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PATTERN,
        message=both(
            f"dropout right before {counted(len(paths), 'batch norm')}: the running variance includes its noise",
            f"{len(paths)} 个批归一化之前紧挨着 dropout：运行方差包含了它的噪声",
        ),
        evidence={"norms": len(paths)},
        fix=both("Put dropout after the last batch norm.", "把 dropout 放在最后一个批归一化之后。"),
    )


def _target(*, bias: bool) -> Target:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4), nn.ReLU())
    return Target(model=model.eval(), args=(torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)),))


def bad() -> Target:
    """Return a convolution with a bias before a batch norm."""
    return _target(bias=True)


def good() -> Target:
    """Return the same without the bias."""
    return _target(bias=False)
