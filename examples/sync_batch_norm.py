"""One batch norm over two processes: batches of 5 and 3 samples give what one process gives for all 8.

Run it: ``python examples/sync_batch_norm.py``. It needs no GPU; the processes meet in a file.
"""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from normwise.layers import BatchNorm, SyncBatchNorm

CHANNELS, SPLIT = 4, (5, 3)


def samples() -> torch.Tensor:
    """Return the whole batch, the same in every process."""
    return torch.randn(sum(SPLIT), CHANNELS, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def work(rank: int, folder: str) -> None:
    """Normalize this process's part of the batch; each writes what it got."""
    torch.set_num_threads(1)
    place, limit = f"file://{folder}/meeting", timedelta(seconds=60)
    distributed.init_process_group("gloo", place, rank=rank, world_size=len(SPLIT), timeout=limit)
    norm = SyncBatchNorm(CHANNELS, dtype=torch.float64, timeout=60)
    x = samples().split(SPLIT)[rank].requires_grad_()
    y = norm(x)
    y.pow(3).sum().backward()
    torch.save([y.detach(), x.grad, norm.running_var], f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def main() -> None:
    """Compare two processes with one."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (folder,), nprocs=len(SPLIT))
        parts = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(len(SPLIT))]
    norm = BatchNorm(CHANNELS, dtype=torch.float64)
    x = samples().requires_grad_()
    y = norm(x)
    y.pow(3).sum().backward()
    assert x.grad is not None
    for name, ours, whole in (
        ("outputs", torch.cat([part[0] for part in parts]), y.detach()),
        ("input gradients", torch.cat([part[1] for part in parts]), x.grad),
        ("running variance", parts[1][2], norm.running_var),
    ):
        assert isinstance(whole, torch.Tensor)
        print(f"{name}: {(ours - whole).abs().max() / whole.abs().max():.0e} apart")


if __name__ == "__main__":
    main()
