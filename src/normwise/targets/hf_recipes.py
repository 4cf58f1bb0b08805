"""What the general rules cannot know about single transformers families: the one table of recipes.

A recipe is only about building and feeding a small model; nothing that examines models reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["RECIPES", "Recipe", "recipe_for"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What one model type needs beyond the general rules."""

    config: dict[str, Any] = field(default_factory=dict)  # numbers of the reduced configuration
    always: dict[str, Any] = field(default_factory=dict)  # also where widths are kept
    default: Callable[[], Any] | None = None  # makes the default configuration where the class alone cannot
    cls: str | None = None  # the class to build
    inputs: Callable[[Any, Any], dict[str, Any]] | None = None  # (model, size) -> keyword arguments


RECIPES: dict[str, Recipe] = {}

_NONE = Recipe()


def recipe_for(model_type: str) -> Recipe:
    """Return the recipe of a model type, an empty one for most."""
    return RECIPES.get(model_type, _NONE)
