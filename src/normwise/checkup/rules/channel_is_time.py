"""A batch or group norm that takes time steps for channels.

## What it finds
A batch norm, or group norm, whose channel axis is the time axis: `BatchNorm1d(T)` on `[B, T, H]`. The axes are named by
running the model again with another batch size and another length, so the finding is a proof; where neither can be
varied the rule says so. A batch norm that was built for one length stops such a run, which labels the axes before it.

## Why it matters
`BatchNorm1d` reads `[B, C, T]`. Given `[B, T, H]` it keeps one mean, one variance, one gain and one shift for each
*position*, taken over the batch and all features: features of any scale are mixed, the model runs at one length only, and
position 7 is scaled by what stood at position 7 in training.

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
from normwise.facts.norms import NormCall
from normwise.facts.sites import Site
from normwise.spec import Scope
from normwise.targets import Target

CODE = "AXS006"
SEVERITY = Severity.ERROR

# torch's layout for batch and group norms: [N, C, *]
CHANNELS = 1


def check(facts: Facts) -> Iterator[Finding]:
    """Report every batch and group norm whose channel axis grows with the length of the input."""
    suspects = [s for s in facts.sites if _has_channels(s) and len(s.row.shape) >= 3]
    if not suspects:
        return
    labels = facts.labels
    unlabelled = [s for s in suspects if labels.get(s.calls[0].input) is None or "unknown" in labels[s.calls[0].input]]
    wrong = [s for s in suspects if "time" in labels.get(s.calls[0].input, ()) and _label(labels, s.calls[0]) == "time"]
    if wrong:
        yield _finding(facts, wrong)
    elif unlabelled:
        raise NotKnown(f"the axes of {unlabelled[0].row.path}'s input could not be named by runs of other sizes")


def _has_channels(site: Site) -> bool:
    return site.row.native and site.row.spec is not None and site.row.spec.scope in (Scope.BATCH, Scope.GROUP)


def _label(labels: dict[int, tuple[str, ...]], call: NormCall) -> str:
    return labels[call.input][CHANNELS]


def _finding(facts: Facts, sites: list[Site]) -> Finding:
    paths = tuple(s.row.path for s in sites)
    first = sites[0]
    return Finding(
        path=paths[0],
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=f"{counted(len(paths), 'norm')} with time for channels: one mean and one gain for each position",
        evidence={
            "norms": len(paths),
            "shape": list(first.row.shape),
            "axes": list(facts.labels[first.calls[0].input]),
            "channels": first.row.shape[CHANNELS],
            "scope": str(first.row.spec.scope) if first.row.spec else None,
        },
        fix=f"Transpose around it with {first.row.shape[-1]} channels: norm(x.transpose(1, 2)).transpose(1, 2); or LayerNorm.",
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
