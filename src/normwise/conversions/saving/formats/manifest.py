"""A folder that ``normwise.load(DIR)`` opens: weights, configuration, and the plan as data; no code in it is run.

The manifest, normwise.json, has the edits of the modules; the class is that of transformers. Weight files are called
``*.normwise.safetensors`` (a variant, in the words of transformers), so that the stock class, which would compute
something else with these numbers, finds none. For a model of one's own: ``normwise.load(DIR, fresh_model)``.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from normwise.conversions.saving.formats._folder import write_settings
from normwise.conversions.saving.loading import VARIANT, load_edited
from normwise.conversions.saving.output import Output, is_transformers

__all__ = ["file_name", "finish", "load", "refusal"]


def refusal(output: Output) -> str | None:
    """Return nothing: a plan is data."""
    return None


def file_name(name: str) -> str:
    """Return the name that transformers gives the variant: model.normwise.safetensors."""
    for ending in (".safetensors", ".json"):
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}.{VARIANT}{ending}"
    return name


def finish(folder: Path, output: Output) -> None:
    """Write config.json; the manifest comes last, by ``save``."""
    if is_transformers(output.model):
        write_settings(folder, output, output.config())


def load(folder: Path, output: Output, original: nn.Module) -> nn.Module:
    """Return what ``normwise.load`` makes of the folder."""
    base = type(original) if is_transformers(original) else original
    return load_edited(base, output.plan.edits, folder, variant=VARIANT).eval()
