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
    adjust: Callable[[dict[str, Any], Any], None] | None = None  # changes the reduced numbers, given the default ones
    inputs: Callable[[Any], dict[str, Any]] | None = None  # further keyword arguments, given the maker of inputs


def _three_axes(given: dict[str, Any], config: Any) -> None:
    """Deal the rotary angles out to time, height and width: the code's own default fits one head size only."""
    heads = given.get("num_attention_heads", config.num_attention_heads)
    head = given.get("head_dim") or given.get("hidden_size", config.hidden_size) // heads
    rope = dict(given.get("rope_parameters") or config.rope_parameters or {"rope_type": "default"})
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    given["rope_parameters"] = rope


def _every_layer_type(given: dict[str, Any], config: Any) -> None:
    """Make the two layer types of the configuration appear in few blocks."""
    given["layer_types"] = ["sliding_attention", "full_attention"] * 2


_THREE_AXES = Recipe(adjust=_three_axes)

RECIPES: dict[str, Recipe] = {
    **dict.fromkeys(
        (
            "glm4v_text", "glm4v_moe_text", "glm_image_text", "glm46v_text", "glmga_text", "glm_ocr_text",
            "qwen2_5_omni_text", "qwen2_5_omni_talker", "qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text",
        ),
        _THREE_AXES,
    ),
    "gpt_neo": Recipe(always={"attention_types": [[["global", "local"], 2]]}),
    "jamba": Recipe(always={"attn_layer_period": 4, "attn_layer_offset": 2}),
    "esm": Recipe(always={"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1}),
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), Recipe(always={"prediction_length": 12})),
    **dict.fromkeys(("musicgen_decoder", "musicgen_melody_decoder"), Recipe(always={"num_codebooks": 1})),
    "nemotron": Recipe(always={"num_key_value_heads": 4}),
    "deepseek_v2": Recipe(always={"num_experts_per_tok": 2}),
    "xmod": Recipe(always={"default_language": "en_XX"}),
}  # fmt: skip

_NONE = Recipe()


def recipe_for(model_type: str) -> Recipe:
    """Return the recipe of a model type, an empty one for most."""
    return RECIPES.get(model_type, _NONE)
