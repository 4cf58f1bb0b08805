"""What will be written: shards of tensors, from memory or made while they are written, and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from normwise.conversions.saving.publishing import write_text
from normwise.conversions.saving.tensors import PT, Written, write

__all__ = ["SHARD_SIZE", "Shard", "Weights", "in_memory"]

SHARD_SIZE = 5_000_000_000  # bytes, as transformers has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file."""

    name: str
    tensors: Mapping[str, Written]
    metadata: Mapping[str, str] = field(default_factory=lambda: PT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All files.

    Args:
        shards: in order.
        index_name: of the index; None for one file alone.
        index: the index of the source, whose other fields are kept.
    """

    shards: tuple[Shard, ...]
    index_name: str | None = None
    index: Mapping[str, Any] = field(default_factory=dict)

    def size(self) -> int:
        """Return how many bytes the tensors take."""
        return sum(tensor.size for shard in self.shards for tensor in shard.tensors.values())

    def renamed(self, name: Callable[[str], str]) -> Weights:
        """Return the same under other file names."""
        shards = tuple(
            Shard(name=name(shard.name), tensors=shard.tensors, metadata=shard.metadata) for shard in self.shards
        )
        return Weights(shards=shards, index_name=self.index_name and name(self.index_name), index=self.index)

    def write(self, folder: Path, advance: Callable[[int], object]) -> dict[str, str]:
        """Write every file, the index last; return their SHA-256 by name."""
        hashes = {s.name: write(folder / s.name, s.tensors, s.metadata, advance) for s in self.shards}
        if self.index_name is not None:
            write_text(folder / self.index_name, self._index())
        return hashes

    def _index(self) -> str:
        metadata = {**self.index.get("metadata", {}), "total_size": self.size()}
        if "total_parameters" in metadata:
            metadata["total_parameters"] = sum(
                torch.Size(tensor.shape).numel() for shard in self.shards for tensor in shard.tensors.values()
            )
        weight_map = {key: shard.name for shard in self.shards for key in shard.tensors}
        order = dict.fromkeys(key for key in self.index.get("weight_map", ()) if key in weight_map)
        weight_map = {key: weight_map[key] for key in order | dict.fromkeys(weight_map)}
        return json.dumps({**self.index, "metadata": metadata, "weight_map": weight_map}, indent=2) + "\n"


def in_memory(state: Mapping[str, torch.Tensor], limit: int = SHARD_SIZE, *, share: bool = True) -> Weights:
    """Return the shards of a state dict.

    Args:
        state: it stays as it is, and must until it was written.
        limit: bytes a shard; a tensor that is larger has one of its own.
        share: store a tensor that has several names under the first only.
    """
    shards: list[dict[str, Written]] = [{}]
    seen, size = set(), 0
    for key, tensor in state.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if share and tensor.numel() and place in seen:
            continue
        seen.add(place)
        written = Written.made(tensor.dtype, tensor.shape, lambda tensor=tensor: tensor)
        if size + written.size > limit and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][key] = written
        size += written.size
    if len(shards) == 1:
        return Weights(shards=(Shard(name="model.safetensors", tensors=shards[0]),))
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    made = tuple(Shard(name=name, tensors=tensors) for name, tensors in zip(names, shards, strict=True))
    return Weights(shards=made, index_name="model.safetensors.index.json")
