"""What a checkpoint holds: all tensors by name and form, and the norms with their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from normwise.rendering import both
from normwise.rendering.numbers import size
from normwise.targets.checkpoint.keys import Keys, norms_of
from normwise.targets.checkpoint.limits import NORM_BYTES, broken
from normwise.targets.checkpoint.safetensors_header import Entry
from normwise.targets.checkpoint.sources import Source

__all__ = ["Stored", "StoredNorm", "stored"]

_DTYPES = {
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredNorm:
    """One norm of a checkpoint."""

    path: str
    keys: Keys
    names: Mapping[str, str]  # of its tensors in the checkpoint, by role
    tensors: Mapping[str, torch.Tensor]  # by role: "weight", "bias", "running_mean", ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """A checkpoint that was read: headers and norms."""

    entries: Mapping[str, Entry]
    norms: tuple[StoredNorm, ...]
    config: Mapping[str, Any] | None
    notes: tuple[str, ...]
    files: int
    size: int  # bytes of these files
    bytes_read: int


def stored(source: Source, path: str, config: Mapping[str, Any] | None, notes: tuple[str, ...]) -> Stored:
    """Read the norms of a source.

    Raises:
        CheckpointError: they are too large, or cannot be read.
    """
    found = list(norms_of(source.entries))
    names = [name for norm in found for name in norm.names.values()]
    wanted = sum(source.entries[n].end - source.entries[n].start for n in names)
    if wanted > NORM_BYTES:
        raise broken("norms-too-large", path, f"{wanted:,} bytes of norms, the limit is {NORM_BYTES:,}")
    data = source.fetch(names)
    norms = tuple(
        StoredNorm(
            path=norm.path,
            keys=norm.keys,
            names=norm.names,
            tensors={said: _tensor(data[name], source.entries[name]) for said, name in norm.names.items()},
        )
        for norm in found
    )
    return Stored(
        entries=source.entries,
        norms=norms,
        config=config,
        notes=(_read_note(source), *source.notes, *notes),
        files=source.files,
        size=source.size,
        bytes_read=source.bytes_read,
    )


def _tensor(data: bytes, entry: Entry) -> torch.Tensor:
    if not data:
        return torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    return torch.frombuffer(bytearray(data), dtype=_DTYPES[entry.dtype]).reshape(entry.shape)


def _read_note(source: Source) -> str:
    read, held = size(source.bytes_read), size(source.size)
    files = "1 file" if source.files == 1 else f"{source.files:,} files"
    return both(
        f"a checkpoint without its model: read {read} of {held} in {files}",
        f"没有模型的检查点：读取了 {source.files:,} 个文件 {held} 中的 {read}",
    )
