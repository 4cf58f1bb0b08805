"""Which tensor of a checkpoint is which tensor of a model.

transformers renames while it loads: a prefix more or less between a base model and one with a head, names of older
versions, experts that are merged into one tensor. Its own rules are asked, so that both agree.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from normwise.conversions.saving.output import is_transformers
from normwise.errors import ConversionRefused

__all__ = ["Names", "StoredOtherwise"]

_Rename = Callable[[str], tuple[str, bool]]
_OTHER_CLASS = "plan the class that config.json names"


class StoredOtherwise(ConversionRefused):
    """A tensor that the checkpoint does not store as the model holds it; converting the loaded model still works."""


class Names:
    """The names that a checkpoint gives the tensors of a model.

    Args:
        keys: of the checkpoint.
        model: it needs no storage.
        ties: names in the model of one tensor, of which the checkpoint may hold one only.
    """

    def __init__(self, keys: Iterable[str], model: nn.Module, ties: Iterable[Sequence[str]] = ()) -> None:
        self.model = model
        self.rename = _renaming(model)
        self.tied = {key: group for group in ties for key in group}
        known = model.state_dict().keys() | self.tied.keys()
        self.stored: dict[str, str] = {}  # of the model -> of the checkpoint
        self.merged: set[str] = set()  # tensors of the model that are stored in parts
        self.strange: list[str] = []  # of the checkpoint, without a place in the model
        for key in keys:
            name, part = self.rename(key)
            if name not in known:
                self.strange.append(key)
            elif part:
                self.merged.add(name)
            else:
                self.stored[name] = key

    def find(self, key: str) -> str:
        """Return the name under which a tensor is stored, perhaps as another one that it is tied to.

        Raises:
            StoredOtherwise: it is not stored, or in parts.
        """
        found = next((self.stored[each] for each in (key, *self.tied.get(key, ())) if each in self.stored), None)
        if found is not None:
            return found
        why = "the checkpoint has no tensor of this name"
        if key in self.merged:
            why = "the checkpoint stores this tensor in parts, which transformers merges as it loads"
        save = "convert the loaded model and save that: nw.convert(NAME, TARGET).save(OUT)"
        raise StoredOtherwise([f"{key}: {why}; {save}"])

    def name(self, key: str) -> str:
        """Return the name of a tensor in the checkpoint, also of one that is not there yet."""
        if key in self.stored:
            return self.stored[key]
        module, _, last = key.rpartition(".")
        siblings = [f"{stored.rpartition('.')[0]}.{last}" for name, stored in self.stored.items()
                    if name.rpartition(".")[0] == module]  # fmt: skip
        return next((name for name in siblings if self.rename(name) == (key, False)), key)

    def check_same_model(self, changed: Iterable[str]) -> None:
        """Refuse a checkpoint with modules that the model lacks: they could read or share what is changed.

        Args:
            changed: names in the model of the tensors that change.

        Raises:
            ConversionRefused: it has such modules, or may have a head that shares the embedding.
        """
        lacks = f"{type(self.model).__name__}, of which the plan was made, does not"
        for key in self.strange:
            if not self._leftover(key):
                raise ConversionRefused([f"{key}: the checkpoint holds it and {lacks}; {_OTHER_CLASS}"])
        base = getattr(self.model, "base_model_prefix", "")
        around = base and any(stored == f"{base}.{name}" for name, stored in self.stored.items())
        if around and getattr(getattr(self.model, "config", None), "tie_word_embeddings", True):
            for key in sorted(_input_embedding(self.model) & set(changed)):
                head = (
                    f"the checkpoint is of a model around {type(self.model).__name__}, whose head may share this tensor"
                )
                raise ConversionRefused([f"{key}: {head}; {_OTHER_CLASS}"])

    def _leftover(self, key: str) -> bool:
        """Tell whether a tensor is one that its module once had, such as the causal mask of an attention."""
        ignored = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        base = getattr(self.model, "base_model_prefix", "")
        parent = self.rename(key)[0].rpartition(".")[0]
        modules = {path for path, _ in self.model.named_modules(remove_duplicate=False)}
        within = bool(modules & {parent, f"{base}.{parent}", parent.removeprefix(f"{base}.")})
        return within or any(re.search(pattern, key) for pattern in ignored)


def _renaming(model: nn.Module) -> _Rename:
    """Return what tells the name in the model of a key, and whether it is only a part of that tensor."""
    if not is_transformers(model):
        return lambda key: (key, False)
    loading = importlib.import_module("transformers.core_model_loading")
    mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    held, prefix = model.state_dict(), model.base_model_prefix

    def rename(key: str) -> tuple[str, bool]:
        name, part = loading.rename_source_key(key, renamings, converters, prefix, held)
        if name not in held and key in held:
            return key, False
        return name, part is not None

    return rename


def _input_embedding(model: nn.Module) -> set[str]:
    getter = getattr(model, "get_input_embeddings", None)
    weight = getattr(getter() if getter else None, "weight", None)
    return {key for key, each in model.named_parameters(remove_duplicate=False) if each is weight}
