"""Running statistics that a model should hold and does not, by its checkpoint, its reference or its online model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from normwise.facts.checkpoints import NormTensor, Role, State
from normwise.facts.state_dicts import held_by, same

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["LostBuffer", "lost_buffers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LostBuffer:
    """A running mean or variance that is not what it was."""

    key: str
    path: str
    live: torch.Tensor
    source: str  # what says so
    value: torch.Tensor | None  # what it was, where that is known


def lost_buffers(facts: Facts) -> tuple[LostBuffer, ...]:
    """Return the running statistics that were not restored.

    Raises:
        NotKnown: neither a checkpoint nor a load report was given.
    """
    found = facts.checkpoints
    statistics = [n for n in found.norms if n.role in (Role.MEAN, Role.VARIANCE)]
    others = [
        (source, held_by(model))
        for source, model in (("the reference", facts.target.reference), ("the online model", facts.target.online))
        if isinstance(model, nn.Module)
    ]
    return tuple(lost for n in statistics for lost in _lost(n, found.norms, found.tensors, others))


def _lost(
    norm: NormTensor,
    norms: tuple[NormTensor, ...],
    tensors: object,
    others: list[tuple[str, dict[str, torch.Tensor]]],
) -> Iterator[LostBuffer]:
    if norm.state in (State.EQUAL, State.SHIFTED) and norm.source is not None:
        return
    key = norm.source or norm.proposed
    if norm.initial and isinstance(tensors, dict) and key in tensors and not same(norm.live, tensors[key]):
        yield _made(norm, "the checkpoint", tensors[key])
        return
    if norm.state is State.DIFFERENT:
        return  # it moved on from the checkpoint: that is training
    affine = [n for n in norms if n.path == norm.path and n.role in (Role.GAIN, Role.SHIFT)]
    for source, held in others:
        there = held.get(norm.key)
        if there is not None and there.numel() == norm.live.numel():
            if not same(norm.live, there) and all(n.key in held and same(n.live, held[n.key]) for n in affine):
                yield _made(norm, source, there)
            return
    if norm.initial and any(n.state is State.EQUAL and not n.initial for n in affine):
        yield _made(norm, "training", None)


def _made(norm: NormTensor, source: str, value: torch.Tensor | None) -> LostBuffer:
    return LostBuffer(
        key=norm.key, path=norm.path, live=norm.live, source=source, value=None if value is None else value.detach()
    )
