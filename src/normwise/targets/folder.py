"""A transformers model in a local folder: hf:DIR, with config.json and safetensors.

Only config.json and safetensors are read; a pickle (.bin, .pt) is never loaded and code in the folder, or on a hub
that config.json names, is never run. The files that transformers is about to read are read by ``checkpoint`` first:
transformers follows an index to any path and unpickles what it finds there. A folder with a configuration alone is
examined without real weights, and the report says so.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from normwise.errors import CheckpointError, TargetError
from normwise.rendering import clean
from normwise.targets.checkpoint.limits import CONFIG_BYTES, broken
from normwise.targets.checkpoint.places import config_beside, open_source
from normwise.targets.checkpoint.sources import INDEX, SUFFIX
from normwise.targets.hf_build import (
    build_fake,
    build_model,
    count_numbers,
    library,
    model_class,
    model_named,
    model_types,
    quiet,
)
from normwise.targets.hf_inputs import find_inputs, generated_inputs, one_line
from normwise.targets.target import InputsFrom, Target, Weights

__all__ = ["EXAMPLE", "claims", "load"]

EXAMPLE = "hf:./DIR"
_PREFIX = "hf:"
_LARGEST_RANDOM = 500_000_000  # parameters: 2 GB in float32; beyond, the model is built without weights
_MOST = 10_000  # layers, or experts of one: the deepest that were published have 1,000 (DeepNet)
_COUNTED = re.compile(r"layers?$|depths?$|experts$")
_LABELS = 100_000  # transformers makes two names for each; ImageNet-21k has 21,843
_NONE, _LEFT_OUT = "the folder has no weights", "the weights were not read"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?$")
_FIRST = (f"model{SUFFIX}", f"model{INDEX}")  # the first that is there is read
_ADAPTER, _ADAPTED = "adapter_config.json", f"adapter_model{SUFFIX}"  # read too where peft is installed
_SETTINGS = ("generation_config.json", _ADAPTER)  # what transformers reads as well


def claims(text: str) -> bool:
    """Tell whether the text is ``hf:`` and a folder, or what can only be a path."""
    rest = text.removeprefix(_PREFIX)
    if not text.startswith(_PREFIX) or not rest:
        return False
    return rest.startswith((".", "~")) or "/" in rest or "\\" in rest or Path(rest).is_dir()


def load(text: str, *, inputs: str | None = None, whole: bool = False, weights: bool = True) -> Target:
    """Load the model of a folder.

    Args:
        text: ``hf:DIR``.
        inputs: a shape; the generated inputs are then left out.
        whole: take the class that config.json names, with its heads, and not the base model.
        weights: False leaves a large model without them.

    Raises:
        TargetError: the folder or its config.json is missing, its weights are pickles only, or the model
            cannot be built or fed.
        CheckpointError: config.json is no JSON object, or too large, or the weights are not sound.
    """
    library(text)
    folder = Path(text.removeprefix(_PREFIX)).expanduser()
    _look(folder, text)
    with quiet():
        try:
            return load_folder(folder, text, generate=inputs is None, whole=whole, weights=weights)
        except CheckpointError:
            raise
        except TargetError as error:
            raise TargetError(f"{text}: {error}".replace(f"{text}: {text}: ", f"{text}: ")) from error
        except Exception as error:  # whatever transformers raises on a folder it cannot read
            raise TargetError(f"{text}: the model of this folder cannot be loaded: {one_line(error)}") from error


def load_folder(folder: Path, name: str, *, generate: bool = True, whole: bool = False, weights: bool = True) -> Target:
    """Load a folder that has been looked at; see ``load``."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    cls = _named_class(config) if whole else None
    held = any(folder.glob("*.safetensors"))
    count, beside = count_numbers(config, cls)
    if beside > _LARGEST_RANDOM:  # buffers are made whether there are weights or not
        raise TargetError(f"config.json makes buffers of {beside:,} numbers, the limit is {_LARGEST_RANDOM:,}")
    if not held or not (weights or count <= _LARGEST_RANDOM):
        return _without_weights(config, name, cls, count, why=_LEFT_OUT if held else _NONE, generate=generate)
    _sound(folder, config)
    model = _pretrained(folder, config, cls)
    if not generate:
        return Target(model=model, name=name, config=config, weights=Weights.REAL)
    found = find_inputs(model)
    return Target(
        model=model, name=name, kwargs=found.kwargs, config=config, inputs_from=InputsFrom.INFERRED,
        weights=Weights.REAL, notes=("inputs generated", *found.notes),
    )  # fmt: skip


def _look(folder: Path, text: str) -> None:
    if not folder.is_dir():
        raise TargetError(f"{text}: there is no folder {folder}; hf:TYPE (for example hf:llama) is a model type")
    if not (folder / "config.json").is_file():
        raise TargetError(f"{text}: the folder has no config.json, so it is no transformers model")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    lacking = (folder / _ADAPTER).exists() and not (folder / _ADAPTED).exists()
    if pickles and (lacking or not any(folder.glob("*.safetensors"))):
        raise TargetError(
            f"{text}: the weights are in a pickle ({pickles[0]}), which can run any code when it is opened, so "
            "normwise never loads one; convert it where you trust it: "
            "model.save_pretrained(DIR) of transformers writes model.safetensors"
        )
    settings = config_beside(folder)[0] or {}
    known = settings.get("model_type")
    if not isinstance(known, str | None):
        raise TargetError(f"{text}: model_type of config.json is no name, so it is no transformers model")
    if "auto_map" in settings and known not in model_types():  # its model exists only as code beside the weights
        raise TargetError(
            f"{text}: config.json points to code of its own (auto_map), which normwise never runs; "
            "give FILE.py:callable that builds the model"
        )
    for name, value in _settings(settings):
        if isinstance(value, int) and _COUNTED.search(name) and value > _MOST:
            raise TargetError(f"{text}: {name} is {value:,} in config.json, the limit is {_MOST:,}: each is a module")
        if isinstance(value, int) and name == "num_labels" and value > _LABELS:
            raise TargetError(f"{text}: {name} is {value:,} in config.json, the limit is {_LABELS:,}: each has a name")
        if _IMPLEMENTATION.match(name) and "/" in str(value):
            raise TargetError(
                f"{text}: config.json takes code from a hub ({name} is {clean(value)[:80]}), never run here; "
                "leave that out"
            )


def _settings(held: Any) -> Iterator[tuple[str, Any]]:
    """Yield every name of a configuration with its value, or with each of several; also of configurations inside."""
    for name, value in held.items() if isinstance(held, Mapping) else ():
        for each in value if isinstance(value, list) else (value,):
            yield name, each
            yield from _settings(each)


def _sound(folder: Path, config: Any) -> None:
    """Read the index and the headers of what transformers is about to read, and look at the size of the rest.

    Raises:
        CheckpointError: they are not sound, or lead elsewhere.
    """
    named = getattr(config, "transformers_weights", None)
    if named is not None and not (isinstance(named, str) and _plain(named)):
        why = f"config.json takes the weights from {clean(named)[:80]}, which is no safetensors file beside it"
        raise broken("bad-shard-name", str(folder), why)
    first = next((name for name in ((named,) if named else _FIRST) if (folder / name).is_file()), None)
    for name in filter(None, (first, _ADAPTED if (folder / _ADAPTER).exists() else None)):
        open_source(folder / name).close()
    for path in (folder / name for name in _SETTINGS):
        if path.is_file() and (size := path.stat().st_size) > CONFIG_BYTES:
            raise broken("json-too-large", str(path), f"{size:,} bytes of JSON, the limit is {CONFIG_BYTES:,}")


def _plain(name: str) -> bool:
    return Path(name).name == name and name.endswith((SUFFIX, INDEX))


def _named_class(config: Any) -> type[nn.Module] | None:
    """Return the class that a configuration names first, None where it names none.

    Raises:
        TargetError: transformers does not have it, and another one would be another function.
    """
    import transformers

    name = next(iter(config.architectures or ()), None)
    cls = None if name is None else model_named(transformers, name)
    if name is not None and cls is None:
        raise TargetError(
            f"config.json names the class {clean(name)[:80]}, which is no model of transformers "
            f"{transformers.__version__}; give FILE.py:callable that builds the model"
        )
    return cls


def _pretrained(folder: Path, config: Any, cls: type[nn.Module] | None) -> Any:
    from transformers import AutoModel

    options = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if cls is None and type(config) in AutoModel._model_mapping:
        model, info = AutoModel.from_pretrained(folder, **options)
    else:
        options.pop("trust_remote_code")
        model, info = (cls or model_class(config)).from_pretrained(folder, **options)  # type: ignore[attr-defined]
    for key, stored, made in sorted(info["mismatched_keys"]):
        raise TargetError(f"{key} is stored as {tuple(stored)}, and config.json makes it {tuple(made)}")
    return model.eval()


def _without_weights(
    config: Any, name: str, cls: type[nn.Module] | None, count: int, *, why: str, generate: bool
) -> Target:
    if count > _LARGEST_RANDOM:
        gc.collect()
        model = build_fake(config, cls=cls)
        note = f"{why}: {count:,} parameters examined at full size without any storage"
        kwargs = generated_inputs(model) if generate else {}
        return Target(
            model=model, name=name, kwargs=kwargs, config=config, inputs_from=InputsFrom.INFERRED,
            weights=Weights.FAKE, notes=(note, "inputs generated") if kwargs else (note,),
        )  # fmt: skip
    model = build_model(config, cls)
    found = find_inputs(model) if generate else None
    return Target(
        model=model, name=name, kwargs=found.kwargs if found else {}, config=config,
        inputs_from=InputsFrom.INFERRED if found else InputsFrom.GIVEN, weights=Weights.RANDOM,
        notes=("the folder has no weights: random ones were made at full size", *(found.notes if found else ())),
    )  # fmt: skip
