"""The calls of single transformers families that their signatures and configurations do not tell.

Each takes the maker of inputs and returns keyword arguments; ``hf_recipes`` says whose they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from normwise.targets.hf_inputs import Maker

__all__ = [
    "diffused_mels",
    "feature_map",
    "latent_images",
    "mel_without_padding",
    "robot",
    "series",
    "series_without_features",
    "spoken_text",
    "synthesis",
    "wave",
    "wave_and_mels",
]

Call = dict[str, Any]


def series(maker: Maker) -> Call:
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


def series_without_features(maker: Maker) -> Call:
    """Return TimesFM's series, none of it padding, of the highest frequency."""
    values = maker.noise(maker.batch, maker.config.context_length)
    frequency = torch.zeros(maker.batch, 1, dtype=torch.long)
    return {"past_values": values, "past_values_padding": torch.zeros_like(values), "freq": frequency}


def latent_images(maker: Maker) -> Call:
    """Return the text of Kosmos-2 with the places that its latent image queries take."""
    queries = maker.config.latent_query_num
    ids = maker.ids(queries + maker.time)
    places = torch.zeros_like(ids)
    places[:, 1 : queries + 1] = 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_embeds_position_mask": places}


def spoken_text(maker: Maker) -> Call:
    """Return a row of text and the rows of codes beside it."""
    return {"input_ids": maker.codes(beside=1), "attention_mask": maker.ones(maker.batch, maker.time)}


def mel_without_padding(maker: Maker) -> Call:
    """Return Gemma 3n's mel frames, whose mask marks what is padding."""
    mels = maker.noise(maker.batch, 4 * maker.time, maker.config.input_feat_size)
    return {"audio_mel": mels, "audio_mel_mask": torch.zeros(mels.shape[:2], dtype=torch.bool)}


def wave(maker: Maker) -> Call:
    """Return a mono wave under the name that encoder-decoders of speech give it."""
    return {"inputs": maker.noise(maker.batch, 320 * maker.time + 80)}


def wave_and_mels(maker: Maker) -> Call:
    """Return a wave and mel frames of as many steps as the codec makes of the wave."""
    steps = maker.time
    bins = maker.config.semantic_model_config.feature_projection_input_dim
    return {
        "input_values": maker.noise(maker.batch, 1, maker.config.hop_length * steps),
        "input_features": maker.noise(maker.batch, steps, bins),
        "input_features_mask": maker.ones(maker.batch, steps),
    }


def feature_map(maker: Maker) -> Call:
    """Return what another tower made of an image, in the place of patch embeddings."""
    return {"patch_embeds": maker.noise(maker.batch, maker.config.hidden_size, 4, 4)}


def robot(maker: Maker) -> Call:
    """Return what pi0's language part reads, one camera and a task, and the embedded actions."""
    vision = maker.config.vlm_config.vision_config
    camera = maker.noise(maker.batch, 1, 3, vision.image_size, vision.image_size)
    image = torch.full(
        (maker.batch, (vision.image_size // vision.patch_size) ** 2), maker.config.vlm_config.image_token_id
    )
    ids = torch.cat([image, maker.ids(maker.time)], dim=1)
    return {
        "action_embeds": maker.noise(maker.batch, 5, maker.config.dit_config.hidden_size),
        "pixel_values": camera,
        "pixel_attention_mask": maker.ones(maker.batch, 1).bool(),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


def diffused_mels(maker: Maker) -> Call:
    """Return mel frames at one step of diffusion, the codes they are made of, and a speaker."""
    config, frames = maker.config, maker.config.repeats * maker.time
    return {
        "hidden_states": maker.noise(maker.batch, frames, config.mel_dim),
        "quantized_code": torch.arange(maker.batch * maker.time).view(maker.batch, -1) % config.num_embeds,
        "condition_vector": maker.noise(maker.batch, 4 * maker.time, config.mel_dim),
        "speaker_embedding": maker.noise(maker.batch, frames, config.enc_emb_dim),
        "time_step": torch.full((maker.batch,), 0.5),
    }


def synthesis(maker: Maker) -> Call:
    """Return codes, a speaker and a reference sound, and the fewest steps of diffusion."""
    config = maker.config.dit_config
    return {
        "code": torch.arange(maker.batch * maker.time).view(maker.batch, -1) % config.num_embeds,
        "conditioning": maker.noise(maker.batch, config.enc_emb_dim),
        "reference_mel": maker.noise(maker.batch, 4 * maker.time, config.mel_dim),
        "num_steps": 2,
    }
