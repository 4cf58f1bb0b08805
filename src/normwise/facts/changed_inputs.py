"""Inputs with some samples or some steps replaced by others, of which the rest of the model must know nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from normwise.facts.masks import mask_like
from normwise.targets import inputs
from normwise.targets.target import Target

__all__ = ["Call", "Sequence", "is_mask", "replaced", "sequences"]

Call = inputs.Call


@dataclass(frozen=True, slots=True)
class Sequence:
    """Inputs that are replaced together, step by step."""

    steps: int
    tensors: frozenset[int]  # by id()


def sequences(target: Target) -> tuple[Sequence, ...]:
    """Return the sequences of at least two steps among the inputs: those of one length as one, then each alone.

    There are several where an encoder and a decoder read one each; which is which no name says.
    """
    lengths: dict[int, list[int]] = {}
    for tensor in inputs.tensors_of(target):
        axis = inputs.axis_of(target, "time", tensor)
        if axis is not None and tensor.shape[axis] > 1 and not is_mask(tensor):
            lengths.setdefault(tensor.shape[axis], []).append(id(tensor))
    together = [Sequence(n, frozenset(tensors)) for n, tensors in lengths.items()]
    alone = [Sequence(n, frozenset({t})) for n, tensors in lengths.items() if len(tensors) > 1 for t in tensors]
    return (*together, *alone)


def replaced(target: Target, along: str, where: slice, only: Collection[int] | None = None) -> Call | None:
    """Return one call's inputs with a part of every one replaced, masks apart; None where no other values are at hand.

    Integers are exchanged for others of the same input, so that a token stays one of the vocabulary.

    Args:
        target: a model with its inputs.
        along: the axis, "batch" or "time".
        where: the samples or steps to replace.
        only: the inputs that are replaced, by ``id``; None: all that have the axis.
    """
    moved = False

    def change(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal moved
        axis = inputs.axis_of(target, along, tensor)
        if axis is None or is_mask(tensor) or (only is not None and id(tensor) not in only):
            return tensor
        for other in _others(tensor.detach(), axis):
            new = tensor.detach().clone()
            index = (slice(None),) * axis + (where,)
            new[index] = other[index].to(new.dtype)
            if not torch.equal(new, tensor):
                moved = True
                return new
        return tensor

    call = inputs.map_tensors(target.args, change), inputs.map_tensors(dict(target.kwargs), change)
    return call if moved else None


def _others(tensor: torch.Tensor, axis: int) -> Iterator[torch.Tensor]:
    """Yield tensors of other values in the same places: turned around, along the axis or another one."""
    axes = [axis, *(a for a in range(tensor.ndim) if a != axis)]
    for each in axes:
        turned = tensor.flip(each)
        turned = torch.where(turned == tensor, tensor.roll(1, each), turned)  # what stands in the middle
        if tensor.is_floating_point():
            # another scale and another mean as well: a norm must not make the same of it
            turned = 1.7 * turned.roll(1, axes[-1]) + 0.5 * (tensor.float().abs().mean().to(tensor) + 0.1)
        yield turned


def is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds truth values, or integers that are all 0 or 1."""
    if tensor.dtype is torch.bool:
        return True
    if tensor.is_floating_point():
        return mask_like(tensor)
    return bool(((tensor == 0) | (tensor == 1)).all())
