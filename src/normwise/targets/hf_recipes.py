"""What the general rules cannot know about single transformers families: the one table of recipes.

A recipe is only about building and feeding a small model; nothing that examines models reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from normwise.targets import hf_calls

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


def _ranges_of_tokens(given: dict[str, Any], config: Any) -> None:
    """Put the codes of images and sounds behind each other within the small vocabulary."""
    given["image_token_offset"] = 64
    given["audio_token_offset"] = 64 + given["vision_config"].codebook_size


def _to_encoder(given: dict[str, Any], config: Any) -> None:
    """Let the last convolution of the first tower hand on the width of the second, which the defaults do not."""
    first, width = given["sam_config"], given["encoder_config"].hidden_size
    first.downsample_channels = [*first.downsample_channels[:-1], width]


def _wide_as_text(part: str | None, name: str) -> Callable[[dict[str, Any], Any], None]:
    """Make a width that the default configuration leaves at odds with its text part the one of the text part."""

    def adjust(given: dict[str, Any], config: Any) -> None:
        text = given["text_config"]
        width = getattr(text, "hidden_size", None) or text.d_model
        if part:
            setattr(given[part], name, width)
        else:
            given[name] = width

    return adjust


def _as_it_is(model_type: str) -> Callable[[], Any]:
    """Leave the optional towers out: the code reads what the default configuration of one of them lacks."""

    def default() -> Any:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]()

    return default


def _projected(given: dict[str, Any], config: Any) -> None:
    """Let the projector read what the encoder of the sound makes."""
    given["projector_config"].encoder_hidden_size = given["encoder_config"].hidden_dim


def _both_encoders(given: dict[str, Any], config: Any) -> None:
    """Quantize what the acoustic and the semantic encoder make, side by side."""
    widths = given.get("hidden_size", config.hidden_size), given["semantic_model_config"].hidden_size
    given["quantization_dim"] = sum(widths)


_THREE_AXES = Recipe(adjust=_three_axes)

RECIPES: dict[str, Recipe] = {
    **dict.fromkeys(
        (
            "glm4v_text", "glm4v_moe_text", "glm_image_text", "glm46v_text", "glmga_text", "glm_ocr_text",
            "qwen2_5_omni_text", "qwen2_5_omni_talker", "qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text",
            "ernie4_5_vl_moe_text", "hunyuan_vl_text",
        ),
        _THREE_AXES,
    ),
    "gpt_neo": Recipe(always={"attention_types": [[["global", "local"], 2]]}),
    "jamba": Recipe(always={"attn_layer_period": 4, "attn_layer_offset": 2}),
    "esm": Recipe(always={"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1}),
    **dict.fromkeys(
        ("autoformer", "informer", "time_series_transformer"),
        Recipe(always={"prediction_length": 12, "num_time_features": 2}, inputs=hf_calls.series),
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
        ("chameleon_vqgan", "emu3_vqgan", "janus_vqgan", "glm_image_vqmodel", "apertus1p5_vision_tokenizer"),
        Recipe(always={"base_channels": 32, "num_res_blocks": 1, "resolution": 64}),
    ),
    "mamba2": Recipe(config={"num_heads": 8, "head_dim": 16}),
    **dict.fromkeys(("chameleon", "emu3"), Recipe(always={"vocabulary_map": {"<image>": 250, "IMGIMGAZ": 251}})),
    "falcon_h1": Recipe(config={"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8}),
    "llama4_vision_model": Recipe(adjust=_four_to_one),
    "aria": Recipe(always={"projector_patch_to_query_dict": {16: 8}}),
    "vipllava": Recipe(always={"vision_feature_layer": [-2, -3, -4, -5, 2]}),
    **dict.fromkeys(
        ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        Recipe(always={"vision_start_token_id": 240, "vision_end_token_id": 241}),
    ),
    "moonshine_streaming": Recipe(always={"num_key_value_heads": 4}),
    "apertus1p5": Recipe(adjust=_ranges_of_tokens),
    "granite4_vision": Recipe(
        always={
            "deepstack_layer_map": [[0, 0], [2, 1]], "spatial_target_layers": [0, 1, 2, 3], "downsample_rate": "1/2",
        }
    ),
    "qwen3_omni_moe_talker_text": Recipe(config={"shared_expert_intermediate_size": 48}),  # not in the default one
    "qwen4_exp_text": Recipe(
        always={
            "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        }
    ),
    "cohere_compass_text": Recipe(
        always={"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}}
    ),
    "speecht5": Recipe(cls="SpeechT5ForSpeechToText"),
    "gemma3n_audio": Recipe(inputs=hf_calls.mel_without_padding),
    "kosmos-2": Recipe(inputs=hf_calls.latent_images),
    "kyutai_speech_to_text": Recipe(inputs=hf_calls.spoken_text),
    "pi0": Recipe(inputs=hf_calls.robot),
    "qwen2_5_omni_dit": Recipe(inputs=hf_calls.diffused_mels),
    "qwen2_5_omni_token2wav": Recipe(inputs=hf_calls.synthesis),
    "speech-encoder-decoder": Recipe(inputs=hf_calls.wave),
    "timesfm": Recipe(inputs=hf_calls.series_without_features),
    "unlimited_ocr_vision_encoder": Recipe(inputs=hf_calls.feature_map),
    **dict.fromkeys(("deepseek_ocr2_vision", "unlimited_ocr_vision"), Recipe(adjust=_to_encoder)),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), Recipe(adjust=_projected)),
    **dict.fromkeys(("florence2", "janus"), Recipe(adjust=_wide_as_text("vision_config", "projection_dim"))),
    "shieldgemma2": Recipe(always={"yes_token_index": 240, "no_token_index": 241}),
    "nemotron_h_omni": Recipe(default=_as_it_is("nemotron_h_omni")),
    "qwen3_asr": Recipe(adjust=_wide_as_text("audio_config", "output_dim")),
    "ovis2": Recipe(adjust=_wide_as_text(None, "hidden_size")),
    "qwen2_vl": Recipe(adjust=_wide_as_text("vision_config", "hidden_size")),
    "qwen2_vl_vision": Recipe(config={"embed_dim": 64}),
    "mllama_vision_model": Recipe(always={"intermediate_layers_indices": [0, 1, 1, 2, 3]}),
    "xcodec2": Recipe(adjust=_both_encoders, inputs=hf_calls.wave_and_mels),
}  # fmt: skip

_NONE = Recipe()


def recipe_for(model_type: str) -> Recipe:
    """Return the recipe of a model type, an empty one for most."""
    return RECIPES.get(model_type, _NONE)
