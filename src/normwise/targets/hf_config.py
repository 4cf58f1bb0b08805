"""A small configuration of any transformers model type: depth and widths reduced, structure kept.

The rules go by what a number is (a depth, a width, a head count, a token id), read from its name, and
never by the model type; what they cannot know is in the one table of ``hf_recipes``. A configuration is
shrunk by calling its class again with the reduced numbers, so that everything it derives (layer patterns,
head sizes) is derived anew. Booleans and strings, which decide structure, are never touched.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from normwise.targets.hf_recipes import recipe_for

__all__ = ["build_config", "parts"]

_BLOCKS = 4
_LONGEST_PERIOD = 12  # of a pattern of different blocks that is still kept whole
_VOCABULARY = 311
_HEADS = 4
_WIDTHS = tuple(range(64, 64 + 32 * 14, 32))  # every part of a model gets a width of its own

_MAIN_WIDTH = ("hidden_size", "d_model", "embed_dim", "hidden_dim", "dim", "n_embd", "emb_dim", "width")
_MAIN_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads")  # fmt: skip
_MAIN_DEPTH = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers", "layers")  # fmt: skip
_STAGES = (
    "depths", "hidden_sizes", "embed_dims", "block_configs", "num_block_repeats", "blocks_per_stage", "block_sizes",
    "embed_dim", "stage_num_blocks", "depth", "num_heads", "encoder_hidden_sizes", "upsampling_ratios",
    "upsample_rates", "stage_configs", "keypoint_encoder_sizes", "downsampling_ratios", "num_attention_heads",
)  # fmt: skip
_LEFT_ALONE = {"id2label", "label2id", "num_labels", "chunk_size_feed_forward", "problem_type", "architectures", "dtype"}

_DEPTH = re.compile(r"(^|_)(n_)?(layers?|depth)$|^(num|n)_layers?_|^num_(hidden_)?blocks$")
_NO_DEPTH = re.compile(r"feature|feat_extract|residual|lstm|ind|type|offset|period|interval|head_depth|nextn|kv_shared")
_WIDTH = re.compile(r"(^|_)(size|dims?|channels?|width|units|embd|inner|rank|hidden)$|^d_(model|ff|inner|hidden)$|_dim_")
_NO_WIDTH = re.compile(
    r"patch|image|kernel|window|vocab|codebook|crop|group|block|chunk|batch|stride|pool|context|sample|num_channels|"
    r"in_chans|audio_channels|merge|grid|type|resolution|position|bins|mel|frame|level|buckets|label|tile|cache|feat_|"
    r"query_dim|state_size|d_state|memory_size|target|^in_channels|^input_channels|^output_channels|^out_channels|_bias"
)
_HEAD_COUNT = re.compile(r"heads?$")
_HEAD_DIM = re.compile(r"head_?(dim|size)|d_head$|dim_head$|d_kv$|kv_channels$|^key_dim$|rotary_dim$|^head_size")
_TOKEN = re.compile(r"token_?(id|index|idx)s?(_|$)|_token$|_tok_id$|_index$")
_EXPERTS = re.compile(r"(num|n)_(local_|routed_)*experts$")
_TOP_K = re.compile(r"experts_per_tok|moe_topk$|^moe_k$|^moe_top_?k$|^top_k_experts$")
_INDICES = re.compile(r"ind(ex|ice|exe)s$|_ids$|_idxs$|_layers$|_blocks$")
_PLACEHOLDERS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "video_token_id", "video_token_index")  # fmt: skip
_TO_TEXT = {"out_hidden_size", "adapter_out_dim", "output_proj_dims"}  # what a tower hands to the text part
_CAPS = {
    "num_queries": 20, "max_source_positions": 26, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "max_position_embeddings": 1024, "n_positions": 1024, "codebook_size": 64,
    "num_embeddings": 64,
}  # fmt: skip


def build_config(model_type: str, *, reduced: bool = True, widths: bool = True) -> Any:
    """Return the default configuration of a type, or the small one of the same structure.

    Args:
        model_type: a key of transformers' ``CONFIG_MAPPING``.
        reduced: shrink depth, widths, vocabulary, heads, experts and images.
        widths: False keeps every width and reduces the rest.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    recipe = recipe_for(model_type)
    config = recipe.default() if recipe.default else CONFIG_MAPPING[model_type]()
    return _rebuild(config, _Plan.of(config, widths=widths)) if reduced else config


def parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and every configuration inside it."""
    yield config
    for sub in _sub_configs(config).values():
        yield from parts(sub)


def _sub_configs(config: Any) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    return {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is the same in all parts of one model."""

    widths: Mapping[int, int]  # main width of a part -> its reduced one
    token_ids: Mapping[int, int]
    scale: bool  # whether widths are reduced at all
    side: int  # of a reduced image of the vision part, in pixels
    text: int | None  # reduced width of the text part of a multimodal model

    def tokens(self, config: Any, fields: Mapping[str, Any]) -> dict[str, int]:
        """Return ids for the placeholder tokens that a multimodal configuration leaves open."""
        if not _sub_configs(config):
            return {}
        names = [name for name in _PLACEHOLDERS if name in fields and vars(config).get(name) is None]
        return {name: _VOCABULARY - 80 - n for n, name in enumerate(names)}

    @classmethod
    def of(cls, config: Any, *, widths: bool) -> _Plan:
        everything = list(parts(config))
        mains = sorted({w for part in everything if (w := _main_width(part))})
        ids = sorted({i for part in everything for i in _big_token_ids(part)}, reverse=True)
        narrow = {old: min(old, _WIDTHS[min(n, len(_WIDTHS) - 1)]) for n, old in enumerate(mains)} if widths else {}
        return cls(
            widths=narrow,
            text=_text_width(config, narrow),
            side=_image_side(config),
            token_ids={old: _VOCABULARY - 1 - n for n, old in enumerate(ids)},
            scale=widths,
        )


def _image_side(config: Any) -> int:
    vision = vars(config).get("vision_config") or config
    patch, image = _read(vision, "patch_size"), _read(vision, "image_size")
    return _small_image(image, patch) if isinstance(image, int) and isinstance(patch, int) else 64


def _small_image(side: int, patch: int) -> int:
    return min(side, -(-max(4 * patch, 64) // (2 * patch)) * 2 * patch)


def _text_width(config: Any, widths: Mapping[int, int]) -> int | None:
    """Return the reduced width of the text part of a multimodal model."""
    text = vars(config).get("text_config")
    return None if text is None else widths.get(_main_width(text) or 0)


def _read(config: Any, name: str) -> Any:
    """Return a field as it is stored; asking the object itself raises where layers may differ."""
    return vars(config).get(type(config).attribute_map.get(name, name))


def _first_int(config: Any, names: tuple[str, ...]) -> int | None:
    values = (_read(config, name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _main_width(config: Any) -> int | None:
    return None if _staged(config) else _first_int(config, _MAIN_WIDTH)


def _staged(config: Any) -> bool:
    """Tell whether widths and resolutions are tied to each other (Swin, ConvNeXt, codecs): they stay then."""
    return any(isinstance(_read(config, name), list | tuple) for name in _STAGES)


def _big_token_ids(config: Any) -> Iterator[int]:
    for name, value in vars(config).items():
        if _TOKEN.search(name):
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, int) and not isinstance(item, bool) and item >= _VOCABULARY - 80:
                    yield item


def _rebuild(config: Any, plan: _Plan) -> Any:
    cls = type(config)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init and f.name[0] != "_" and f.name not in _LEFT_ALONE}
    shrinker = _Shrinker(config, plan)
    fresh = _fresh(cls)
    given: dict[str, Any] = {}
    subs = _sub_configs(config)
    for name, field in fields.items():
        if name in subs:
            given[name] = _rebuild(_substitute(subs[name]), plan)
            continue
        value = _read(config, name)
        default = _default(field)
        if default is None and fresh is not None and value == _read(fresh, name) and not _sections(value):
            continue  # derived by the class: it is derived anew
        new = shrinker.reduce(name, value)
        if new != default:
            given[name] = new
    given |= shrinker.patterns(fields) | shrinker.outputs(config, fresh) | plan.tokens(config, fields)
    recipe = recipe_for(config.model_type)
    given |= recipe.always | (recipe.config if plan.scale else {})
    if recipe.adjust:
        recipe.adjust(given, config)
    return cls(**given)


def _computed_patterns(config: Any) -> dict[str, Any]:
    names = ("layer_types", "layers_block_type")
    return {name: getattr(config, name, None) for name in names if name not in vars(config)}


def _fresh(cls: type) -> Any:
    try:
        return cls()
    except Exception:
        return None


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _sections(value: Any) -> bool:
    """Tell whether rotary angles are dealt out to axes by numbers that belong to one head size."""
    return isinstance(value, dict) and any(str(key).endswith("_section") for key in value)


def _substitute(config: Any) -> Any:
    """Return a ResNet in the place of a backbone that only timm can build."""
    import importlib.util

    if config.model_type != "timm_backbone" or importlib.util.find_spec("timm"):
        return config
    from transformers import ResNetConfig

    wanted = list(config.out_indices or [-1])
    return ResNetConfig(out_indices=[i if i >= 0 else 5 + i for i in wanted])


class _Shrinker:
    """The reduced numbers of one part."""

    def __init__(self, config: Any, plan: _Plan) -> None:
        self.plan = plan
        self.depth = _first_int(config, _MAIN_DEPTH)
        self.lists = {
            name: list(value)
            for name, value in (vars(config) | _computed_patterns(config)).items()
            if isinstance(value, list | tuple) and len(value) == self.depth and _is_pattern(value)
        }
        self.period = max((_covering_prefix(kinds) for kinds in self.lists.values()), default=0)
        self.blocks = max(_BLOCKS, self.period) if self.period <= _LONGEST_PERIOD else _BLOCKS
        self.width = _main_width(config) if plan.scale else None
        self.heads = _first_int(config, _MAIN_HEADS)
        self.few_heads = min(self.heads or _HEADS, _HEADS)
        if self.width and self.few_heads == 3:
            self.few_heads = 2 if plan.widths[self.width] % 3 else 3
        patch = _read(config, "patch_size")
        self.patch = patch if isinstance(patch, int) else None
        self.staged = _staged(config)
        self.head_ratio = self._head_ratio(config)

    def patterns(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the kinds of the blocks; where their period is too long, thinned so that every kind appears."""
        cut = _thinned if self.period > _LONGEST_PERIOD else _first
        named = {name: kinds for name, kinds in self.lists.items() if name in fields and isinstance(kinds[0], str)}
        return {name: cut(kinds, self.blocks) for name, kinds in named.items()}

    def outputs(self, config: Any, fresh: Any) -> dict[str, Any]:
        """Return the stages that a backbone hands out: as many as before, spread over the blocks that are left."""
        wanted = vars(config).get("_out_indices")
        if not wanted or (fresh is not None and wanted == vars(fresh).get("_out_indices") and self.staged):
            return {}
        wanted = [int(i) for i in wanted]
        if self.staged or not self.depth or self.depth <= self.blocks:
            return {"out_indices": wanted}
        total = len(config.stage_names)
        spread = [max(1, round((i % total) * self.blocks / self.depth)) for i in wanted]
        distinct = len(set(spread)) == len(spread)
        return {"out_indices": spread if distinct else list(range(self.blocks + 1))[-len(wanted) :]}

    def _head_ratio(self, config: Any) -> float | None:
        """Return by how much a head, or its rotated part, got narrower."""
        if not (self.width and self.heads):
            return None
        for name in ("qk_rope_head_dim", "head_dim"):
            if isinstance(size := vars(config).get(name), int) and size:
                return self._reduce_width(name, size) / size
        return self.plan.widths[self.width] * self.heads / (self.width * self.few_heads)

    def reduce(self, name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._reduce_list(name, list(value)))
        if isinstance(value, dict):
            return self._reduce_rope(value) if name.startswith("rope_") else value
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        return self._reduce_int(name, value)

    def _reduce_int(self, name: str, value: int) -> int:
        if _TOKEN.search(name):
            return self.plan.token_ids.get(value, value)
        if value <= 1:
            return value
        if name in _TO_TEXT and self.plan.text:
            return self.plan.text
        if name in _CAPS:
            return min(value, _CAPS[name])
        if "vocab_size" in name:
            return min(value, _VOCABULARY + 1)
        if _DEPTH.search(name) and not _NO_DEPTH.search(name):
            return min(value, self.blocks)
        if _EXPERTS.search(name):
            return min(value, 8)
        if _TOP_K.search(name):
            return min(value, 2)
        if name == "image_size":
            return self._image(value)
        return self._reduce_width(name, value) if self.width else value

    def _reduce_width(self, name: str, value: int) -> int:
        assert self.width
        if _HEAD_COUNT.search(name):
            return self._head_count(value)
        narrow = self.plan.widths[self.width]
        if _HEAD_DIM.search(name) and self.heads:
            return _rounded(value * narrow * self.heads / (self.width * self.few_heads), 4)
        if name in _MAIN_WIDTH or (_WIDTH.search(name) and not _NO_WIDTH.search(name)):
            if value in self.plan.widths:
                return self.plan.widths[value]
            return _rounded(value * narrow / self.width, 8)
        return value

    def _head_count(self, value: int) -> int:
        if not self.heads or value == self.heads:
            return self.few_heads if self.heads else min(value, _HEADS)
        scaled = max(2, value * self.few_heads // self.heads)
        return min(value, 1 << (scaled.bit_length() - 1))

    def _image(self, value: int) -> int:
        if self.staged:
            return min(value, 224)
        return _small_image(value, self.patch or 32)

    def _reduce_list(self, name: str, value: list[Any]) -> list[Any]:
        if not value or isinstance(value[0], bool):
            return value
        if name == "image_grid_pinpoints":
            unit = min(min(pair) for pair in value)
            return [[side * self.plan.side // unit for side in pair] for pair in value]
        if self.depth and len(value) == self.depth and self.depth > _BLOCKS and _is_pattern(value, kinds=self.depth):
            value = value[: self.blocks]
        if not all(isinstance(item, int) for item in value):
            return value
        if name == "depths" or name in {"blocks_per_stage", "stage_num_blocks", "num_block_repeats"}:
            return [min(item, 2) for item in value]
        if self.depth and _INDICES.search(name) and all(0 <= item <= self.depth for item in value):
            return sorted({min(item * self.blocks // self.depth, self.blocks - 1) for item in value})
        return [self._reduce_int(name, item) for item in value]

    def _reduce_rope(self, rope: dict[str, Any]) -> dict[str, Any]:
        if self.head_ratio is None:
            return rope
        return {key: self._reduce_rope_value(key, item, self.head_ratio) for key, item in rope.items()}

    def _reduce_rope_value(self, key: str, item: Any, factor: float) -> Any:
        if isinstance(item, dict):
            return {k: self._reduce_rope_value(k, v, factor) for k, v in item.items()}
        if key.endswith("_section"):
            total = round(sum(item) * factor)
            share = [max(1, round(part * factor)) for part in item]
            return [total - sum(share[1:]), *share[1:]]
        if key in {"short_factor", "long_factor"}:
            return item[: max(1, round(len(item) * factor))]
        return item


def _rounded(value: float, multiple: int) -> int:
    exact = int(value)
    if exact == value and exact % min(multiple, 4) == 0 and exact >= multiple:
        return exact
    return max(multiple, round(value / multiple) * multiple)


def _is_pattern(value: Any, kinds: int = 6) -> bool:
    return all(isinstance(item, str | int | float) for item in value) and len(set(value)) <= kinds


def _covering_prefix(kinds: list[Any]) -> int:
    """Return how many of the first blocks show every kind of block."""
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def _first(kinds: list[Any], count: int) -> list[Any]:
    return kinds[:count]


def _thinned(kinds: list[Any], count: int) -> list[Any]:
    firsts = sorted({kinds.index(kind) for kind in set(kinds)})[-count:]
    rest = [i for i in range(len(kinds)) if i not in firsts][: count - len(firsts)]
    return [kinds[i] for i in sorted(firsts + rest)]
