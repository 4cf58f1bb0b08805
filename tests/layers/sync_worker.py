"""One rank of a group: runs every scenario of its world size, and what must fail, and saves what came out.

Run by ``tests.ranks``; ``compiled`` runs the slow part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from normwise.layers._collectives import Ranks
from normwise.layers.statistics import update_statistics
from normwise.layers.sync_batch_norm import SyncBatchNorm
from tests.layers.sync_scenarios import CHANNELS, SCENARIOS, Scenario, train

PATIENCE = 2.0  # seconds


def scenario_result(scenario: Scenario, rank: int) -> dict[str, torch.Tensor]:
    """Return what this rank gets."""
    groups = {members: distributed.new_group(list(members)) for members in scenario.groups}
    own: Any = groups.get(scenario.members(rank))
    half = scenario.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if half else scenario.dtype
    layer = SyncBatchNorm(CHANNELS, process_group=own, dtype=dtype, timeout=30, **scenario.options)
    return train(scenario, layer, (rank,))


def ddp_model() -> nn.Module:
    """Return the same small network on every process."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2), nn.BatchNorm1d(2)).double()
    return SyncBatchNorm.convert(net)


def ddp_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs and targets of two steps on all processes."""
    random = torch.Generator().manual_seed(4)
    sizes = ((12, 4), (12, 2))
    return [
        (torch.randn(sizes[0], generator=random).double(), torch.randn(sizes[1], generator=random).double())
        for _ in range(3)
    ]


def ddp_steps(model: nn.Module, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Train a few steps on a part of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, target in ddp_batches():
        optimizer.zero_grad()
        (model(part(x)) - part(target)).pow(2).mean().backward()
        optimizer.step()


def wrapped(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Return parameters and buffers after training under DDP."""
    model = DistributedDataParallel(ddp_model())
    ddp_steps(model, lambda whole: whole.chunk(world)[rank])
    return {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}


def recalibrated(rank: int) -> dict[str, torch.Tensor]:
    """Return statistics pooled over batches of uneven sizes on every process (fvcore #152)."""
    model = ddp_model()
    update_statistics(model, recalibration_batches(rank))
    return {name: value.clone() for name, value in model.state_dict().items()}


def recalibration_batches(rank: int) -> list[torch.Tensor]:
    """Return what rank 0 or 1 has to recalibrate with."""
    random = torch.Generator().manual_seed(5)
    whole = torch.randn(31, 4, generator=random).double() * 3 + 1
    parts = whole.split([7, 3, 1, 12, 8, 0])
    return [parts[step * 2 + rank] for step in range(3)]


def batches_alone(rank: int) -> list[torch.Tensor]:
    """Return two batches for rank 0 and one for rank 1, none of a single sample: torch's norms refuse those."""
    return [batch for batch in recalibration_batches(rank) if len(batch) > 1][: 2 - rank]


def recalibrated_alone(rank: int) -> dict[str, torch.Tensor]:
    """Return statistics of a norm that does not synchronize, from unequally many batches on the ranks."""
    norm = nn.BatchNorm1d(4).double()
    update_statistics(norm, batches_alone(rank), process_group=distributed.group.WORLD)
    return {"running_mean": norm.get_buffer("running_mean"), "running_var": norm.get_buffer("running_var")}


def counted() -> dict[str, list[str]]:
    """Return the collectives of one forward and of one backward pass."""
    started: list[str] = []
    run = Ranks.run

    def counting(self: Ranks, start: Callable[..., Any], what: str) -> None:
        started.append(what)
        run(self, start, what)

    Ranks.run = counting
    try:
        y = SyncBatchNorm(CHANNELS)(torch.ones(2, CHANNELS, requires_grad=True))
        forward = list(started)
        y.sum().backward()
    finally:
        Ranks.run = run
    return {"forward": forward, "backward": started[len(forward) :]}


def first_layer(rank: int) -> dict[str, torch.Tensor]:
    """Return the gradient of a gain where the input of rank 0 requires gradients and that of rank 1 does not."""
    norm = SyncBatchNorm(CHANNELS, dtype=torch.float64, timeout=30)
    x = torch.arange(4.0 * CHANNELS).reshape(4, CHANNELS).double().requires_grad_(rank == 0)
    norm(x).pow(2).sum().backward()
    weight = norm.get_parameter("weight")
    assert weight.grad is not None
    return {"weight gradient": weight.grad, "other": torch.zeros(()) if x.grad is None else x.grad}


def compiled(rank: int) -> dict[str, Any]:
    """Return what a compiled layer gives over steps of many batch sizes, and how many graphs that took."""
    scenario = SCENARIOS["many sizes"]
    layer = SyncBatchNorm(CHANNELS, dtype=scenario.dtype)
    result = train(scenario, layer, (rank,), torch.compile(layer, fullgraph=True, backend="aot_eager"))
    return {"result": result, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def calls(forwards: int, backwards: int, group: distributed.ProcessGroup) -> None:
    """Call a layer and go back through it, as often as said."""
    layer = SyncBatchNorm(CHANNELS, process_group=group, timeout=PATIENCE)
    outputs = [layer(torch.ones(4, CHANNELS, requires_grad=True)) for _ in range(forwards)]
    for output in outputs[:backwards]:
        output.sum().backward()


def disagreeing(rank: int, folder: Path, forwards: tuple[int, int], backwards: tuple[int, int]) -> dict[str, Any]:
    """Return what rank 0 is told, and after how many seconds, when it calls more often than rank 1."""
    group = distributed.new_group([0, 1])
    assert isinstance(group, distributed.ProcessGroup)
    over = folder / f"over-{forwards}-{backwards}"
    message, start = "", time.monotonic()
    try:
        calls(forwards[rank], backwards[rank], group)
    except RuntimeError as error:
        message = str(error)
    seconds = time.monotonic() - start
    if rank == 0:
        over.touch()
    while not over.exists():  # stays, so that rank 0 meets silence and not a closed connection
        time.sleep(0.05)
    return {"message": message, "seconds": seconds}


def everything(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Return the results of all that is not slow."""
    mine = {name: scenario for name, scenario in SCENARIOS.items() if scenario.world == world}
    results: dict[str, Any] = {name: scenario_result(scenario, rank) for name, scenario in mine.items()}
    results["DDP"] = wrapped(rank, world)
    if world == 2:
        results["recalibrated"] = recalibrated(rank)
        results["recalibrated alone"] = recalibrated_alone(rank)
        results["collectives"] = counted()
        results["first layer"] = first_layer(rank)
        results["fewer forward passes"] = disagreeing(rank, folder, (2, 1), (0, 0))
        results["fewer backward passes"] = disagreeing(rank, folder, (1, 1), (1, 0))
    return results


def main(rank: int, world: int, folder: Path, what: str = "everything") -> None:
    """Run and save ``rank-RANK.pt``."""
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    results = compiled(rank) if what == "compiled" else everything(rank, world, folder)
    torch.save(results, folder / f"rank-{rank}.pt")
    distributed.destroy_process_group()
