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

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.facts import Facts
from normwise.facts.norms import NormCall
from normwise.facts.records import StackKind
from normwise.facts.streams import Residual
from normwise.targets import Target

CODE = "PLC003"
SEVERITY = Severity.WARNING


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
        yield Finding(
            path=paths[0],
            paths=paths,
            severity=SEVERITY,
            basis=Basis.PATTERN,
            message=f"{len(hits)} of {stack.sublayers} adds start from a norm's output, not from the stream",
            evidence={
                "stack": index,
                "adds": stack.sublayers,
                "adds_from_a_norm": len(hits),
                "blocks": sorted({_layer(facts, h) for h in hits}),
                "signatures": dict(stack.mixture),
            },
            fix="Keep the stream: x = x + f(norm(x)) instead of x = norm(x); x = x + f(x).",
        )


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
