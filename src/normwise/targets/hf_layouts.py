"""The layouts that one argument of a transformers model may have, by its name; the likeliest first."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from normwise.targets.hf_inputs import Maker

__all__ = ["layouts"]

Make = Callable[[], Any]
_ROWS, _COLUMNS = 4, 6  # of patches, made multiples of what the model merges
_FRAMES = 4
_HOP = 1920


def layouts(maker: Maker, name: str) -> list[Make]:
    """Return functions that make the argument, one for each layout it may have."""
    if name in _BY_NAME:
        return _BY_NAME[name](maker)
    if name.endswith("mask"):
        return [lambda: maker.ones(maker.batch, maker.time), lambda: maker.ones(maker.batch, maker.time).bool()]
    if name.endswith("input_ids"):
        return [lambda: maker.ids(maker.time), maker.codes]
    return _states(maker)


# images


def _grid(maker: Maker) -> tuple[int, int, int]:
    """Return frames, rows and columns of patches of one image."""
    merged = _merged(maker)
    return 1, -(-_ROWS // merged) * merged, -(-_COLUMNS // merged) * merged


def _merged(maker: Maker) -> int:
    """Return of how many rows, and of how many columns, one is made; where patches come in one row it is done twice."""
    if _has(maker, "target_sizes"):
        return 4
    return maker.number("spatial_merge_size", "pooling_kernel_size", default=1)


def _vision(maker: Maker) -> Any:
    """Return the part of the configuration that describes images."""
    parts = maker.everything
    names = ("vision_config", "backbone_config", "image_encoder")
    named = [getattr(p, n) for p in parts for n in names if hasattr(p, n)]
    own = [p for p in (*named, *parts) if p is not None and (hasattr(p, "patch_size") or hasattr(p, "image_size"))]
    return own[0] if own else maker.config


def _channels(maker: Maker) -> int:
    return maker.number("num_channels", "in_channels", "in_chans", "input_channels", default=3, of=_vision(maker))


def image_side(maker: Maker) -> int:
    """Return height and width of a generated image in pixels."""
    side = maker.number("image_size", "img_size", default=0, of=_vision(maker))
    return side or maker.number("image_size", "img_size", "resolution", default=64)


def _pixels(maker: Maker) -> list[Make]:
    side, c, b = image_side(maker), _channels(maker), maker.batch
    count, values = b * math.prod(_grid(maker)), _patch_values(maker)
    p = maker.number("patch_size", default=16, of=_vision(maker))
    flat = [
        lambda: maker.noise(count, values),
        lambda: maker.noise(count, 2 * values),
        lambda: maker.noise(count, c, p, p),
        lambda: maker.noise(1, count, c, p, p),
        lambda: maker.noise(count, p * _merged(maker), p * _merged(maker), c),
    ]
    if _has(maker, "image_grid_thw", "grid_thw", "image_grid_hws", "grid_hws", "image_grid_hw"):
        return flat
    naflex = [lambda: maker.noise(b, count // b, values)]
    if _has(maker, "spatial_shapes", "image_position_ids", "pixel_position_ids"):
        return naflex
    if _has(maker, "target_sizes"):  # all patches of a batch in one row
        naflex = [lambda: maker.noise(1, c, p, p * count)]
    frames = maker.number("num_frames", "frames_per_clip", default=_FRAMES)
    image = [lambda: maker.noise(b, c, side, side)]
    video = [lambda: maker.noise(b, frames, c, side, side), lambda: maker.noise(b, c, frames, side, side)]
    if "aspect_ratio_ids" in maker.names:
        tiles = maker.number("max_num_tiles", default=4, of=_vision(maker))
        return [lambda: maker.noise(b, 1, tiles, c, side, side)]
    tiles = [lambda n=n: maker.noise(b, n, c, side, side) for n in (1, 3, 2, 5)]
    films = hasattr(_vision(maker), "tubelet_size") or hasattr(_vision(maker), "num_frames")
    larger = [lambda: maker.noise(b, c, 224, 224)]
    if films:
        return [*video, *image, lambda: maker.noise(b * frames, c, side, side)]
    patches = [lambda: maker.noise(b, (side // p) ** 2, values)]
    return image + tiles + video[:1] + larger + (naflex if _has(maker, "target_sizes") else patches)


def _patch_values(maker: Maker) -> int:
    vision = _vision(maker)
    patch = maker.number("patch_size", "spatial_patch_size", default=16, of=vision)
    return _channels(maker) * patch**2 * maker.number("temporal_patch_size", default=1, of=vision)


def _grids(maker: Maker) -> list[Make]:
    return [lambda: torch.tensor([_grid(maker)] * maker.batch)]


def _grids_2d(maker: Maker) -> list[Make]:
    return [lambda: torch.tensor([_grid(maker)[1:]] * maker.batch)]


def _merge_sizes(maker: Maker) -> list[Make]:
    return [lambda: torch.full((maker.batch,), maker.number("spatial_merge_size", default=2))]


def _flattened(maker: Maker) -> list[Make]:
    """Return patches that begin with the numbers of their row and column, from 1."""
    _, rows, columns = _grid(maker)
    values = maker.noise(maker.batch, rows * columns, 2 + _patch_values(maker))
    values[..., 0] = torch.arange(1, rows + 1).repeat_interleave(columns)
    values[..., 1] = torch.arange(1, columns + 1).repeat(rows)
    return [lambda: values]


def _mask_of_images(maker: Maker) -> list[Make]:
    return [lambda: maker.ones(maker.batch, maker.time, 1)]


def _image_sizes(maker: Maker) -> list[Make]:
    side = image_side(maker)
    return [lambda: torch.tensor([[side, side]] * maker.batch)]


def _patch_mask(maker: Maker) -> list[Make]:
    if "spatial_shapes" in maker.names:
        return [lambda: maker.ones(maker.batch, math.prod(_grid(maker)))]
    side = image_side(maker)
    return [lambda: maker.ones(maker.batch, 1, side, side), lambda: maker.ones(maker.batch, side, side)]


def _positions_2d(maker: Maker) -> list[Make]:
    rows, columns = torch.meshgrid(*map(torch.arange, _grid(maker)[1:]), indexing="ij")
    return [lambda: torch.stack([columns, rows], dim=-1).reshape(1, -1, 2).repeat(maker.batch, 1, 1)]


def _high_resolution(maker: Maker) -> list[Make]:
    """Return the images of a second tower, which sees more of them."""
    tower = getattr(maker.config, "high_res_vision_config", maker.config)
    side = maker.number("image_size", default=image_side(maker), of=tower)
    return [lambda: maker.noise(maker.batch, _channels(maker), side, side)]


def _aspect_ids(maker: Maker) -> list[Make]:
    return [lambda: maker.ones(maker.batch, 1)]


def _aspect_mask(maker: Maker) -> list[Make]:
    return [lambda: maker.ones(maker.batch, 1, maker.number("max_num_tiles", default=4))]


# sound


def _mels(maker: Maker) -> int:
    names = (
        "num_mel_bins", "feature_projection_input_dim", "n_mels", "input_feat_per_channel", "num_mels",
        "feature_size", "input_dim", "input_size", "mel_bins", "input_feat_size", "model_in_dim", "num_bins",
        "num_chroma",
    )  # fmt: skip
    return maker.number(*names, default=80)


def _mel_frames(maker: Maker) -> list[Make]:
    b, mels, t = maker.batch, _mels(maker), int(_frames(maker)[0])
    if _has(maker, "feature_lens"):  # all frames of a batch in one row
        return [lambda: maker.noise(mels, int(_lengths(maker).sum()))]
    fixed = 2 * maker.number("max_source_positions", default=t // 2)
    sound = [maker.number("input_size", "input_dim", default=mels, of=part) for part in maker.everything[1:]]
    stacked = [n * mels for n in (2, 4)]  # neighbouring frames side by side, also with their differences
    others = [width for width in dict.fromkeys((*_widths(maker), *sound, 160, *stacked)) if width != mels]
    return [
        lambda: maker.noise(b, mels, fixed),
        lambda: maker.noise(b, t, mels),
        lambda: maker.noise(b, mels, t),
        *[lambda w=w: maker.noise(b, t, w) for w in others],
        lambda: maker.noise(b, 1, 1001, mels),
    ]


def _waves(maker: Maker) -> list[Make]:
    b, t, hop = maker.batch, maker.time, _hop(maker)
    wave = [lambda: maker.noise(b, 320 * t + 80), lambda: maker.noise(b, hop * t)]
    channels = maker.number("audio_channels", "channels", default=1)
    sound = [lambda: maker.noise(b, channels, hop * t)]
    rows = maker.number("max_length", default=8 * t)
    spectrogram = [lambda: maker.noise(b, rows, _mels(maker))]
    if hasattr(maker.config, "num_mel_bins") and not hasattr(maker.config, "conv_dim"):
        return spectrogram + wave
    return sound + wave + spectrogram if hop != _HOP else wave + sound + spectrogram


def _hop(maker: Maker) -> int:
    """Return how many samples make one frame of a codec."""
    for part in maker.everything:
        for name in ("upsampling_ratios", "downsampling_ratios", "upsample_rates", "encoder_ratios"):
            if ratios := getattr(part, name, None):
                return math.prod(ratios)
    return _HOP


def _frames(maker: Maker) -> torch.Tensor:
    """Return how many mel frames each sound has: whole windows where the model cuts it into some."""
    window = 2 * maker.number("n_window", default=4)
    return torch.full((maker.batch,), -(-8 * maker.time // window) * window)


def _lengths(maker: Maker) -> torch.Tensor:
    """Return the lengths of sounds that follow each other in one row."""
    longest = 2 * maker.number("max_source_positions", default=4 * maker.time)
    return torch.full((maker.batch,), min(8 * maker.time, longest))


def _mel_mask(maker: Maker) -> list[Make]:
    fixed = 2 * maker.number("max_source_positions", default=4 * maker.time)
    return [lambda: maker.ones(maker.batch, fixed), lambda: maker.ones(maker.batch, int(_frames(maker)[0]))]


# states and series


def _states(maker: Maker) -> list[Make]:
    """Return [B, T, width] and [B, width, T] for every width the configuration names, its own first."""
    b, t = maker.batch, maker.time
    own = maker.number("hidden_size", "d_model", "embed_dim", "hidden_dim", default=64)
    widths = dict.fromkeys([own, *_widths(maker)])
    rows = [lambda w=w: maker.noise(b, t, w) for w in widths]
    return rows + [lambda w=w: maker.noise(b, w, t) for w in widths]


def _widths(maker: Maker) -> list[int]:
    named = re.compile(r"dim$|size$|channels$|bins$|mels$|features$|n_embd")
    return [v for k, v in vars(maker.config).items() if named.search(k) and type(v) is int and 4 <= v <= 4096]


def _hidden(maker: Maker) -> list[Make]:
    if getattr(maker.model, "main_input_name", None) == "pixel_values":
        return [*_pixels(maker), *_states(maker)]
    if _has(maker, "grid_thw"):
        return [lambda: maker.noise(maker.batch * math.prod(_grid(maker)), _patch_values(maker)), *_states(maker)]
    return _states(maker)


def _encoder_states(maker: Maker) -> list[Make]:
    names = ("encoder_hidden_size", "cross_attention_hidden_size", "hidden_size", "d_model")
    return [lambda: maker.noise(maker.batch, maker.time + 3, maker.number(*names, default=64))]


def _past_values(maker: Maker) -> list[Make]:
    length = maker.number("context_length", "prediction_length", default=32)
    inputs = maker.number("num_input_channels", "input_size", default=1)
    return [lambda: maker.noise(maker.batch, length, inputs), lambda: maker.noise(maker.batch, length)]


def _codes(maker: Maker) -> list[Make]:
    count = maker.number("num_codebooks", "num_quantizers", default=8)
    return [lambda: maker.ids(maker.time), lambda: maker.ids(maker.time * count).view(maker.batch, -1, count)]


def _videos(maker: Maker) -> list[Make]:
    frames = maker.number("frames_per_clip", "num_frames", default=_FRAMES)
    side, c = image_side(maker), _channels(maker)
    return [lambda: maker.noise(maker.batch, frames, c, side, side)]


def _has(maker: Maker, *names: str) -> bool:
    return any(name in maker.names for name in names)


_BY_NAME: dict[str, Callable[[Maker], list[Make]]] = {
    "aspect_ratio_ids": _aspect_ids,
    "aspect_ratio_mask": _aspect_mask,
    "audio_codes": _codes,
    "audio_input_features": _mel_frames,
    "chunk_sample_lengths": lambda maker: [lambda: _frames(maker) * maker.number("hop_length", default=160)],
    "encoder_hidden_states": _encoder_states,
    "aftercnn_lens": lambda maker: [lambda: (_lengths(maker) - 1) // 2 + 1],
    "feature_attention_mask": _mel_mask,
    "feature_lens": lambda maker: [lambda: _lengths(maker)],
    "flattened_patches": _flattened,
    "image_attention_mask": _mask_of_images,
    "merge_sizes": _merge_sizes,
    "grid_hws": _grids_2d,
    "grid_thw": _grids,
    "hidden_states": _hidden,
    "high_res_pixel_values": _high_resolution,
    "image": _pixels,
    "image_grid_hw": _grids_2d,
    "image_grid_hws": _grids_2d,
    "image_grid_thw": _grids,
    "image_position_ids": _positions_2d,
    "image_sizes": _image_sizes,
    "input_features": _mel_frames,
    "input_features_mask": _mel_mask,
    "input_values": _waves,
    "past_values": _past_values,
    "pixel_attention_mask": _patch_mask,
    "pixel_position_ids": _positions_2d,
    "pixel_values": _pixels,
    "pixel_values_videos": _videos,
    "spatial_shapes": _grids_2d,
    "target_sizes": _grids_2d,
}
