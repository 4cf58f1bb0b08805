"""Writes files of weights, sound ones and broken ones, byte by byte."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from normwise.targets.checkpoint.safetensors_header import BITS

Forms = Mapping[str, tuple[str, tuple[int, ...]]]


def sound() -> bytes:
    """Return a file with two norms and a matrix."""
    torch.manual_seed(0)
    return save(
        {
            "layers.0.input_layernorm.weight": 1 + 0.1 * torch.randn(8),
            "layers.0.mlp.weight": torch.randn(8, 8),
            "vision.norm.bias": 0.1 * torch.randn(4),
            "vision.norm.weight": 1 + 0.1 * torch.randn(4),
        },
        metadata={"format": "pt"},
    )


def with_header(header: bytes | Mapping[str, Any], data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a safetensors file with a header that need not be one."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def sparse(path: Path, forms: Forms) -> int:
    """Write a file of zeros that takes no room on the disk, and return how large it looks."""
    reached, header = 0, {}
    for name, (dtype, shape) in forms.items():
        size = math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [reached, reached + size]}
        reached += size
    head = with_header(header)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + reached)
    return len(head) + reached


def sparse_llama(folder: Path, *, shards: int, width: int) -> int:
    """Write a sharded Llama of zeros, two layers a shard, with its index and config.json; return its size."""
    placed: dict[str, str] = {}
    size = 0
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        forms: dict[str, tuple[str, tuple[int, ...]]] = {}
        for layer in (2 * shard, 2 * shard + 1):
            at = f"model.layers.{layer}."
            matrices = {f"self_attn.{q}_proj.weight": (width, width) for q in "qkvo"}
            matrices |= {f"mlp.{q}_proj.weight": (4 * width, width) for q in ("gate", "up", "down")}
            forms |= {at + key: ("BF16", shape) for key, shape in matrices.items()}
            forms |= {
                at + f"{key}.weight": ("BF16", (width,)) for key in ("input_layernorm", "post_attention_layernorm")
            }
        size += sparse(folder / name, forms)
        placed |= dict.fromkeys(forms, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5}))
    return size


def repacked(
    path: Path, change: Any = None, *, method: int = zipfile.ZIP_STORED, extra: Mapping[str, bytes] = {}
) -> None:
    """Write an archive of ``torch.save`` anew: ``change(name, data)`` returns the data of a member, or None."""
    with zipfile.ZipFile(path) as archive:
        members = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            new = data if change is None else change(name, data)
            if new is not None:
                archive.writestr(name, new)
        for name, data in extra.items():
            archive.writestr(name, data)
