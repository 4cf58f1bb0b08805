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
    rope: dict[str, Any] = dict(given.get("rope_parameters") or config.rope_parameters or {"rope_type": "default"})
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    rope["mrope_section"] = [half // 3, half // 3, half - 2 * (half // 3)]
    given["rope_parameters"] = rope


def _four_to_one(given: dict[str, Any], config: Any) -> None:
    """Make the widths after pixel shuffling what it makes of four neighbours."""
    names = ("intermediate_size", "projector_input_dim", "projector_output_dim", "vision_output_dim")
    given.update(dict.fromkeys(names, 4 * given.get("hidden_size", config.hidden_size)))


def _series(maker: Any) -> dict[str, Any]:
    """Return a time series with its time features: the context and what the lags reach back to."""
    config, batch = maker.config, maker.batch
    length = config.context_length + max(config.lags_sequence)
    return {
        "past_values": maker.noise(batch, length),
        "past_time_features": maker.noise(batch, length, config.num_time_features),
        "past_observed_mask": maker.ones(batch, length),
        "future_values": maker.noise(batch, config.prediction_length),
        "future_time_features": maker.noise(batch, config.prediction_length, config.num_time_features),
    }


_THREE_AXES = Recipe(adjust=_three_axes)

RECIPES: dict[str, Recipe] = {
    **dict.fromkeys(
        (
            "glm4v_text", "glm4v_moe_text", "glm_image_text", "glm46v_text", "glmga_text", "glm_ocr_text",
            "qwen2_5_omni_text", "qwen2_5_omni_talker", "qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text",
            "ernie4_5_vl_moe_text",
        ),
        _THREE_AXES,
    ),
    "gpt_neo": Recipe(always={"attention_types": [[["global", "local"], 2]]}),
    "jamba": Recipe(always={"attn_layer_period": 4, "attn_layer_offset": 2}),
    "esm": Recipe(always={"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1}),
    **dict.fromkeys(
        ("autoformer", "informer", "time_series_transformer"),
        Recipe(always={"prediction_length": 12, "num_time_features": 2}, inputs=_series),
    ),
    **dict.fromkeys(("musicgen_decoder", "musicgen_melody_decoder"), Recipe(always={"num_codebooks": 1})),
    "nemotron": Recipe(always={"num_key_value_heads": 4}),
    "deepseek_v2": Recipe(always={"num_experts_per_tok": 2}),
    "xmod": Recipe(always={"default_language": "en_XX"}),
    "dots1": Recipe(
        always={"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    ),
    "lfm2_moe": Recipe(always={"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "gemma3n_text": Recipe(always={"num_kv_shared_layers": 0}),
    **dict.fromkeys(("step3p5", "step3p7_text"), Recipe(always={"sliding_window": 8})),
    "zamba": Recipe(
        always={"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2}
    ),
    "diffusion_gemma_text": Recipe(always={"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 40}),
    "deepseek_ocr2_text": Recipe(
        always={"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2}
    ),
    **dict.fromkeys(
        ("chameleon_vqgan", "emu3_vqgan", "janus_vqgan", "glm_image_vqmodel"),
        Recipe(always={"base_channels": 32, "num_res_blocks": 1, "resolution": 64}),
    ),
    "mamba2": Recipe(config={"num_heads": 8, "head_dim": 16}),
    **dict.fromkeys(("chameleon", "emu3"), Recipe(always={"vocabulary_map": {"<image>": 250, "IMGIMGAZ": 251}})),
    "falcon_h1": Recipe(config={"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8}),
    "llama4_vision_model": Recipe(adjust=_four_to_one),
    "aria": Recipe(always={"projector_patch_to_query_dict": {16: 8}}),
    "vipllava": Recipe(always={"vision_feature_layer": [-2, -3, -4, -5, 2]}),
    "qwen2_5_omni_thinker": Recipe(always={"vision_start_token_id": 240, "vision_end_token_id": 241}),
    "moonshine_streaming": Recipe(always={"num_key_value_heads": 4}),
}  # fmt: skip

_NONE = Recipe()


def recipe_for(model_type: str) -> Recipe:
    """Return the recipe of a model type, an empty one for most."""
    return RECIPES.get(model_type, _NONE)
