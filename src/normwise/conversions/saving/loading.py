"""Loads what a conversion saved: the stock class with the edits of the plan, strictly; no code of a folder is run."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normwise.conversions._apply import tensors_of
from normwise.conversions._edits import Edit
from normwise.conversions._plan import Plan
from normwise.conversions.saving.checkpoint import Checkpoint
from normwise.conversions.saving.names import Names
from normwise.errors import TargetError

__all__ = ["MANIFEST", "VARIANT", "load", "load_edited", "load_pretrained", "read_manifest"]

MANIFEST = "normwise.json"
VARIANT = "normwise"  # of the weight files: the stock class must not find them


def load(path: str | Path, model: nn.Module | None = None, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Load a folder that ``Converted.save(path, "manifest")`` or ``normwise convert`` wrote.

    Args:
        path: the folder.
        model: of the original class, where that is not one of transformers; a copy of it is changed.
        dtype: of the parameters; as they are stored by default.

    Returns:
        The converted model in eval mode.

    Raises:
        TargetError: the folder has no manifest, or its tensors are not exactly those of the converted model.
        TypeError: a model of one's own was converted, and none was given.
    """
    folder = Path(path).expanduser()
    manifest = read_manifest(folder)
    if manifest is None:
        raise TargetError(f"{folder}: there is no {MANIFEST} here; a transformers folder is opened by transformers")
    if manifest.get("schema") != 1:
        raise TargetError(f"{folder / MANIFEST}: schema {manifest.get('schema')!r} is of a newer normwise")
    plan = Plan.from_json(manifest["plan"])
    base = _class(folder, manifest) if model is None else model
    made = load_edited(base, plan.edits, folder, variant=VARIANT)
    return made.eval() if dtype is None else made.to(dtype).eval()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder, None where it has none.

    Raises:
        TargetError: it cannot be read.
    """
    file = folder / MANIFEST
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("plan"), dict):
            return found
    except ValueError as error:
        raise TargetError(f"{file}: the manifest cannot be read: {error}") from error
    raise TargetError(f"{file}: this is no manifest, it holds no plan")


def _class(folder: Path, manifest: dict[str, Any]) -> type[nn.Module]:
    name, library = manifest.get("class"), manifest.get("library")
    if library != "transformers":
        raise TypeError(
            f"{folder}: a {name} was converted, which is your own class: load(PATH, model) takes a fresh one"
        )
    import transformers

    cls = getattr(transformers, str(name), None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise TargetError(f"{folder}: transformers {transformers.__version__} has no model class {name!r}")
    return cls


def load_edited(
    base: type[nn.Module] | nn.Module, edits: Iterable[Edit], folder: Path | None, **options: Any
) -> nn.Module:
    """Load the weights of a folder into a class, or into a copy of a model, after the edits of its modules.

    Args:
        base: a class of transformers, or a model of one's own.
        edits: of the plan.
        folder: with the weights; None where ``options`` have them as ``state_dict`` and ``config``.
        options: of ``from_pretrained``.

    Raises:
        TargetError: the tensors are not exactly those of the edited model.
    """
    edits = tuple(edits)
    if isinstance(base, nn.Module):
        model = copy.deepcopy(base)
        try:
            for edit in edits:
                edit.apply(model)
        except (AttributeError, TypeError, ValueError) as error:
            unlike = f"the model given, a {type(model).__name__}, is not built as the one that was converted"
            raise TargetError(f"{folder}: {unlike}: {error}; build it as it was then") from error
        assert folder is not None
        _load_tensors(model, Checkpoint.open(folder))
        return model

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        for edit in edits:
            edit.apply(self)

    # Of the same name and module: transformers looks up by them how old checkpoints are to be read.
    edited = type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__})
    model = load_pretrained(edited, folder, **options)
    model.__class__ = base  # the edits are in the instance
    return model


def load_pretrained(cls: type[nn.Module], folder: Path | None, **options: Any) -> nn.Module:
    """Load a transformers folder strictly.

    Raises:
        TargetError: a tensor is missing, has no place, or another shape.
    """
    from normwise.targets.hf_build import quiet

    with quiet():
        model, info = cls.from_pretrained(  # type: ignore[attr-defined]
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
        )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            raise TargetError(f"{folder}: {what.replace('_', ' ')} on reload, for example {next(iter(info[what]))}")
    for tensor in {id(t): t for t in tensors_of(model).values()}.values():
        tensor.data = tensor.data.clone()  # no view of the file: that may change, and its alignment changes last bits
    return model.eval()


def _load_tensors(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put the tensors of a checkpoint into a model; of a tied tensor one name is enough.

    Raises:
        TargetError: they are not exactly those of the model.
    """
    held = model.state_dict().keys()
    everything = tensors_of(model)
    names = Names(checkpoint.tensors, model)
    if strange := [*sorted(names.strange), *sorted(names.merged)]:
        raise TargetError(f"{checkpoint.given}: the model has no tensor {strange[0]}")
    filled = {id(everything[key]) for key in names.stored}
    if lost := sorted(key for key in held if key in everything and id(everything[key]) not in filled):
        raise TargetError(f"{checkpoint.given}: the tensor {lost[0]} is missing")
    with torch.no_grad():
        for key, name in names.stored.items():
            stored = checkpoint.tensors[name]
            if (shape := tuple(everything[key].shape)) != stored.shape:
                raise TargetError(f"{checkpoint.given}: {key} has shape {stored.shape}, the model's has {shape}")
            everything[key].copy_(stored.load())
