"""The reduced numbers of one part of a configuration, by what their names say they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from normwise.targets.hf_depth import BLOCKS, LONGEST_PERIOD, Depth, is_pattern
from normwise.targets.hf_plan import (
    MAIN_WIDTH,
    TOKEN,
    VOCABULARY,
    Plan,
    first_int,
    is_staged,
    main_width,
    read,
    small_image,
)

__all__ = ["Shrinker"]

_HEADS = 4
_MAIN_HEADS = (
    "num_attention_heads", "num_heads", "n_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
_DEPTH = re.compile(r"(^|_)(n_)?(layers?|depth)$|^(num|n)_layers?_|^num_(hidden_)?blocks$")
_NO_DEPTH = re.compile(r"feature|feat_extract|residual|lstm|ind|type|offset|period|interval|head_depth|nextn|kv_shared")
_WIDTH = re.compile(
    r"(^|_)(size|dims?|channels?|width|units|embd|inner|rank|hidden)$|^d_(model|ff|inner|hidden)$|_dim_"
)
_NO_WIDTH = re.compile(
    r"patch|image|kernel|window|vocab|codebook|crop|group|block|chunk|batch|stride|pool|context|sample|num_channels|"
    r"in_chans|audio_channels|merge|grid|type|resolution|position|pos_emb_width|bins|mel|frame|level|buckets|label|tile|cache|feat_|"
    r"query_dim|state_size|d_state|memory_size|target|^in_channels|^input_channels|^output_channels|^out_channels|_bias"
)
_HEAD_COUNT = re.compile(r"heads?$")
_HEAD_DIM = re.compile(r"head_?(dim|size)|d_head$|dim_head$|d_kv$|kv_channels$|^key_dim$|rotary_dim$|^head_size")
_EXPERTS = re.compile(r"(num|n)_(local_|routed_)*experts$")
_TOP_K = re.compile(r"experts_per_tok|moe_topk$|^moe_k$|^moe_top_?k$|^top_k_experts$")
_INDICES = re.compile(r"ind(ex|ice|exe)s$|_ids$|_idxs$|_layers$|_blocks$")
_KINDS = re.compile(r"att|window")  # numbers of the blocks of one kind; others number those that hand something out
_VISION_LAYERS = re.compile(r"^(vision|vit)_.*layers?$")  # numbers of the vision part's blocks, said by another part
_TO_TEXT = {"out_hidden_size", "adapter_out_dim", "output_proj_dims"}  # what a tower hands to the text part
_CAPS = {
    "num_queries": 20, "mm_tokens_per_image": 4, "max_source_positions": 28, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "max_position_embeddings": 1024, "n_positions": 1024,
    "codebook_size": 64, "num_embeddings": 64,
}  # fmt: skip


class Shrinker:
    """The reduced numbers of one part of a model."""

    def __init__(self, config: Any, plan: Plan) -> None:
        self.plan = plan
        self.layers = Depth.of(config)
        self.depth, self.blocks = self.layers.total, self.layers.kept
        self.width = main_width(config) if plan.scale else None
        self.heads = first_int(config, _MAIN_HEADS)
        self.few_heads = min(self.heads or _HEADS, _HEADS)
        if self.width and self.few_heads == 3:
            self.few_heads = 2 if plan.widths[self.width] % 3 else 3
        patch = read(config, "patch_size")
        self.patch = patch if isinstance(patch, int) else None
        self.staged = is_staged(config)
        self.head_ratio = self._head_ratio(config)

    def patterns(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the kinds of the blocks; where their period is too long, thinned so that every kind appears."""
        cut = _thinned if self.layers.period > LONGEST_PERIOD else _first
        named = {
            name: kinds for name, kinds in self.layers.lists.items() if name in fields and isinstance(kinds[0], str)
        }
        return {name: cut(kinds, self.blocks) for name, kinds in named.items()}

    def open_numbers(self, fields: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """Return the head size where the default configuration leaves it open, although the model reads it."""
        if not (self.width and self.heads) or "head_dim" not in fields or vars(config).get("head_dim"):
            return {}
        return {"head_dim": self.plan.widths[self.width] // self.few_heads}

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
        """Return the reduced value of a field."""
        if isinstance(value, list | tuple):
            return type(value)(self._reduce_list(name, list(value)))
        if isinstance(value, dict):
            return self._reduce_rope(value) if name.startswith("rope_") else value
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        return self._reduce_int(name, value)

    def _reduce_int(self, name: str, value: int) -> int:
        if TOKEN.search(name):
            return self.plan.token_ids.get(value, value)
        if value <= 1:
            return value
        if name in _TO_TEXT and self.plan.text:
            return self.plan.text
        if name in _CAPS:
            return min(value, _CAPS[name])
        if "vocab_size" in name:
            return min(value, VOCABULARY + 1)
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
        if name in MAIN_WIDTH or (_WIDTH.search(name) and not _NO_WIDTH.search(name)):
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
        return small_image(value, self.patch or 32)

    def _reduce_list(self, name: str, value: list[Any]) -> list[Any]:
        if not value or isinstance(value[0], bool):
            return value
        if name == "image_grid_pinpoints":
            unit = min(min(pair) for pair in value)
            return [[side * self.plan.side // unit for side in pair] for pair in value]
        if self.depth and len(value) == self.depth and self.depth > BLOCKS and is_pattern(value, kinds=self.depth):
            value = value[: self.blocks]
        if not all(isinstance(item, int) for item in value):
            return value
        if name == "depths" or name in {"blocks_per_stage", "stage_num_blocks", "num_block_repeats"}:
            return [min(item, 2) for item in value]
        if _VISION_LAYERS.search(name) and self.plan.vision is not None:
            return [Depth.of(self.plan.vision).index(item) for item in value]  # one feature each, also twice the same
        if self.depth and _INDICES.search(name) and all(0 <= item <= self.depth for item in value):
            return self.layers.indices(value, kinds=bool(_KINDS.search(name)))
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


def _first(kinds: list[Any], count: int) -> list[Any]:
    return kinds[:count]


def _thinned(kinds: list[Any], count: int) -> list[Any]:
    firsts = sorted({kinds.index(kind) for kind in set(kinds)})[-count:]
    rest = [i for i in range(len(kinds)) if i not in firsts][: count - len(firsts)]
    return [kinds[i] for i in sorted(firsts + rest)]
