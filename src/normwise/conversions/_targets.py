"""What is converted: as ``targets.target`` finds it, but of a folder the whole model, with its heads.

A head can share its matrix with the embedding. A plan that has not seen the head would change both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normwise.targets import Target, folder, load, target

__all__ = ["loaded", "whole_target"]


def whole_target(model: str | nn.Module | Target, inputs: Any = None) -> Target:
    """Return the target of a conversion; see ``targets.target``."""
    if isinstance(model, str) and folder.claims(model):
        model = folder.load(model, whole=True)
    return target(model, inputs)


def loaded(
    text: str, *, inputs: str | None = None, dtype: torch.dtype | str | None = None, weights: bool = True
) -> Target:
    """Return the target that a command names.

    Args:
        text: any TARGET string.
        inputs: a shape, see ``targets.load``.
        dtype: what a copy is cast to.
        weights: False leaves a large folder without them.
    """
    found = folder.load(text, inputs=inputs, whole=True, weights=weights) if folder.claims(text) else text
    return load(found, inputs=inputs, dtype=dtype)
