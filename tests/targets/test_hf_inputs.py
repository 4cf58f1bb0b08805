"""Generated calls of multimodal, audio and video models: what an argument looks like, and what cannot be called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normwise.errors import TargetError
from normwise.targets import hf
from normwise.targets.hf_build import build_fake, build_model, model_class, quiet
from normwise.targets.hf_config import build_config
from normwise.targets.hf_depth import Depth
from normwise.targets.hf_inputs import Maker, find_inputs, generated_inputs

pytest.importorskip("transformers")


def shapes(model_type: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the call that a small model of this type runs on."""
    kwargs = hf.load(f"hf:{model_type}").kwargs
    return {name: tuple(value.shape) for name, value in kwargs.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    ("model_type", "name", "shape"),
    [
        ("molmo2_vision", "pixel_values", (2, 36, 3 * 14**2)),  # patches, already flat
        ("minicpmv4_6_vision", "pixel_values", (1, 3, 16, 16 * 64)),  # the patches of a batch in one row
        ("gemma4_vision", "pixel_values", (2, 36, 3 * 16**2)),  # rows and columns divide by what is pooled
        ("pix2struct_vision_model", "flattened_patches", (2, 24, 2 + 3 * 16**2)),  # row and column, then colours
        ("granite_speech5_encoder", "input_features", (2, 104, 4 * 80)),  # neighbouring mel frames side by side
        ("qwen2_5_omni_audio_encoder", "input_features", (128, 112)),  # the frames of a batch in one row
        ("inkling_audio", "audio_input_ids", (2, 13, 80)),  # a code for each codebook
        ("dia", "decoder_input_ids", (2, 13, 9)),
        ("kosmos_2_5_vision_model", "flattened_patches", (2, 24, 770)),  # optional, but the model asks for it
        ("kosmos-2", "image_embeds_position_mask", (2, 64 + 13)),
    ],
)
def test_an_argument_has_the_layout_that_the_model_takes(model_type: str, name: str, shape: tuple[int, ...]) -> None:
    assert shapes(model_type)[name] == shape


def test_rows_and_columns_stand_before_the_colours_of_flattened_patches() -> None:
    patches = hf.load("hf:pix2struct_vision_model").kwargs["flattened_patches"]
    assert patches[0, :7, :2].tolist() == [[1, 1], [1, 2], [1, 3], [1, 4], [1, 5], [1, 6], [2, 1]]


def test_a_mask_that_marks_padding_marks_none() -> None:
    assert not hf.load("hf:gemma3n_audio").kwargs["audio_mel_mask"].any()


def test_what_an_error_names_is_added() -> None:
    with quiet():
        model = build_model(build_config("blip_2_qformer"))
        maker = Maker(model, 2, 13)
        call: dict[str, Any] = {"query_embeds": torch.zeros(2, 13, 64)}
        assert set(maker.asked_for(ValueError("encoder_hidden_states must be given"), call)) == {
            "encoder_hidden_states"
        }
        assert not maker.asked_for(ValueError("query_embeds is wrong"), call)
        assert set(find_inputs(model).kwargs) == {"query_embeds", "encoder_hidden_states"}


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("blip_text_model", "BlipTextModel"),  # in another modeling module of its package
        ("musicgen", "MusicgenForConditionalGeneration"),  # MusicgenModel is registered, but takes the decoder's part
    ],
)
def test_the_class_is_one_that_takes_this_configuration(model_type: str, name: str) -> None:
    with quiet():
        assert model_class(build_config(model_type, reduced=False)).__name__ == name


def test_a_class_without_a_forward_is_said_to_have_none_and_its_parts_are_named() -> None:
    with pytest.raises(TargetError, match=r"no forward.*hf:qwen2_5_omni_thinker"):
        hf.load("hf:qwen2_5_omni")


def test_a_model_that_works_on_an_object_is_not_fed() -> None:
    with pytest.raises(TargetError, match="Sam2VideoInferenceSession"):
        hf.load("hf:sam2_video")


def test_where_some_blocks_were_of_a_kind_some_still_are() -> None:
    with quiet():
        windows = build_config("sam_vision_model")  # global attention in 4 of 12 blocks
        crossing = build_config("mllama_text_model")  # cross-attention in 8 of 40
    assert 0 < len(windows.global_attn_indexes) < windows.num_hidden_layers
    assert 0 < len(crossing.cross_attention_layers) < crossing.num_hidden_layers


def test_outputs_keep_their_number_and_indices_that_fit_stay() -> None:
    depth = Depth(total=12, lists={}, period=0, kept=4)
    assert depth.indices([2, 5, 8, 11], kinds=False) == [0, 1, 2, 3]
    assert depth.indices([2, 5, 8, 11], kinds=True) == [3]
    assert depth.indices([0, 1], kinds=True) == [0, 1]
    assert depth.index(-9) == -4


def test_what_a_configuration_class_sets_by_itself_is_reduced_too() -> None:
    with quiet():
        vision, whole = build_config("molmo2_vision"), build_config("molmo2")
    assert vision.image_size == [84, 84]
    assert vision.num_position_embeddings == 36
    blocks = whole.vision_config.num_hidden_layers
    assert all(layer < blocks for layer in whole.adapter_config.vision_feature_layer)


@pytest.mark.parametrize("model_type", ["vit", "wav2vec2", "whisper", "llama"])
def test_a_model_without_numbers_is_given_what_its_forward_reads(model_type: str) -> None:
    with quiet():
        config = build_config(model_type)
        kwargs = generated_inputs(build_fake(config))
        model = build_model(config).eval()
    assert kwargs
    model(**kwargs)
