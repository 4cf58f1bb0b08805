"""A sublayer whose skip carries the norm's output instead of the stream.

## What it finds
In some sublayers of a stack the norm stands on the stream itself: `x = norm(x); x = x + f(x)`, so skip and branch read
the same normalized value, while other sublayers of the same stack keep the stream clean, `x + f(norm(x))`. A stack in
which all sublayers normalize the stream is a post-norm design and no fault; nor is a norm of the embedding.

## Why it matters
The stream loses its scale, and in a LayerNorm its mean, at each of these sublayers: what earlier blocks wrote is
rescaled block by block, and the gradient no longer has a path around the norms. The usual cause is a refactoring that
re-used the name `x` for the norm's output. Nothing fails; weights trained with the other form give wrong outputs.

## How to fix it
Give the normalized value a name of its own and add to the stream:

```python
x = x + self.attention(self.norm(x))
```

## Sources
Questions 43, 45 and 47. https://github.com/allenai/OLMo/pull/680 (the norm's output stored in x);
He et al. 2016, Identity Mappings in Deep Residual Networks, https://arxiv.org/abs/1603.05027.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.norms import NormCall
from normwise.facts.records import StackKind
from normwise.facts.repairs import effect
from normwise.facts.rewiring import rewired, rms
from normwise.facts.streams import Residual
from normwise.rendering import both
from normwise.targets import Target

ZH = """子层的跳连带的是归一化的输出，而不是残差流。

## 发现什么
堆叠中的一部分子层把归一化放在了残差流上：`x = norm(x); x = x + f(x)`，跳连与分支读取同一个已归一化的值；
而同一堆叠的其他子层保持残差流干净：`x + f(norm(x))`。
所有子层都这样做的堆叠是后置归一化设计，不算错；嵌入的归一化也不算。

## 为什么重要
在这些子层，残差流失去尺度（LayerNorm 还会失去均值）：前面各块写入的内容被逐块重新缩放，梯度不再有绕过归一化的路径。
常见原因是重构时用 `x` 这个名字接收了归一化的输出。不会报错；用另一种形式训练的权重会给出错误输出。

## 如何修复
给归一化后的值单独起名，并加到残差流上：

```python
x = x + self.attention(self.norm(x))
```

## 来源
问题 43、45 和 47。https://github.com/allenai/OLMo/pull/680（归一化的输出存进了 x）；
He 等 2016，Identity Mappings in Deep Residual Networks，https://arxiv.org/abs/1603.05027。
"""

CODE = "PLC003"
SEVERITY = Severity.WARNING
EXPLAINS = ("CKP006",)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedSkip:
    """An add whose skip and branch both start from one norm's output."""

    stack: int
    position: int  # of the add in its stack
    norm: str  # path of the norm
    first: bool  # the stack's first add: the norm may be the embedding's

    @property
    def touched(self) -> tuple[int, ...]:
        """The positions whose signature the norm changes: its own add and, before it, the one it follows."""
        return (self.position,) if self.first else (self.position - 1, self.position)


def check(facts: Facts) -> Iterator[Finding]:
    """Report the sublayers of a stack that add to a normalized stream where others do not."""
    for index, stack in enumerate(facts.placement.stacks):
        hits = normed_skips(facts, index)
        if not hits:
            continue
        paths = tuple(dict.fromkeys(h.norm for h in hits))
        repaired = _effect(facts, index, hits)
        yield Finding(
            paths=paths,
            severity=SEVERITY if repaired is not None else Severity.INFO,
            basis=Basis.PATTERN if repaired is None else Basis.MEASURED,
            message=both(
                f"{len(hits)} of {stack.sublayers} adds start from a norm's output, not from the stream",
                f"{stack.sublayers} 次相加中有 {len(hits)} 次从归一化的输出而不是残差流开始",
            ),
            evidence={
                "stack": index,
                "adds": stack.sublayers,
                "adds_from_a_norm": len(hits),
                "blocks": sorted({_layer(facts, h) for h in hits}),
                "signatures": dict(stack.mixture),
            },
            counterfactual=repaired,
            fix=both(
                "Keep the stream: x = x + f(norm(x)) instead of x = norm(x); x = x + f(x).",
                "保持残差流：用 x = x + f(norm(x))，而不是 x = norm(x); x = x + f(x)。",
            ),
        )


def _effect(facts: Facts, stack: int, hits: tuple[NormedSkip, ...]) -> dict[str, Any] | None:
    """Give the skips the stream itself and run again; None where that cannot be done."""
    adds = facts.placed.streams[stack].adds
    slipped = [adds[h.position] for h in hits]
    skips = {add.index: add.skip.norms[0].input for add in slipped}
    try:
        run = rewired(facts, slipped, torch.add, [adds[-1].out], skips=skips)
        before, after = rms(facts.runs.base.of(adds[-1].out)), rms(run.of(adds[-1].out))
    except NotKnown:
        return None
    change = both("the skips take the stream, not the norm's output", "跳连取残差流，而不是归一化的输出")
    return effect(change, "stream_rms_at_the_last_add", before, after)


def normed_skips(facts: Facts, stack: int) -> tuple[NormedSkip, ...]:
    """Return the adds of a stack whose skip passes a norm that the branch reads as well, if other adds are clean."""
    adds, members = facts.placed.streams[stack].adds, facts.placement.stacks[stack].members
    hits = []
    for position, add in enumerate(adds):
        # a sublayer that slips looks bare, or post where the next one slips as well
        if members[position].signature not in (StackKind.NONE, StackKind.POST) or not add.skip.norms:
            continue
        norm = add.skip.norms[0]
        first = add.skip.residual is None
        if not (
            _feeds(facts, add, norm.output)
            and _holds(facts, norm, add)
            and (_opens(facts, stack, position) or _follows(hits, position))
        ):
            continue
        hits.append(NormedSkip(stack=stack, position=position, norm=facts.graph.calls[norm.call].path, first=first))
    clean = any(not a.skip.norms and m.wiring.before for a, m in zip(adds, members, strict=True))
    real = any(not h.first for h in hits)
    return tuple(hits) if clean and real else ()


def _feeds(facts: Facts, add: Residual, value: int) -> bool:
    """Whether the branch of an add reads a value."""
    return any(op.id in add.region for op in facts.graph.consumers(value))


def _holds(facts: Facts, norm: NormCall, add: Residual) -> bool:
    """Whether the add runs inside the module that owns the norm: a closing norm is no part of what follows it."""
    call = facts.graph.calls[norm.call]
    owner = call.parent if call.leaf else call.id
    return any(c.id == owner for c in facts.graph.ancestors(add.op.call))


def _opens(facts: Facts, stack: int, position: int) -> bool:
    """Whether the norm belongs to the add that follows: in a post-norm sublayer it belongs to the one before."""
    if position == 0:
        return True
    before = facts.placement.stacks[stack].members[position - 1]
    return (
        before.wiring.before
        or before.wiring.after_branch
        or _block(facts, stack, position) != _block(facts, stack, position - 1)
    )


def _follows(hits: list[NormedSkip], position: int) -> bool:
    return bool(hits) and hits[-1].position == position - 1


def _block(facts: Facts, stack: int, position: int) -> int:
    return facts.placed.layers[facts.placed.streams[stack].adds[position].index]


def _layer(facts: Facts, hit: NormedSkip) -> int:
    return _block(facts, hit.stack, hit.position)


class _Block(nn.Module):
    def __init__(self, *, slip: bool) -> None:
        super().__init__()
        self.norm1, self.mix, self.norm2, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.slip = slip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slip:
            x = self.norm1(x)
            x = x + self.mix(x)
        else:
            x = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def _target(*, slip: bool) -> Target:
    model = nn.Sequential(*(_Block(slip=slip) for _ in range(4)), nn.LayerNorm(8))
    return Target(model=model, args=(torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)),))


def bad() -> Target:
    """Return blocks whose first sublayer adds to the norm's output."""
    return _target(slip=True)


def good() -> Target:
    """Return the same blocks with a clean stream."""
    return _target(slip=False)
