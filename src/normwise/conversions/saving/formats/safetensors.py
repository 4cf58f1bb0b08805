"""Weights alone: one safetensors file, or shards with an index.

Nothing says how the modules were changed: whoever loads them applies the plan to a model of the original class
(``normwise.convert`` on it, or ``plan.edits``) and then ``load_state_dict``.
"""

from __future__ import annotations

import copy
from pathlib import Path

from torch import nn

from normwise.conversions._edits import Untie
from normwise.conversions.saving.checkpoint import Checkpoint
from normwise.conversions.saving.loading import load_edited
from normwise.conversions.saving.output import Output, is_transformers

__all__ = ["file_name", "finish", "load", "refusal"]


def refusal(output: Output) -> str | None:
    """Return nothing: every converted model has weights."""
    return None


def file_name(name: str) -> str:
    """Return the name of the source."""
    return name


def finish(folder: Path, output: Output) -> None:
    """Write nothing more."""


def load(folder: Path, output: Output, original: nn.Module) -> nn.Module:
    """Return the original, edited, with these weights."""
    if not is_transformers(original):
        return load_edited(original, output.plan.edits, folder)
    checkpoint = Checkpoint.open(folder)
    given = {
        "config": copy.deepcopy(original.config),
        "state_dict": {k: checkpoint.load(k) for k in checkpoint.tensors},
    }
    if any(isinstance(edit, Untie) for edit in output.plan.edits):
        given["config"].tie_word_embeddings = False
    return load_edited(type(original), output.plan.edits, None, **given)
