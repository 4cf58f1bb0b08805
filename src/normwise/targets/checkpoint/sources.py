"""Where tensors lie: one safetensors file, or many with an index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from normwise.rendering import both
from normwise.targets.checkpoint import json_text
from normwise.targets.checkpoint.files import File, whole
from normwise.targets.checkpoint.limits import HEADER_BYTES, INDEX_BYTES, NAME, SHARDS, broken
from normwise.targets.checkpoint.safetensors_header import Entry, parse

__all__ = ["INDEX", "SUFFIX", "SafetensorsFile", "Sharded", "Source"]

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
_LENGTH = 8  # bytes of the length in front of the header


class Source(Protocol):
    """Tensors by name, of which some are read."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Every tensor."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the report has to know, in both languages."""
        ...

    @property
    def files(self) -> int:
        """How many files hold the tensors."""
        ...

    @property
    def size(self) -> int:
        """How many bytes these files have."""
        ...

    @property
    def bytes_read(self) -> int:
        """How many bytes were read until now."""
        ...

    def fetch(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of some tensors."""
        ...

    def close(self) -> None:
        """Let go of files and processes."""
        ...


class SafetensorsFile:
    """One file, of which the header is read at once and tensors when they are fetched.

    Raises:
        CheckpointError: it is no sound safetensors file.
    """

    notes: tuple[str, ...] = ()
    files = 1

    def __init__(self, path: Path) -> None:
        self._path, self.bytes_read = path, 0
        with File(path) as file:
            self.size = file.size
            if file.size < _LENGTH + 2:
                raise broken("too-short", file.path, f"{file.size} bytes are no safetensors file")
            length = int.from_bytes(file.read(0, _LENGTH), "little")
            if length > HEADER_BYTES:
                raise broken("header-size", file.path, f"a header of {length:,} bytes, the limit is {HEADER_BYTES:,}")
            if length > file.size - _LENGTH:
                raise broken(
                    "header-size", file.path, f"a header of {length:,} bytes in a file of {file.size:,}; copy it again"
                )
            self._data = _LENGTH + length
            self.entries: Mapping[str, Entry] = parse(file.read(_LENGTH, length), file.size - self._data, file.path)
            self.bytes_read = file.bytes_read

    def fetch(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of some tensors; the file is read at their places alone."""
        wanted = sorted(((name, self.entries[name]) for name in names), key=lambda item: item[1].start)
        with File(self._path) as file:
            found = {name: file.read(self._data + entry.start, entry.end - entry.start) for name, entry in wanted}
            self.bytes_read += file.bytes_read
        return found

    def close(self) -> None:
        """Do nothing: the file is open only while it is read."""


class Sharded:
    """The files that an index names, all in its folder.

    Raises:
        CheckpointError: the index or a shard is not sound, or the two contradict each other.
    """

    def __init__(self, index: Path) -> None:
        data, self._read = whole(index, INDEX_BYTES)
        self._index_size = len(data)
        self._placed = _weight_map(json_text.parse(data, str(index), most=INDEX_BYTES), str(index))
        self._shards: dict[str, SafetensorsFile] = {}
        self.entries: dict[str, Entry] = {}
        names = defaultdict[str, list[str]](list)
        for tensor, shard in self._placed.items():
            names[shard].append(tensor)
        if len(names) > SHARDS:
            raise broken("too-many-shards", str(index), f"{len(names):,} shards, the limit is {SHARDS:,}")
        unnamed = 0
        for shard, tensors in sorted(names.items()):
            file = self._open(index, shard)
            lacking = [t for t in tensors if t not in file.entries]
            if lacking:
                more = f" and {len(lacking) - 1:,} more" if len(lacking) > 1 else ""
                raise broken("tensor-missing", str(index), f"{shard} lacks the tensor {lacking[0]!r:.120}{more}")
            unnamed += len(file.entries) - len(tensors)
            self.entries.update((t, file.entries[t]) for t in tensors)
        self.notes: tuple[str, ...] = (_unnamed(unnamed),) if unnamed else ()

    def _open(self, index: Path, shard: str) -> SafetensorsFile:
        path = index.parent / shard
        if not path.exists():
            raise broken("shard-missing", str(index), f"the shard {shard:.200} is not there; download it again")
        self._shards[shard] = SafetensorsFile(path)
        return self._shards[shard]

    @property
    def files(self) -> int:
        """How many shards there are."""
        return len(self._shards)

    @property
    def size(self) -> int:
        """The bytes of the index and of all shards."""
        return self._index_size + sum(s.size for s in self._shards.values())

    @property
    def bytes_read(self) -> int:
        """The bytes read of the index and of all shards."""
        return self._read + sum(s.bytes_read for s in self._shards.values())

    def fetch(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of some tensors."""
        by_shard = defaultdict[str, list[str]](list)
        for name in names:
            by_shard[self._placed[name]].append(name)
        found: dict[str, bytes] = {}
        for shard, held in by_shard.items():
            found |= self._shards[shard].fetch(held)
        return found

    def close(self) -> None:
        """Do nothing: the files are open only while they are read."""


def _weight_map(held: object, path: str) -> dict[str, str]:
    found = held.get("weight_map") if isinstance(held, dict) else None
    if not isinstance(found, dict) or not found:
        raise broken("bad-index", path, "the index has no weight_map from tensors to files")
    for tensor, shard in found.items():
        if len(tensor) > NAME:
            raise broken("name-too-long", path, f"a name of {len(tensor):,} characters, the limit is {NAME}")
        if not isinstance(shard, str) or not _plain(shard):
            raise broken("bad-shard-name", path, f"the index names {shard!r:.120}, which is no file {SUFFIX} beside it")
    return found


def _plain(name: str) -> bool:
    """Whether a name is that of a safetensors file in the same folder."""
    if not name.endswith(SUFFIX) or len(name) > 255 or not name.isprintable():
        return False
    return not any(c in name for c in "/\\:") and not name.startswith(".")


def _unnamed(count: int) -> str:
    return both(
        f"{count:,} tensors of the shards are not in the index and were left out",
        f"分片中有 {count:,} 个张量不在索引里，未予考虑",
    )
