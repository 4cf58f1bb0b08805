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
from normwise.facts.sites import Site
from normwise.facts.vocabulary import CONV
from normwise.graph import ValueKind
from normwise.spec import Scope
from normwise.targets import Target

CODE = "AXS006"
SEVERITY = Severity.ERROR

# torch's layout for batch and group norms: [N, C, *]
CHANNELS = 1
_SWAPS = frozenset({"transpose", "permute", "t", "mT", "swapaxes", "swapdims", "movedim", "moveaxis"} | CONV)


def check(facts: Facts) -> Iterator[Finding]:
    """Report every batch and group norm whose channel axis grows with the length of the input."""
    suspects = [s for s in facts.sites if _has_channels(s) and len(s.row.shape) >= 3]
    if not suspects:
        return
    wrong = [s for s in suspects if _channels_are(facts, s) == "time"]
    certain = _counts_tokens(facts)
    if certain and wrong:  # the run with another length stopped at the first: its like have the same axes
        shapes = {s.row.shape for s in wrong}
        wrong = [s for s in suspects if s in wrong or (s.row.shape in shapes and _channels_are(facts, s) == "unknown")]
    likely = [s for s in wrong if _features_last(facts, s)]
    if wrong and (certain or likely):
        yield _finding(facts, wrong if certain else likely, certain=certain)
        return
    unnamed = wrong or [s for s in suspects if _channels_are(facts, s) == "unknown"]
    if unnamed:
        raise NotKnown(f"whether axis 1 of {unnamed[0].row.path}'s input is channels or time cannot be told from runs")


def _has_channels(site: Site) -> bool:
    return site.row.native and site.row.spec is not None and site.row.spec.scope in (Scope.BATCH, Scope.GROUP)


def _channels_are(facts: Facts, site: Site) -> str:
    axes = facts.labels.get(site.calls[0].input)
    return axes[CHANNELS] if axes else "unknown"


def _counts_tokens(facts: Facts) -> bool:
    """Whether an integer input [B, T] says which axis is time."""
    inputs = [v for v in facts.graph.values if v.kind is ValueKind.INPUT]
    return any(not v.floating and len(v.shape) == 2 for v in inputs)


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
        path=paths[0],
        paths=paths,
        severity=SEVERITY if certain else Severity.WARNING,
        basis=Basis.PROOF if certain else Basis.MEASURED,
        message=f"{counted(len(paths), 'norm')} with time for channels: one mean and one gain for each position",
        evidence={
            "norms": len(paths),
            "shape": list(first.row.shape),
            "axes": list(facts.labels[first.calls[0].input]),
            "channels": first.row.shape[CHANNELS],
            "scope": str(first.row.spec.scope) if first.row.spec else None,
        },
        fix=f"Give it {width} channels and transpose: norm(x.transpose(1, 2)).transpose(1, 2); or LayerNorm({width}).",
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
