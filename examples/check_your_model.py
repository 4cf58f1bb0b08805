"""Check a model of your own: hand over what you have, read the findings.

Run it: ``python examples/check_your_model.py``.
"""

from __future__ import annotations

import torch
from torch import nn

import normwise as nw


class Block(nn.Module):
    """A residual block whose RMSNorm is written by hand, as in many repositories."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x + MLP(norm(x))."""
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        return x + self.mlp(y)


def main() -> None:
    """Build, check, and read the report in three ways."""
    model = nn.Sequential(nn.Embedding(1000, 64), *(Block(64) for _ in range(4)), nn.LayerNorm(64), nn.Linear(64, 1000))
    ids = torch.randint(1000, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)

    report = nw.check(model, ids, optimizer=optimizer)  # the optimizer is one more piece of evidence
    print(report)

    for site in report.norms:  # every norm: what it computes and where it sits
        assert site.spec is not None
        print(f"{site.path:10} {site.spec.kind:6} eps {site.spec.eps:g}  {site.placement}  {site.evidence}")
    for finding in report.findings:  # what is wrong, and what to do about it
        print(f"{finding.code} {finding.severity}: {finding.message}. {finding.fix}")
    for unknown in report.not_checked:  # what could not be judged, and why
        print(f"{unknown.code} not checked: {unknown.why}")


if __name__ == "__main__":
    main()
