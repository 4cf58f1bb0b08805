"""A plan applied to a checkpoint, tensor by tensor: what will be written, made when its turn comes.

The shards of the result are those of the source, under the same names and with the same tensors in the same order; a
new tensor goes where the others of its module are. Only one tensor (and what its recipe reads) is in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from normwise.conversions._arithmetic import make
from normwise.conversions._edits import Untie
from normwise.conversions._plan import Plan, Recipe
from normwise.conversions.saving.checkpoint import Checkpoint
from normwise.conversions.saving.names import Names
from normwise.conversions.saving.tensors import PT, Stored, Written, dtype_of, numbers
from normwise.conversions.saving.weights import Shard, Weights

__all__ = ["stream"]

_ROWWISE = ("centre", "scale", "add_number")  # where they go along the last axis
_BLOCK = 1 << 22  # numbers that are made at once


def stream(plan: Plan, checkpoint: Checkpoint, model: nn.Module) -> Weights:
    """Return the converted tensors of a checkpoint, not yet made.

    Args:
        plan: of ``model``.
        checkpoint: its weights.
        model: it needs no storage (``targets.hf_build.build_fake``); only its names are read.

    Raises:
        ConversionRefused: the checkpoint is of another model, or stores a tensor in another form.
    """
    names = Names(checkpoint.tensors, model, plan.ties)
    names.check_same_model(key for recipe in plan.recipes for key in recipe.keys)
    written: dict[str, Written] = {}
    for recipe in plan.recipes:
        there = [names.stored[key] for key in recipe.keys if key in names.stored]
        new = recipe.shape is not None or recipe.start is not None
        keys = [names.name(key) for key in recipe.keys] if new else there
        written.update(dict.fromkeys(keys, _written(recipe, checkpoint, names)))
    for edit in plan.edits:
        for key, source in edit.copies.items():
            written.setdefault(names.name(key), Written.copied(checkpoint.tensors[names.find(source)]))
    if any(isinstance(edit, Untie) for edit in plan.edits):
        _store_each(plan, names, checkpoint, written)
    dropped = {names.name(key) for key in plan.dropped}
    shards = {file: _kept(file, checkpoint, written, dropped) for file in checkpoint.files}
    for key in written.keys() - checkpoint.tensors.keys():
        shards[_home(key, checkpoint)][key] = written[key]
    return Weights(
        shards=tuple(
            Shard(name=file.name, tensors=tensors, metadata=checkpoint.files[file] or PT)
            for file, tensors in shards.items()
        ),
        index_name=checkpoint.index_file.name if checkpoint.index_file else None,
        index=checkpoint.index or {},
    )


def _store_each(plan: Plan, names: Names, checkpoint: Checkpoint, written: dict[str, Written]) -> None:
    """Store a tensor under every name it has: where one is untied, the configuration ties none."""
    for key in (key for group in plan.ties for key in group):
        if key not in names.stored:
            source = names.find(key)
            written.setdefault(names.name(key), written.get(source) or Written.copied(checkpoint.tensors[source]))


def _written(recipe: Recipe, checkpoint: Checkpoint, names: Names) -> Written:
    for key in (key for step in recipe.steps for key in step.reads):
        names.find(key)  # refuse now what could not be read later
    if recipe.shape is None:
        like = checkpoint.tensors[names.find(recipe.start or recipe.keys[0])]
        dtype, shape = dtype_of(like.dtype), like.shape
        if _by_rows(recipe, shape):
            pieces = partial(_row_by_row, recipe, like, lambda key: checkpoint.load(names.find(key)))
            return Written(dtype=like.dtype, shape=shape, size=like.size, pieces=pieces)
    else:
        assert recipe.dtype is not None
        sibling = checkpoint.tensors.get(names.stored.get(f"{recipe.keys[0].rpartition('.')[0]}.weight", ""))
        dtype = dtype_of(sibling.dtype) if sibling else getattr(torch, recipe.dtype)
        recipe, shape = replace(recipe, dtype=str(dtype).removeprefix("torch.")), recipe.shape
    return Written.made(dtype, shape, lambda: make(recipe, lambda key: checkpoint.load(names.find(key))))


def _by_rows(recipe: Recipe, shape: tuple[int, ...]) -> bool:
    """Tell whether the rows of a tensor can be made one after the other: embeddings are the largest tensors."""
    last = (-1, len(shape) - 1)
    along = (step.numbers.get("dim", -1) in last for step in recipe.steps)
    own = recipe.start or recipe.keys[0]
    if any(own in step.reads for step in recipe.steps):
        return False
    return len(shape) > 1 and all(along) and all(step.function in _ROWWISE for step in recipe.steps)


def _row_by_row(recipe: Recipe, stored: Stored, read: Callable[[str], torch.Tensor]) -> Iterator[memoryview]:
    own, further = recipe.start or recipe.keys[0], {key for step in recipe.steps for key in step.reads}
    held = {key: read(key) for key in further}
    step = max(1, _BLOCK * stored.shape[0] // max(1, torch.Size(stored.shape).numel()))
    for first in range(0, stored.shape[0], step):
        rows = stored.rows(first, min(first + step, stored.shape[0]))
        yield from numbers(make(recipe, lambda key, rows=rows: held[key] if key != own else rows.load()))


def _kept(file: Path, checkpoint: Checkpoint, made: Mapping[str, Written], dropped: set[str]) -> dict[str, Written]:
    there = {key: stored for key, stored in checkpoint.tensors.items() if stored.file == file and key not in dropped}
    return {key: made.get(key) or Written.copied(stored) for key, stored in there.items()}


def _home(key: str, checkpoint: Checkpoint) -> Path:
    """Return the shard that holds the nearest relatives of a tensor."""
    words = key.split(".")

    def shared(other: str) -> int:
        pairs = zip(words, other.split("."), strict=False)
        return next((n for n, (mine, its) in enumerate(pairs) if mine != its), len(words))

    return checkpoint.tensors[max(checkpoint.tensors, key=shared)].file
