"""What the user's loader yields, read at most once and never to the end of a long one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from normwise.errors import NotKnown
from normwise.facts import needs
from normwise.facts.trials import said
from normwise.graph.capture import tensors_in
from normwise.rendering import both

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Batches", "read"]

KEPT = 2  # batches that evaluation and statistics are measured on
_MIXED = 64  # samples of a batch drawn from all over the data
_STRETCHES = 8  # of a list of batches
_READ = 64  # batches read at most of a loader whose sizes follow from nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The batches of a loader.

    ``first`` holds the arguments of the model for the first few of them, as far as they can be told. ``last`` is None
    where the loader is longer than what was read of it.
    """

    sizes: tuple[int, ...]  # of the batches that were read
    last: int | None
    first: tuple[tuple[Any, ...], ...]
    mixed: tuple[Any, ...] | None  # one batch drawn from all over the data; None where the loader gives no such
    arithmetic: bool  # ``last`` follows from the lengths; it was not read

    @property
    def usual(self) -> int:
        """The size of the first batch."""
        return self.sizes[0]

    @property
    def arguments(self) -> tuple[tuple[Any, ...], ...]:
        """The arguments of the model for the first few batches.

        Raises:
            NotKnown: the batches are neither tuples nor tensors.
        """
        if not self.first:
            raise NotKnown(both("the loader yields neither tuples nor tensors", "loader 产出的既不是元组也不是张量"))
        return self.first


def read(facts: Facts) -> Batches:
    """Read the loader.

    Raises:
        NotKnown: there is none, it can be read only once, it raises, is empty, or yields no tensors.
    """
    loader = facts.target.loader
    if loader is None:
        raise NotKnown(needs.LOADER)
    if not hasattr(loader, "__iter__") or isinstance(loader, torch.Tensor | str | bytes):
        raise NotKnown(both("the loader cannot be iterated", "loader 不可迭代"))
    if hasattr(loader, "__next__"):
        raise NotKnown(
            both(
                "the loader can be read only once: pass one that can be read again",
                "loader 只能读一次：请传入可以重复读取的",
            )
        )
    wanted = max(1, len(facts.target.args))
    try:
        with _as_it_was(loader):
            return _read(loader, wanted)
    except NotKnown:
        raise
    except (Exception, SystemExit) as error:
        raise NotKnown(both(f"the loader raised {said(error)}", f"loader 抛出异常 {said(error)}")) from error


def _read(loader: Any, wanted: int) -> Batches:
    last = _last_by_arithmetic(loader)
    limit = KEPT if last is not None else _READ
    sizes, first, ended = [], [], True
    for index, batch in enumerate(loader):
        if index >= limit:
            ended = False
            break
        sizes.append(_size(batch))
        if index < KEPT and (arguments := _arguments(batch, wanted)) is not None:
            first.append(arguments)
    if not sizes:
        raise NotKnown(both("the loader is empty", "loader 为空"))
    if last is None and not ended and isinstance(loader, Sequence):
        last = _size(loader[-1])
    return Batches(
        sizes=tuple(sizes),
        last=sizes[-1] if ended else last,
        first=tuple(first),
        mixed=_mixed_if_any(loader, first[0], wanted) if first else None,
        arithmetic=last is not None and not ended,
    )


def _mixed_if_any(loader: Any, first: tuple[Any, ...], wanted: int) -> tuple[Any, ...] | None:
    try:
        return _mixed(loader, first, wanted)
    except Exception:  # samples of different lengths, or a data set that cannot be indexed
        return None


def _mixed(loader: Any, first: tuple[Any, ...], wanted: int) -> tuple[Any, ...] | None:
    """Return a batch that is no stretch of a data set sorted by class, whose statistics are those of one class."""
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
            return None
        if not isinstance(loader.sampler, SequentialSampler):
            return first if isinstance(loader.sampler, RandomSampler) else None
        total = len(loader.dataset)
        chosen = sorted({i * total // _MIXED for i in range(_MIXED)})
        batch = loader.collate_fn([loader.dataset[i] for i in chosen])
        return _arguments(batch, wanted)
    if isinstance(loader, Sequence) and len(loader) > 1:
        chosen = [loader[i] for i in sorted({i * len(loader) // _STRETCHES for i in range(_STRETCHES)})]
        parts = [p for b in chosen if (p := _arguments(b, wanted)) is not None]
        share = math.ceil(_MIXED / len(parts))
        return tuple(_joined([p[i] for p in parts], share) for i in range(len(parts[0])))
    return None


def _joined(parts: list[Any], share: int) -> Any:
    return torch.cat([p[:share] for p in parts])


def _last_by_arithmetic(loader: Any) -> int | None:
    """Return the size of the last batch as it follows from the lengths of a data set and its batches."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = loader.batch_sampler
    if type(sampler) is not BatchSampler or not isinstance(sampler.sampler, Sized):
        return None
    total, size = len(sampler.sampler), int(sampler.batch_size)
    if total < size:
        return None if sampler.drop_last else total
    rest = total - (math.ceil(total / size) - 1) * size
    return size if sampler.drop_last else rest


def _size(batch: Any) -> int:
    if isinstance(batch, dict):
        batch = list(batch.values())
    tensor = next((t for t in tensors_in(batch) if t.dim()), None)
    if tensor is None:
        raise NotKnown(both("the loader yields no tensors", "loader 产出的不是张量"))
    return tensor.shape[0]


def _arguments(batch: Any, wanted: int) -> tuple[Any, ...] | None:
    """Return the model's arguments in a batch; None where it is no tuple and no tensor, such as a dict."""
    if isinstance(batch, torch.Tensor):
        return (batch,)
    return tuple(batch[:wanted]) if isinstance(batch, Sequence) else None


@contextmanager
def _as_it_was(loader: Any) -> Iterator[None]:
    """Put back the random state that reading draws from."""
    owners = (loader, getattr(loader, "sampler", None))
    generators = [g for o in owners if isinstance(g := getattr(o, "generator", None), torch.Generator)]
    states = [(g, g.get_state()) for g in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
