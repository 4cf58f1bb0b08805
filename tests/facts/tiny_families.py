"""Six tiny transformers models, one for each thing that might disturb a map, with inputs of any size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("bert", "llama", "gpt2", "t5", "gemma2", "vit")
COMMON = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
SMALL: dict[str, dict[str, Any]] = {
    "bert": {**COMMON, "vocab_size": 50, "max_position_embeddings": 64},
    "llama": {**COMMON, "vocab_size": 50, "num_key_value_heads": 2, "pad_token_id": 0},
    "gpt2": {
        "n_embd": 24,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 50,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 1,
    },
    "t5": {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 3, "num_heads": 4, "vocab_size": 50},
    "gemma2": {**COMMON, "vocab_size": 50, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0},
    "vit": {**COMMON, "image_size": 24, "patch_size": 8},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to build and call a family; the first is the reference."""

    name: str
    batch: int = 2
    time: int = 12
    config: dict[str, Any] | None = None
    dtype: torch.dtype = torch.float32
    train: bool = False
    cache: bool | None = None
    padded: bool = False
    fake: bool = False

    def suits(self, family: str) -> bool:
        """Say whether this variant means anything for a family."""
        if family == "gemma2" and self.name == "sdpa attention":
            return False  # soft-capped scores: transformers refuses
        return not (family == "vit" and (self.padded or self.cache is not None or self.name.startswith("t=")))


REFERENCE = Variant(name="reference")
VARIANTS = (
    Variant(name="train", train=True),
    Variant(name="cache off", cache=False),
    Variant(name="cache on", cache=True),
    Variant(name="left padding", padded=True),
    Variant(name="sdpa attention", config={"attn_implementation": "sdpa"}),
    Variant(name="eager attention", config={"attn_implementation": "eager"}),
    Variant(name="b=1", batch=1),
    Variant(name="t=1", batch=1, time=1),
    Variant(name="t=7", batch=1, time=7),
    Variant(name="t=33", batch=3, time=33),
    Variant(name="bf16", dtype=torch.bfloat16),
    Variant(name="fake", fake=True),
    Variant(name="fake bf16", fake=True, dtype=torch.bfloat16),
)


def build(family: str, variant: Variant = REFERENCE) -> tuple[nn.Module, dict[str, Tensor | bool]]:
    """Return a model and its keyword inputs."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL[family])
    model = AutoModel.from_config(config, **(variant.config or {})).to(variant.dtype).train(variant.train)
    inputs = _inputs(family, variant)
    return _faked(model, inputs) if variant.fake else (model, inputs)


def _faked(model: nn.Module, inputs: dict[str, Tensor | bool]) -> tuple[nn.Module, dict[str, Tensor | bool]]:
    """Return copies whose tensors have a shape and a dtype, but no storage."""
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    with FakeCopyMode(FakeTensorMode()):
        return copy.deepcopy((model, inputs))


def _inputs(family: str, variant: Variant) -> dict[str, Tensor | bool]:
    if family == "vit":
        return {"pixel_values": torch.rand(variant.batch, 3, 24, 24).to(variant.dtype)}
    ids = torch.arange(variant.batch * variant.time).view(variant.batch, variant.time) % 47 + 3
    inputs: dict[str, Tensor | bool] = {"input_ids": ids}
    if family == "t5":
        inputs["decoder_input_ids"] = ids[:, : max(1, variant.time - 3)]
    if variant.padded:
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        inputs["attention_mask"] = mask
    if variant.cache is not None and family != "bert":
        inputs["use_cache"] = variant.cache
    return inputs


Map = tuple[tuple[Any, ...], list[tuple[Any, ...]]]


def fingerprint(report: Any, path: Callable[[str], str] = str) -> Map:
    """Return all that must not depend on mode, shape, dtype or names: everything but the evidence."""
    placement = report.placement
    stacks = tuple(
        (str(s.kind), s.name, s.depth, s.sublayers, s.starts_with_norm, s.final_norm) for s in placement.stacks
    )
    norms = [
        (path(s.path), str(s.placement), s.stack, s.layer, s.calls, s.spec and _form(s.spec)) for s in report.norms
    ]
    return (stacks, placement.embedding_norm, placement.qk_norm, placement.inner_norm), norms


def _form(spec: Any) -> tuple[Any, ...]:
    return (str(spec.kind), spec.axes, spec.eps, spec.eps_inside, str(spec.weight), spec.weight_offset, spec.bias)
