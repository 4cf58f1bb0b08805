"""A block wired differently from its siblings.

## What it finds
A block inside a residual stack whose norms sit where those of at least 85 % of the other blocks do not: a post-norm
block among pre-norm ones, a block without a norm, one with a norm too many. Or a block that does the same work as the
others, op for op, without their query, key, value or inner norms. The first and the last block, and patterns that
repeat with a fixed period (hybrid and local/global stacks), are taken for intended. How many sublayers a block has does
not count; inner norms are compared only between blocks with the same ops (a layer without rotary embedding is another).

## Why it matters
The placement decides the scale of the stream and the path of the gradient for all blocks around it. One odd block
resets, or lets grow, what its neighbours were tuned for, and trains with a gradient of another size. It is nearly
always left over: half a refactoring, a copied block, a condition on the layer's index that is off by one.

## How to fix it
Compare the block's forward with its neighbours' and wire it like them. If the weights were trained this way, keep it,
and say so where the block is built.

## Sources
Questions 42, 43, 44 and 45. Xiong et al. 2020, https://arxiv.org/abs/2002.04745 (what the placement does to scale and
gradient); https://github.com/allenai/OLMo/pull/680 (a norm moved by a refactoring).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.rules.residual_from_normed import normed_skips
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.inner_norms import Inside, inside
from normwise.facts.records import StackKind, Sublayer
from normwise.rendering import both
from normwise.targets import Target

ZH = """接线与同类不同的块。

## 发现什么
残差堆叠内部有一块，它的归一化位置与至少 85% 的其他块不同：
前置归一化块中的后置归一化块、没有归一化的块、多一个归一化的块。
或者有一块与其他块做同样的运算，却没有它们的查询、键、值或内部归一化。
第一块和最后一块、以及按固定周期重复的模式（混合堆叠、局部/全局堆叠）视为有意为之。块内有多少子层不计；
内部归一化只在运算相同的块之间比较（没有旋转位置编码的层是另一种层）。

## 为什么重要
归一化的位置决定周围所有块的残差流尺度和梯度路径。一个不同的块会重置、或放任增长邻居所依赖的尺度，并以另一种大小的梯度训练。
它几乎总是残留物：做了一半的重构、复制来的块、差一的层号条件。

## 如何修复
把该块的 forward 与邻居比较，接成一样。若权重就是这样训练的，则保留，并在构建该块的地方注明。

## 来源
问题 42、43、44 和 45。Xiong 等 2020，https://arxiv.org/abs/2002.04745（位置对尺度和梯度的影响）；
https://github.com/allenai/OLMo/pull/680（被重构移动的归一化）。
"""

CODE = "PLC002"
EXPLAINS = ("CKP006",)
SEVERITY = Severity.WARNING

# The share of signatures that names a stack (DESIGN 5), so that one odd block in eight still has a majority against it
SHARE = 0.85
# With fewer blocks there is no majority to differ from: two siblings inside are the least
BLOCKS = 4

Signature = tuple[str, bool, bool, bool]


def check(facts: Facts) -> Iterator[Finding]:
    """Report interior blocks whose signatures no majority of their siblings shares."""
    for index, stack in enumerate(facts.placement.stacks):
        if stack.kind is StackKind.MIXED and stack.name is not None:  # a placement of two wirings, such as Mix-LN
            continue
        blocks = _blocks(facts, index)
        odd = [layer for layer in _odd(blocks) if layer not in _beside(facts, index)]
        if odd:
            yield _finding(facts, index, odd, blocks)
        elif (within := inside(facts, index)) and (bare := _odd_inside(within)):
            yield _inner(facts, index, bare, within)


def _beside(facts: Facts, stack: int) -> set[int]:
    """Return the blocks that are no siblings: adds that the module around the blocks makes itself."""
    graph, adds = facts.graph, facts.placed.streams[stack].adds
    around = {call.id for add in adds for call in graph.ancestors(graph.calls[add.op.call].parent)}
    return {facts.placed.layers[add.index] for add in adds if add.op.call in around}


def _blocks(facts: Facts, stack: int) -> dict[int, frozenset[Signature]]:
    """Return the signatures of each block, without those that another rule explains."""
    explained = {p for hit in normed_skips(facts, stack) for p in hit.touched}
    blocks: dict[int, set[Signature]] = {}
    pairs = zip(facts.placed.streams[stack].adds, facts.placement.stacks[stack].members, strict=True)
    for position, (add, member) in enumerate(pairs):
        signatures = blocks.setdefault(facts.placed.layers[add.index], set())
        if position not in explained:
            signatures.add(_signature(member))
    return {layer: frozenset(signatures) for layer, signatures in blocks.items()}


def _signature(member: Sublayer) -> Signature:
    w = member.wiring
    return (str(member.signature), w.before, w.after_branch, w.after_add)


def _odd(blocks: dict[int, frozenset[Signature]]) -> list[int]:
    layers = sorted(blocks)
    if len(layers) < BLOCKS:
        return []
    usual = _usual(blocks)
    odd = [layer for layer in layers if blocks[layer] and not blocks[layer] <= usual]
    interior = [layer for layer in odd if layer not in (layers[0], layers[-1])]
    siblings = len(layers) - 1
    if not interior or len(layers) - len(odd) < SHARE * siblings or _periodic(odd, layers):
        return []
    return interior


def _usual(blocks: dict[int, frozenset[Signature]]) -> frozenset[Signature]:
    """Return the signatures that most blocks are made of."""
    (most, _), *_ = Counter(blocks.values()).most_common(1)
    return most


def _odd_inside(blocks: dict[int, Inside]) -> list[int]:
    """Return the interior blocks that do the siblings' work with other inner norms."""
    layers = sorted(blocks)
    if len(layers) < BLOCKS:
        return []
    (usual, _), *_ = Counter((b.said, frozenset(b.work.items())) for b in blocks.values()).most_common(1)
    alike = [layer for layer in layers if frozenset(blocks[layer].work.items()) == usual[1]]
    odd = [layer for layer in alike if blocks[layer].said != usual[0]]
    if len(alike) - len(odd) < SHARE * (len(layers) - 1) or _periodic(odd, layers):
        return []
    return [layer for layer in odd if layer not in (layers[0], layers[-1])]


def _inner(facts: Facts, index: int, odd: list[int], blocks: dict[int, Inside]) -> Finding:
    (usual, _), *_ = Counter(b.said for b in blocks.values()).most_common(1)
    paths = tuple(dict.fromkeys(p for layer in odd for p in blocks[layer].paths))
    measured = _measured(facts, index, odd)
    has, others = blocks[odd[0]].said, usual
    which = f"block {odd[0]} of {len(blocks)} has" if len(odd) == 1 else f"{len(odd)} blocks of {len(blocks)} have"
    listed = ", ".join(map(str, odd[:8])) + (", ..." if len(odd) > 8 else "")
    return Finding(
        paths=paths,
        severity=SEVERITY if measured else Severity.INFO,
        basis=Basis.MEASURED if measured else Basis.PATTERN,
        message=both(
            f"{which} {has}, the others {others}", f"{len(blocks)} 个块中，第 {listed} 块有 {has}，其他块有 {others}"
        ),
        evidence={
            "stack": index,
            "odd": odd,
            "blocks": len(blocks),
            "like_the_rest": sum(b.said == usual for b in blocks.values()),
            "inner_norms": has,
            "inner_norms_of_the_others": others,
            **measured,
        },
        fix=both(
            f"Give {counted(len(odd), 'block')} ({listed}) the norms of the rest, or say where it is built why not.",
            f"为第 {listed} 块加上其他块的归一化，或在构建它的地方说明原因。",
        ),
    )


def _periodic(odd: list[int], layers: list[int]) -> bool:
    """Whether the odd blocks are all those of one phase of a fixed period."""
    if len(odd) < 2:
        return False
    period = odd[1] - odd[0]
    phase = [layer for layer in layers if (layer - odd[0]) % period == 0]
    return phase == odd


def _finding(facts: Facts, index: int, odd: list[int], blocks: dict[int, frozenset[Signature]]) -> Finding:
    stack = facts.placement.stacks[index]
    usual = _usual(blocks)
    pairs = list(zip(facts.placed.streams[index].adds, stack.members, strict=True))
    paths = tuple(
        dict.fromkeys(m.path for a, m in pairs if facts.placed.layers[a.index] in odd and _signature(m) not in usual)
    )
    names, names_zh = _wired(frozenset(s for layer in odd for s in blocks[layer] - usual))
    others, others_zh = _wired(usual)
    which = f"block {odd[0]}" if len(odd) == 1 else f"{len(odd)} blocks"
    which_zh = f"第 {odd[0]} 块" if len(odd) == 1 else f"{len(odd)} 块"
    verb = "is" if len(odd) == 1 else "are"
    measured = _measured(facts, index, odd)
    listed = ", ".join(map(str, odd[:8])) + (", ..." if len(odd) > 8 else "")
    return Finding(
        paths=paths,
        severity=SEVERITY if measured else Severity.INFO,
        basis=Basis.MEASURED if measured else Basis.PATTERN,
        message=both(
            f"{which} of {len(blocks)} {verb} wired {names}, the others {others}",
            f"{len(blocks)} 个块中，{which_zh}的接法：{names_zh}，其他块：{others_zh}",
        ),
        evidence={
            "stack": index,
            "odd": odd,
            "blocks": len(blocks),
            "like_the_rest": sum(signatures <= usual for signatures in blocks.values()),
            "odd_signatures": {str(layer): sorted(s[0] for s in blocks[layer]) for layer in odd},
            "usual_signatures": sorted(s[0] for s in usual),
            **measured,
        },
        fix=both(
            f"Wire {counted(len(odd), 'block')} ({listed}) like the rest: compare their forwards.",
            f"把第 {listed} 块接成与其他块一样：比较它们的 forward。",
        ),
    )


def _measured(facts: Facts, index: int, odd: list[int]) -> dict[str, float]:
    """Return what the first odd block does to the stream and to the gradient on the example inputs."""
    try:
        rows = [r for r in facts.profile if r.stack == index]
    except NotKnown:
        return {}
    layers = [facts.placed.layers[a.index] for a in facts.placed.streams[index].adds]
    first, last = layers.index(odd[0]), len(layers) - 1 - layers[::-1].index(odd[0])
    before, after = rows[first - 1], rows[last]
    numbers = {
        "stream_rms_before": before.residual_rms,
        "stream_rms_after": after.residual_rms,
        "gradient_rms_before": before.grad_rms,
        "gradient_rms_after": after.grad_rms,
    }
    return {name: n for name, n in numbers.items() if n is not None and math.isfinite(n)}


def _named(signatures: frozenset[Signature]) -> str:
    return " and ".join(sorted({s[0].replace("_", "-") for s in signatures}))


def _wired(signatures: frozenset[Signature]) -> tuple[str, str]:
    """Say in both languages how adds are wired; "none" alone would read as no wiring."""
    named = _named(signatures)
    return ("without a norm", "没有归一化") if named == "none" else (named, named)


class _Block(nn.Module):
    def __init__(self, *, post: bool) -> None:
        super().__init__()
        self.norm, self.mlp, self.post = nn.LayerNorm(8), nn.Linear(8, 8), post

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.mlp(x)) if self.post else x + self.mlp(self.norm(x))


def _target(odd: int | None) -> Target:
    model = nn.Sequential(*(_Block(post=i == odd) for i in range(8)), nn.LayerNorm(8))
    return Target(model=model, args=(torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)),))


def bad() -> Target:
    """Return a pre-norm stack with one post-norm block."""
    return _target(3)


def good() -> Target:
    """Return the same stack without it."""
    return _target(None)
