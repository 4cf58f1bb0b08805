"""One rank of two, run by ``tests.ranks``: norms of DTensors in every placement, beside a process that has all."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from normwise import kernels, layers
from tests.kernels.cpu_cases import numbers

# uneven over two ranks, where it is sharded
SHAPE = (3, 5, 8)
PLACES: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(2))


def own(mesh: Any, value: torch.Tensor, place: Placement) -> DTensor:
    return distribute_tensor(value, mesh, [place], src_data_rank=None)


def whole(value: Any) -> torch.Tensor:
    assert isinstance(value, DTensor)
    return value.full_tensor()


def check(found: Any, right: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(whole(found), right, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def layers_agree(mesh: Any) -> None:
    """Compare values and gradients, and see that sharded rows cost no communication."""
    for make, (place, upstream) in product((layers.RMSNorm, layers.LayerNorm), product(PLACES, PLACES)):
        what = f"{make.__name__}, input {place}, gradient {upstream}"
        single, many = (make(SHAPE[-1], dtype=torch.float64) for _ in range(2))
        for seed, pair in enumerate(zip(single.parameters(), many.parameters(), strict=True)):
            for parameter in pair:
                parameter.data.copy_(numbers(*parameter.shape, seed=seed))
        distribute_module(many, mesh)
        x, dy = numbers(*SHAPE, seed=5).requires_grad_(), numbers(*SHAPE, seed=6)
        y = single(x)
        y.backward(dy)
        shards = own(mesh, x.detach(), place).requires_grad_()
        assert kernels.cpu.refusal(many.spec, shards, many.weight, many.bias, None) is None, what
        with CommDebugMode() as talk:
            found = many(shards)
        if place != Shard(2):
            assert found.placements == (place,), what
            assert talk.get_total_counts() == 0, what
        found.backward(own(mesh, dy, upstream))
        check(found, y, what)
        check(shards.grad, x.grad, what)  # type: ignore[arg-type]
        for name, parameter in many.named_parameters():
            check(parameter.grad, single.get_parameter(name).grad, f"{what}, {name}")  # type: ignore[arg-type]


def sums_agree(mesh: Any) -> None:
    """Compare add + norm, its residual placed differently."""
    for place, other in product(PLACES, PLACES):
        what = f"x {place}, residual {other}"
        single, many = (layers.AddRMSNorm(SHAPE[-1], dtype=torch.float64) for _ in range(2))
        distribute_module(many, mesh)
        x, residual = (numbers(*SHAPE, seed=seed).requires_grad_() for seed in (1, 2))
        sharded = own(mesh, x.detach(), place).requires_grad_(), own(mesh, residual.detach(), other).requires_grad_()
        results: list[list[Any]] = []
        for module, tensors in ((single, (x, residual)), (many, sharded)):
            y, summed = module(*tensors)
            (y.pow(3).sum() + summed.sin().sum()).backward()
            results.append([y, summed, *(each.grad for each in (*tensors, *module.parameters()))])
        for right, found in zip(*results, strict=True):
            check(found, right, what)


def two_dimensions_agree() -> None:
    """A mesh of two axes: batch and sequence sharded at once."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    module, x = layers.RMSNorm(8, dtype=torch.float64), numbers(4, 6, 8)
    right = module(x)
    distribute_module(module, mesh)
    found = module(distribute_tensor(x, mesh, [Shard(0), Shard(1)], src_data_rank=None))
    assert found.placements == (Shard(0), Shard(1))
    check(found, right, "two axes")


def main(rank: int, world: int, folder: Path) -> None:
    """Compare, and save that all agrees as ``rank-RANK.pt``."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    layers_agree(mesh)
    sums_agree(mesh)
    two_dimensions_agree()
    torch.save("agrees", folder / f"rank-{rank}.pt")
    distributed.destroy_process_group()
