"""What the reduced configurations of all parts of one model have in common: widths, token ids, image size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "MAIN_WIDTH",
    "TOKEN",
    "VOCABULARY",
    "Plan",
    "first_int",
    "is_staged",
    "main_width",
    "parts",
    "read",
    "small_image",
    "sub_configs",
]

VOCABULARY = 311
_WIDTHS = tuple(range(64, 64 + 32 * 14, 32))  # every part of a model gets a width of its own

MAIN_WIDTH = ("hidden_size", "d_model", "embed_dim", "hidden_dim", "dim", "n_embd", "emb_dim", "width")
_STAGES = (
    "depths", "hidden_sizes", "embed_dims", "block_configs", "num_block_repeats", "blocks_per_stage", "block_sizes",
    "embed_dim", "stage_num_blocks", "depth", "num_heads", "encoder_hidden_sizes", "upsampling_ratios",
    "upsample_rates", "channel_multiplier", "stage_configs", "keypoint_encoder_sizes", "downsampling_ratios",
    "num_attention_heads",
)  # fmt: skip
_PLACEHOLDERS = (
    "image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "video_token_id", "video_token_index",
)  # fmt: skip
TOKEN = re.compile(r"token_?(id|index|idx)s?(_|$)|_token$|_tok_id$|_index$")


def parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and every configuration inside it."""
    yield config
    for sub in sub_configs(config).values():
        yield from parts(sub)


def sub_configs(config: Any) -> dict[str, Any]:
    """Return the configurations directly inside a configuration, by name."""
    from transformers import PreTrainedConfig

    return {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is the same in all parts of one model."""

    widths: Mapping[int, int]  # main width of a part -> its reduced one
    token_ids: Mapping[int, int]
    scale: bool  # whether widths are reduced at all
    side: int  # of a reduced image of the vision part, in pixels
    text: int | None  # reduced width of the text part of a multimodal model
    vision: Any  # configuration of the vision part, not reduced; None where there is none

    def tokens(self, config: Any, fields: Mapping[str, Any]) -> dict[str, int]:
        """Return ids for the placeholder tokens that a multimodal configuration leaves open."""
        if not sub_configs(config):
            return {}
        names = [name for name in _PLACEHOLDERS if name in fields and vars(config).get(name) is None]
        return {name: VOCABULARY - 80 - n for n, name in enumerate(names)}

    @classmethod
    def of(cls, config: Any, *, widths: bool) -> Plan:
        """Make the plan of a whole model; ``widths`` tells whether widths are reduced."""
        everything = list(parts(config))
        mains = sorted({w for part in everything if (w := main_width(part))})
        ids = sorted({i for part in everything for i in _big_token_ids(part)}, reverse=True)
        narrow = {old: min(old, _WIDTHS[min(n, len(_WIDTHS) - 1)]) for n, old in enumerate(mains)} if widths else {}
        return cls(
            widths=narrow,
            text=_text_width(config, narrow),
            side=_image_side(config),
            vision=vars(config).get("vision_config"),
            token_ids={old: VOCABULARY - 1 - n for n, old in enumerate(ids)},
            scale=widths,
        )


def _image_side(config: Any) -> int:
    vision = vars(config).get("vision_config") or config
    patch, image = read(vision, "patch_size"), read(vision, "image_size")
    return small_image(image, patch) if isinstance(image, int) and isinstance(patch, int) else 64


def small_image(side: int, patch: int) -> int:
    """Return the side of a small image of at least 4 x 4 patches, an even number of them."""
    return min(side, -(-max(4 * patch, 64) // (2 * patch)) * 2 * patch)


def _text_width(config: Any, widths: Mapping[int, int]) -> int | None:
    """Return the reduced width of the text part of a multimodal model."""
    text = vars(config).get("text_config")
    return None if text is None else widths.get(main_width(text) or 0)


def read(config: Any, name: str) -> Any:
    """Return a field as it is stored; asking the object itself raises where layers may differ."""
    return vars(config).get(type(config).attribute_map.get(name, name))


def first_int(config: Any, names: tuple[str, ...]) -> int | None:
    """Return the first positive whole number that is stored under one of the names."""
    values = (read(config, name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def main_width(config: Any) -> int | None:
    """Return the width of the residual stream; None where stages have different ones."""
    return None if is_staged(config) else first_int(config, MAIN_WIDTH)


def is_staged(config: Any) -> bool:
    """Tell whether widths and resolutions are tied to each other (Swin, ConvNeXt, codecs): they stay then."""
    return any(isinstance(read(config, name), list | tuple) for name in _STAGES)


def _big_token_ids(config: Any) -> Iterator[int]:
    for name, value in vars(config).items():
        if TOKEN.search(name):
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, int) and not isinstance(item, bool) and item >= VOCABULARY - 80:
                    yield item
