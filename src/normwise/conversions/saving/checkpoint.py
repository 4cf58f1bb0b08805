"""A checkpoint on disk: one safetensors file, or shards with an index, alone or in a transformers folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normwise.conversions.saving.tensors import Stored, read_header, sha256
from normwise.errors import TargetError

__all__ = ["INDEX", "PICKLES", "Checkpoint"]

INDEX = ".safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".index.json")  # weights of other formats


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Tensors by the names that the files give them.

    Args:
        given: the path that was named.
        folder: the transformers folder it lies in, or nothing.
        files: the shards with their metadata, in the order of the index.
        tensors: of all shards.
        index: of a sharded checkpoint, as it is.
        index_file: where that lies.
    """

    given: Path
    folder: Path | None
    files: Mapping[Path, Mapping[str, str]]
    tensors: Mapping[str, Stored]
    index: Mapping[str, Any] | None = None
    index_file: Path | None = None

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Read the headers.

        Args:
            path: a .safetensors file, an index of shards (.safetensors.index.json), or a folder with one of them.

        Raises:
            TargetError: there is no such file, or it cannot be read.
        """
        path = Path(path).expanduser()
        file = _in_folder(path) if path.is_dir() else path
        if not file.is_file():
            raise TargetError(f"{path}: there is no such file or folder")
        if not file.name.endswith((".safetensors", INDEX)):
            raise TargetError(
                f"{file}: this is neither a .safetensors file nor an index of such; normwise opens no other weights"
            )
        index = _index(file) if file.name.endswith(INDEX) else None
        names = [file.name] if index is None else list(dict.fromkeys(index["weight_map"].values()))
        files, tensors = {}, {}
        for name in names:
            shard = file.parent / name
            if shard.parent != file.parent or not shard.is_file():
                raise TargetError(f"{file}: the shard {name} is missing from this folder")
            found, files[shard] = read_header(shard)
            for key in tensors.keys() & found.keys():
                raise TargetError(f"{shard}: {key} is in two shards, which one counts is unknown")
            tensors |= found
        if index is not None and (differ := sorted(tensors.keys() ^ index["weight_map"].keys())):
            raise TargetError(f"{file}: the index and the shards do not hold the same tensors, for example {differ[0]}")
        folder = path if path.is_dir() else None
        index_file = None if index is None else file
        return cls(given=path, folder=folder, files=files, tensors=tensors, index=index, index_file=index_file)

    def load(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        return self.tensors[key].load()

    def sources(self) -> tuple[Path, ...]:
        """Return every file that holds weights, the index last."""
        return (*self.files, *(() if self.index_file is None else (self.index_file,)))

    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of those by name."""
        return {file.name: sha256(file) for file in self.sources()}

    def size(self) -> int:
        """Return how many bytes the tensors take."""
        return sum(tensor.size for tensor in self.tensors.values())


def _in_folder(folder: Path) -> Path:
    """Return the file that transformers would take."""
    names = sorted(path.name for path in folder.glob("*.safetensors*") if path.is_file())
    for plain in (("model.safetensors",), tuple(n for n in names if n.endswith(INDEX)), tuple(names)):
        there = [name for name in plain if name in names]
        if len(there) == 1:
            return folder / there[0]
    if names:
        raise TargetError(f"{folder}: several checkpoints lie here ({', '.join(names[:3])}); name the file to convert")
    pickles = sorted(path.name for path in folder.iterdir() if path.name.endswith(PICKLES))
    if pickles:
        raise TargetError(
            f"{folder}: the weights are in {pickles[0]}, which normwise never opens, because opening a pickle runs "
            "code; save them as safetensors where you trust them: model.save_pretrained(DIR)"
        )
    raise TargetError(f"{folder}: there are no weights here to convert, no .safetensors file")


def _index(file: Path) -> dict[str, Any]:
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        shards: Iterable[Any] = index["weight_map"].values()
        if all(isinstance(name, str) for name in shards):
            return index
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"{file}: this is no index of shards, it has no weight_map that can be read") from error
    raise TargetError(f"{file}: this is no index of shards, its weight_map names no files")
