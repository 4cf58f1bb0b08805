"""One rank of two, run by ``tests.ranks``: checks models whose norms agree or not, and saves what the rules said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import normwise as nw
from normwise.facts import ranks

RULES = "DST002,DST003,DST005"
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    """Return the same network on every process."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def judged(model: nn.Module) -> dict[str, Any]:
    """Return the severities of findings and why rules were not checked, by code."""
    report = nw.check(model, X, select=RULES)
    return {
        "findings": {f.code: str(f.severity) for f in report.findings},
        "not checked": {n.code: str(n.why) for n in report.not_checked},
        "unchanged": report.unchanged,
    }


def with_gradients(rank: int, *, reduced: bool) -> nn.Sequential:
    """Return the network after a backward pass on a part of the batch; only matrices are reduced, or all."""
    model = network().eval()
    model(X.chunk(2)[rank]).square().sum().backward()
    for name, parameter in model.named_parameters():
        if reduced or not name.startswith("1."):
            distributed.all_reduce(parameter.grad)
    return model


def everything(rank: int) -> dict[str, Any]:
    """Return what the rules say of each model."""
    drifted, seen, parts = network(), network(), network()
    with torch.no_grad():
        drifted.get_parameter("1.weight").add_(1e-3 * rank)
        seen.get_buffer("3.running_mean").add_(float(rank))
        for parameter in parts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rank + 7)))
    results = {name: judged(m) for name, m in {"same": network(), "drifted": drifted, "seen": seen}.items()}
    results["parts"] = judged(parts)
    results["partial"] = judged(with_gradients(rank, reduced=False))
    results["reduced"] = judged(with_gradients(rank, reduced=True))
    if rank == 0:  # the other process does not take part
        ranks.PATIENCE = 0.5
        results["alone"] = judged(network())
    distributed.barrier()
    return results


def main(rank: int, world: int, folder: Path) -> None:
    """Run and save ``rank-RANK.pt``."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    torch.save(everything(rank), folder / f"rank-{rank}.pt")
    distributed.destroy_process_group()
