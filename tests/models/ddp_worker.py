"""One rank of a group, run by ``tests.ranks``: gradients of every kind of model and some placements under DDP."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tests.models.small import KINDS, PLACEMENTS, gradients, ids, loss, small


def gradients_of(kind: str, placement: str, rank: int, world: int) -> dict[str, torch.Tensor]:
    """Return what this process has after a backward pass on its part of the batch."""
    model = small(kind, placement)
    wrapped = DistributedDataParallel(model)  # named: what it does to gradients ends with it
    loss(wrapped(*(each.chunk(world)[rank] for each in ids(kind)))).backward()
    return gradients(model)


def main(rank: int, world: int, folder: Path) -> None:
    """Run and save ``rank-RANK.pt``."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    every = [(kind, placement) for kind in KINDS for placement in PLACEMENTS]
    torch.save({each: gradients_of(*each, rank, world) for each in every}, folder / f"rank-{rank}.pt")
    distributed.destroy_process_group()
