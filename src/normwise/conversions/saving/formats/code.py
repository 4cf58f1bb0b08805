"""A transformers folder with a small modeling file, for programs that load through ``AutoModel...from_pretrained``.

The file subclasses the stock class and applies the edits; it needs torch and transformers, not normwise. Whoever loads
it must say ``trust_remote_code=True``, which runs code of the folder: read it first. Without that word nothing is
loaded, because the configuration has a model type of its own.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import nn

from normwise.conversions._edits import Edit, SwapNorm, edit_from
from normwise.conversions.saving.formats._bundling import bundle
from normwise.conversions.saving.formats._folder import write_settings
from normwise.conversions.saving.formats._plain_norm import plain_swap
from normwise.conversions.saving.loading import load_pretrained
from normwise.conversions.saving.output import Output, is_transformers
from normwise.conversions.saving.publishing import write_text

__all__ = ["NOTE", "expected", "file_name", "finish", "load", "refusal"]

NOTE = "loading it takes trust_remote_code=True, which runs modeling_normwise.py of the folder: read that file first"
_MODULE = "modeling_normwise"


def refusal(output: Output) -> str | None:
    """Return the first change that cannot be written as code of torch alone."""
    if not is_transformers(output.model):
        return f"{output.class_name} is no transformers model, which this format is for; use the format manifest"
    for edit in output.plan.edits:
        try:
            bundle([type(_plain(edit))])
        except ValueError as why:
            return (
                f"the change {edit.kind!r} of {edit.path} cannot be written as plain torch ({why}); manifest holds it"
            )
    return None


def file_name(name: str) -> str:
    """Return the name of the source."""
    return name


def finish(folder: Path, output: Output) -> None:
    """Write the modeling file, and config.json which points to it."""
    name = f"Normwise{output.class_name}"
    config = output.config()
    model_type = config["model_type"]
    autos = dict.fromkeys(_auto_classes(output.class_name, model_type), f"{_MODULE}.{name}")
    config |= {"architectures": [name], "model_type": f"normwise_{model_type}"}
    config["auto_map"] = {"AutoConfig": f"{_MODULE}.NormwiseConfig", **autos}
    write_text(folder / f"{_MODULE}.py", _modeling(output, name, model_type))
    write_settings(folder, output, config)


def load(folder: Path, output: Output, original: nn.Module) -> nn.Module:
    """Return what the modeling file makes of the folder, which was written by us a moment ago."""
    name = f"_normwise_saved_{id(output)}"
    spec = importlib.util.spec_from_file_location(name, folder / f"{_MODULE}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
        return load_pretrained(getattr(module, f"Normwise{output.class_name}"), folder)
    finally:
        sys.dont_write_bytecode = before
        del sys.modules[name]


def expected(converted: nn.Module, output: Output) -> nn.Module:
    """Return the converted model with the norms of the modeling file, whose last bits are their own."""
    model = copy.deepcopy(converted)
    for edit in output.plan.edits:
        if isinstance(edit, SwapNorm):
            plain_swap(edit).apply(model)
    return model


def _modeling(output: Output, name: str, model_type: str) -> str:
    from importlib.metadata import version

    edits = [_plain(edit) for edit in output.plan.edits]
    gathered = bundle(dict.fromkeys(type(edit) for edit in edits))
    stock, config = type(output.model), type(output.model.config)
    renamed = _renamed(output.class_name, model_type)
    gathered.imports |= {
        "from typing import Any",
        *(f"from {c.__module__} import {c.__name__}" for c in (stock, config)),
    }
    if renamed:
        helpers = "get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping"
        gathered.imports.add(f"from transformers.conversion_mapping import {helpers}")
    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    told = "\n".join(f"    {edit!r}," for edit in edits)
    definitions = "".join(f"\n\n{text}" for text in gathered.definitions.values())
    return template.get_template("modeling.py.jinja").render(
        stock=stock.__name__, config=config.__name__, name=name, model_type=model_type, renamed=renamed, edits=told,
        conversion=output.plan.conversion, version=version("normwise"), definitions=definitions,
        imports="\n".join(sorted(gathered.imports)),
    )  # fmt: skip


def _plain(edit: Edit) -> Edit:
    """Return an edit whose fields are plain data, and which needs no layer of normwise."""
    return plain_swap(edit) if isinstance(edit, SwapNorm) else edit_from(edit.to_json())


def _auto_classes(class_name: str, model_type: str) -> list[str]:
    """Return the Auto classes of transformers that make this class of this type."""
    from transformers.models.auto import modeling_auto

    autos = {name: each for name, each in vars(modeling_auto).items() if isinstance(each, type)}
    mappings: dict[str, Any] = {name: getattr(auto, "_model_mapping", None) for name, auto in autos.items()}
    made = {name: mapping._model_mapping.get(model_type) for name, mapping in mappings.items() if mapping is not None}
    return [name for name, found in made.items() if class_name in (found if isinstance(found, tuple) else (found,))]


def _renamed(class_name: str, model_type: str) -> str | None:
    """Return under which name transformers keeps the renamings of old checkpoints, if there are any."""
    mapping = importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping
    return next((name for name in (class_name, model_type) if mapping(name) is not None), None)
