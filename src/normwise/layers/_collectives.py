"""Collectives that can be differentiated as often as torch can, and that give up with a message.

What is differentiated is the sum of the losses of all ranks: the gradient of a gather is the sum over ranks of
what each of them wants of a row, and the sum over ranks is its own adjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

__all__ = ["Ranks", "gather", "ranks_of"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that take part, and how a collective speaks of itself when one of them does not."""

    group: distributed.ProcessGroup
    timeout: float | None  # seconds; None is the group's own
    who: str

    @property
    def size(self) -> int:
        """Return how many ranks there are."""
        return distributed.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Return the place of this process in the group."""
        return distributed.get_rank(self.group)

    def run(self, start: Callable[[timedelta | None], Any], what: str) -> None:
        """Run a collective to its end.

        Raises:
            RuntimeError: a rank did not take part in time, or is gone.
        """
        try:
            start(None if self.timeout is None else timedelta(seconds=self.timeout)).wait()
        except RuntimeError as error:
            limit = "the group's timeout" if self.timeout is None else f"timeout={self.timeout:g} s"
            raise RuntimeError(
                f"{self.who} could not {what} over its group of {self.size} ranks within {limit} (this is rank "
                f"{self.rank}): {error}\nEvery rank must call the layer, and backward through it, the same number "
                "of times: check for ranks with fewer batches, with a branch not taken, or with another mode; "
                "an empty batch [0, C, *] counts as a call"
            ) from error


def ranks_of(group: distributed.ProcessGroup | None, timeout: float | None, who: str) -> Ranks | None:
    """Return the ranks of ``group`` (None: all), or None where there is no other rank to speak to.

    Raises:
        ValueError: this process is not in the group.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    ranks = Ranks(group or distributed.group.WORLD, timeout, who)  # type: ignore[arg-type]
    if ranks.rank < 0:
        raise ValueError(
            f"{who} synchronizes over a process group that rank {distributed.get_rank()} is not in; "
            "give each rank the group it belongs to"
        )
    return ranks if ranks.size > 1 else None


def gather(row: torch.Tensor, ranks: Ranks, anchor: torch.Tensor | None = None) -> torch.Tensor:
    """Return the rows of all ranks, [ranks, K], from one all_gather.

    Args:
        row: [K], the same K and dtype on every rank.
        ranks: who takes part.
        anchor: where it requires gradients, the backward pass comes through here (one all_reduce) even if
            ``row`` requires none, so that ranks whose inputs differ in that still agree.
    """
    if torch.compiler.is_compiling():
        # Of a graph only this can be part; differentiable once, as compiled graphs are, and without an anchor.
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        return all_gather_tensor_autograd(row, 0, ranks.group).unflatten(0, (ranks.size, -1))
    return _Gather.apply(row, anchor, ranks)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: torch.Tensor, anchor: torch.Tensor | None, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        rows = row.new_empty((ranks.size, *row.shape))
        row = row.contiguous()
        ranks.run(lambda limit: ranks.group.allgather(list(rows), row, limit), "gather statistics")
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Sum.apply(grads[0], ctx.ranks)[ctx.ranks.rank], None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        total = rows.clone(memory_format=torch.contiguous_format)  # an incoming gradient is never written to
        add = distributed.ReduceOp.SUM
        ranks.run(lambda limit: ranks.group.allreduce(total, add, limit), "sum gradients")
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.apply(grads[0], ctx.ranks), None
