"""A pre-norm stack whose last sum reaches the head without a norm.

## What it finds
A residual stack in which every sublayer reads a norm of the stream (pre-norm, in series or in parallel) while the
stream itself never passes one: there is no norm between the last add and what reads it. A warning where a linear map
(the head) reads the raw stream; only worth knowing where the stream itself is the model's output, or the memory of
another stack. Stacks whose blocks normalize the branch, and heads that normalize further on, are no fault.

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

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.facts import Facts
from normwise.facts.beyond import Reader, beyond
from normwise.facts.records import StackKind
from normwise.targets import Target

CODE = "PLC001"
SEVERITY = Severity.WARNING

# with one block nothing accumulates, and a single residual map is often a head of its own
BLOCKS = 2
KINDS = (StackKind.PRE, StackKind.PARALLEL, StackKind.PARALLEL_SHARED)


def check(facts: Facts) -> Iterator[Finding]:
    """Report every pre-norm stack whose stream is read without a norm."""
    for index, stack in enumerate(facts.placement.stacks):
        if stack.kind not in KINDS or stack.depth < BLOCKS or stack.final_norm:
            continue
        reach = beyond(facts.flow, facts.placed, facts.norm_calls.norms, index)
        if reach.reader in _READS:
            yield _finding(facts, index, reach.reader, reach.path)


_READS = {
    Reader.HEAD: "{path} reads the sum of {adds} branches without a norm",
    Reader.STAGE: "{path} reads the sum of {adds} branches without a norm",
    Reader.OUTPUT: "the model returns the sum of {adds} branches without a norm",
    Reader.MEMORY: "{path} reads the sum of {adds} branches of another stack without a norm",
}


def _finding(facts: Facts, index: int, reader: Reader, path: str) -> Finding:
    stack = facts.placement.stacks[index]
    last = stack.members[-1].path
    message = _READS[reader].format(path=path if 0 < len(path) <= 40 else "the head", adds=stack.sublayers)
    return Finding(
        path=last,
        paths=tuple(dict.fromkeys((last, path))) if path else (last,),
        severity=SEVERITY if reader is Reader.HEAD else Severity.INFO,
        basis=Basis.PATTERN,
        message=message,
        evidence={
            "stack": index,
            "kind": str(stack.kind),
            "blocks": stack.depth,
            "adds": stack.sublayers,
            "width": stack.width,
            "read_by": str(reader),
            "reader": path,
        },
        fix="Put a norm of the blocks' kind between the last block and what reads it, and train or load its weights.",
    )


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
    return Target(model=_Classifier(final=final), args=(torch.ones(2, 3, 5),))


def bad() -> Target:
    """Return four pre-norm blocks and a head with nothing between."""
    return _target(final=False)


def good() -> Target:
    """Return the same model with a final norm."""
    return _target(final=True)
