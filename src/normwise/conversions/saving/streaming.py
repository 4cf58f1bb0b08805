"""A plan applied to a checkpoint, tensor by tensor: what will be written, made when its turn comes.

The shards of the result are those of the source, under the same names and with the same tensors in the same order; a
new tensor goes where the others of its module are. Only one tensor (and what its recipe reads) is in memory at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normwise.conversions._arithmetic import make
from normwise.conversions._edits import Untie
from normwise.conversions._plan import Plan, Recipe
from normwise.conversions.saving.checkpoint import Checkpoint, prefixes
from normwise.conversions.saving.tensors import PT, Stored, Written, code_of, dtype_of
from normwise.conversions.saving.weights import Shard, Weights
from normwise.errors import ConversionRefused

__all__ = ["stream"]

_OTHER_CLASS = "plan the class that config.json names"


def stream(plan: Plan, checkpoint: Checkpoint, model: nn.Module) -> Weights:
    """Return the converted tensors of a checkpoint, not yet made.

    Args:
        plan: of ``model``.
        checkpoint: its weights.
        model: it needs no storage (``targets.hf_build.build_fake``); only its names are read.

    Raises:
        ConversionRefused: the checkpoint is of another model, or its names are not those of this one.
    """
    names = _Names(plan, checkpoint, model)
    written: dict[str, Written] = {}
    for recipe in plan.recipes:
        stored = [names.of(key) for key in recipe.keys if names.of(key) in checkpoint.tensors]
        new = recipe.shape is not None or recipe.start is not None
        keys = [names.of(key) for key in recipe.keys] if new else stored
        written.update(dict.fromkeys(keys, _written(recipe, checkpoint, names)))
    for key, source in names.copies().items():
        written.setdefault(key, written.get(source) or Written.copied(checkpoint.tensors[source]))
    dropped = {names.of(key) for key in plan.dropped}
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


class _Names:
    """The names of a model's tensors in a checkpoint: a prefix more or less, one of several where they are tied."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint, model: nn.Module) -> None:
        self.plan, self.held = plan, checkpoint.tensors
        self.model_keys = model.state_dict().keys() | {key for keys in plan.ties for key in keys}
        self.tied = {key: keys for keys in plan.ties for key in keys}
        self.added, self.taken = "", ""
        fitting = [each for each in prefixes(model) if self._fits(*each)]
        if not fitting:
            raise ConversionRefused([self._stranger()])
        self.added, self.taken = fitting[0]
        self._check_same_model(model)

    def of(self, key: str) -> str:
        """Return the name that a tensor of the model has in the checkpoint, or would have."""
        return self.added + key.removeprefix(self.taken)

    def stored(self, key: str) -> Stored:
        """Return where a tensor of the model lies, perhaps under the name it is tied to."""
        names = [self.of(each) for each in (key, *self.tied.get(key, ()))]
        return self.held[next(name for name in names if name in self.held)]

    def copies(self) -> dict[str, str]:
        """Return the tensors that appear as they are elsewhere; where nothing is tied any more, each is stored."""
        found = {key: source for edit in self.plan.edits for key, source in edit.copies.items()}
        if any(isinstance(edit, Untie) for edit in self.plan.edits):
            found |= {key: key for keys in self.plan.ties for key in keys if key not in found}
        names = {self.of(key): self.stored(source) for key, source in found.items()}
        by_place = {id(stored): name for name, stored in self.held.items()}
        return {name: by_place[id(stored)] for name, stored in names.items() if name not in self.held}

    def _needed(self) -> set[str]:
        read = {key for recipe in self.plan.recipes for step in recipe.steps for key in step.reads}
        read |= {recipe.start or recipe.keys[0] for recipe in self.plan.recipes if recipe.shape is None}
        return read | {source for edit in self.plan.edits for source in edit.copies.values()} | set(self.plan.dropped)

    def _fits(self, added: str, taken: str) -> bool:
        self.added, self.taken = added, taken
        return all(self._has(key) for key in self._needed() or self.model_keys)

    def _has(self, key: str) -> bool:
        return any(self.of(each) in self.held for each in (key, *self.tied.get(key, ())))

    def _stranger(self) -> str:
        self.added, self.taken = "", ""
        missing = sorted(key for key in self._needed() or self.model_keys if not self._has(key))
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return (
            f"{missing[0]}{more}: the checkpoint has no tensor of this name, its first is {next(iter(self.held), '-')};"
            " load the model, convert it in memory and save that: nw.convert(NAME, TARGET).save(OUT)"
        )

    def _check_same_model(self, model: nn.Module) -> None:
        """Refuse tensors of modules that the plan did not see: they could read or share what is changed."""
        modules = {self.of(path) for path, _ in model.named_modules(remove_duplicate=False)}
        known = {self.of(key) for key in self.model_keys}
        ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        for key in self.held.keys() - known:
            leftover = key.rpartition(".")[0] in modules or any(pattern.search(key) for pattern in ignored)
            if not leftover:
                made_of = f"{type(model).__name__}, of which the plan was made, does not"
                raise ConversionRefused([f"{key}: the checkpoint holds it and {made_of}; {_OTHER_CLASS}"])
        config, embedding = getattr(model, "config", None), _input_embedding(model)
        may_share = self.added and getattr(config, "tie_word_embeddings", True)
        if may_share and any(embedding & set(recipe.keys) for recipe in self.plan.recipes):
            around = f"the checkpoint is of a model around {type(model).__name__}, whose head may share this tensor"
            raise ConversionRefused([f"{min(embedding)}: {around}; {_OTHER_CLASS}"])


def _input_embedding(model: nn.Module) -> set[str]:
    getter = getattr(model, "get_input_embeddings", None)
    module = getter() if getter else None
    weight = getattr(module, "weight", None)
    return {key for key, each in model.named_parameters(remove_duplicate=False) if each is weight}


def _written(recipe: Recipe, checkpoint: Checkpoint, names: _Names) -> Written:
    if recipe.shape is None:
        like = names.stored(recipe.start or recipe.keys[0])
        dtype, shape = dtype_of(like.dtype), like.shape
    else:
        assert recipe.dtype is not None
        sibling = checkpoint.tensors.get(names.of(f"{recipe.keys[0].rpartition('.')[0]}.weight"))
        dtype = dtype_of(sibling.dtype) if sibling else getattr(torch, recipe.dtype)
        recipe, shape = replace(recipe, dtype=str(dtype).removeprefix("torch.")), recipe.shape
    code_of(dtype)
    return Written.made(dtype, shape, lambda: make(recipe, lambda key: names.stored(key).load()))


def _kept(file: Path, checkpoint: Checkpoint, made: Mapping[str, Written], dropped: set[str]) -> dict[str, Written]:
    there = {key: stored for key, stored in checkpoint.tensors.items() if stored.file == file and key not in dropped}
    return {key: made.get(key) or Written.copied(stored) for key, stored in there.items()}


def _home(key: str, checkpoint: Checkpoint) -> Path:
    """Return the shard that holds the nearest relatives of a tensor."""
    words = key.split(".")

    def shared(other: str) -> int:
        theirs: Iterable[Any] = zip(words, other.split("."), strict=False)
        return next((n for n, (a, b) in enumerate(theirs) if a != b), len(words))

    return checkpoint.tensors[max(checkpoint.tensors, key=shared)].file
