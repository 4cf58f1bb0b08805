"""A transformers folder for the class as it is: any program opens it.

It can hold a conversion that changes numbers only (a fold whose norms keep their keys), and an untied head, which the
configuration then tells. What needs another module or a key that the class does not have is refused: the class would
drop it in silence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from normwise.conversions._edits import Untie
from normwise.conversions.saving.formats._folder import write_settings
from normwise.conversions.saving.loading import load_pretrained
from normwise.conversions.saving.output import Output, is_transformers

__all__ = ["file_name", "finish", "load", "refusal"]


def refusal(output: Output) -> str | None:
    """Return the first change that the stock class would not have."""
    if not is_transformers(output.model):
        return f"{output.class_name} is no transformers model, which this format is for; use the format safetensors"
    heads = _heads(output.model)
    for edit in output.plan.edits:
        if isinstance(edit, Untie) and edit.path in heads:
            continue
        needs = f"the key {edit.created[0]}" if edit.created else f"the change {edit.kind!r} of {edit.path}"
        return f"{output.class_name} of transformers would not have {needs}; the formats manifest and code hold it"
    return None


def file_name(name: str) -> str:
    """Return the name of the source."""
    return name


def finish(folder: Path, output: Output) -> None:
    """Write config.json, which is truthful about ties."""
    write_settings(folder, output, output.config())


def load(folder: Path, output: Output, original: nn.Module) -> nn.Module:
    """Return what transformers makes of the folder."""
    return load_pretrained(type(original), folder)


def _heads(model: nn.Module) -> set[str]:
    getter: Any = getattr(model, "get_output_embeddings", None)
    head = getter() if getter else None
    return {path for path, module in model.named_modules() if module is head}
