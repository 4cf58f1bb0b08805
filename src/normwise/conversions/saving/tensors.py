"""Tensors in safetensors files, one at a time: where they lie, and a writer that holds one of them in memory.

The format is eight bytes of length, a header of JSON, and the raw numbers. Files are read by plain reads and not
through a memory map: a map would count as memory, and turns to garbage if the file is rewritten meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normwise.errors import TargetError

__all__ = ["PT", "Stored", "Written", "code_of", "dtype_of", "numbers", "read_header", "sha256", "write"]

PT = {"format": "pt"}  # the metadata that transformers asks for
PIECE = 1 << 22  # bytes that are copied at once
_CODES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_OF_DTYPE = {dtype: code for code, dtype in _CODES.items()}


def dtype_of(code: str) -> torch.dtype:
    """Return the dtype of a safetensors code.

    Raises:
        TargetError: torch has none.
    """
    if code not in _CODES:
        raise TargetError(f"a tensor of dtype {code} cannot be converted: known are {', '.join(_CODES)}")
    return _CODES[code]


def code_of(dtype: torch.dtype) -> str:
    """Return the safetensors code of a dtype.

    Raises:
        ValueError: safetensors has none.
    """
    if dtype not in _OF_DTYPE:
        raise ValueError(f"safetensors holds no {dtype}: known are {', '.join(map(str, _OF_DTYPE))}")
    return _OF_DTYPE[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where a tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    size: int  # bytes

    def pieces(self) -> Iterator[bytes]:
        """Yield its bytes."""
        left = self.size
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            while left:
                piece = stream.read(min(PIECE, left))
                if not piece:
                    raise TargetError(f"{self.file}: the file was cut off while it was read")
                left -= len(piece)
                yield piece

    def rows(self, first: int, last: int) -> Stored:
        """Return a range of its rows, which lie together."""
        row = self.size // self.shape[0]
        shape, size = (last - first, *self.shape[1:]), (last - first) * row
        return Stored(file=self.file, dtype=self.dtype, shape=shape, start=self.start + first * row, size=size)

    def load(self) -> torch.Tensor:
        """Return it as a tensor of its own."""
        dtype = dtype_of(self.dtype)
        if not self.size:
            return torch.empty(self.shape, dtype=dtype)
        held = bytearray(self.size)
        view, at = memoryview(held), 0
        for piece in self.pieces():
            view[at : at + len(piece)] = piece
            at += len(piece)
        return torch.frombuffer(held, dtype=dtype).reshape(self.shape)


def read_header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return the tensors of a file in the order in which it names them, and its metadata.

    Raises:
        TargetError: the file is no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt"):
            pass  # the library's own check of offsets and sizes
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (SafetensorError, ValueError) as error:
        raise TargetError(f"{file}: this is no sound safetensors file: {error}") from error
    metadata = header.pop("__metadata__", {})
    base = 8 + length
    tensors = {}
    for key, entry in header.items():
        start, stop = entry["data_offsets"]
        tensors[key] = Stored(
            file=file, dtype=entry["dtype"], shape=tuple(entry["shape"]), start=base + start, size=stop - start
        )
    return tensors, metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A tensor that will be written; its bytes are asked for when its turn comes."""

    dtype: str
    shape: tuple[int, ...]
    size: int
    pieces: Callable[[], Iterable[bytes | memoryview]]

    @classmethod
    def copied(cls, stored: Stored) -> Written:
        """Return a tensor that is copied byte by byte."""
        return cls(dtype=stored.dtype, shape=stored.shape, size=stored.size, pieces=stored.pieces)

    @classmethod
    def made(cls, dtype: torch.dtype, shape: Iterable[int], make: Callable[[], torch.Tensor]) -> Written:
        """Return a tensor that is made when its turn comes."""
        shape = tuple(shape)
        size = dtype.itemsize * torch.Size(shape).numel()
        return cls(dtype=code_of(dtype), shape=shape, size=size, pieces=lambda: numbers(make()))


def numbers(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the raw numbers of a tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for piece in flat.split(PIECE):
        yield memoryview(piece.numpy())  # pyright: ignore[reportArgumentType]


def write(
    file: Path,
    tensors: Mapping[str, Written],
    metadata: Mapping[str, str],
    advance: Callable[[int], object] = lambda size: None,
) -> str:
    """Write a file to the disk, down to the platter; return its SHA-256.

    Args:
        file: it must not exist.
        tensors: in the order in which they are written.
        metadata: as in the source.
        advance: is told how many bytes were written.

    Raises:
        OSError: the disk is full, or the file cannot be written.
        RuntimeError: a tensor has not the size it was announced with.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key, tensor in tensors.items():
        offsets = [at, at := at + tensor.size]
        header[key] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with file.open("xb", buffering=0) as stream:

        def put(piece: bytes | memoryview) -> None:
            digest.update(piece)
            view = memoryview(piece)
            while view:  # an unbuffered write may take a part only
                view = view[stream.write(view) or 0 :]

        put(len(text).to_bytes(8, "little") + text)
        for key, tensor in tensors.items():
            size = 0
            for piece in tensor.pieces():
                put(piece)
                size += len(piece)
                advance(len(piece))
            if size != tensor.size:
                raise RuntimeError(f"{key}: {size} bytes were made where {tensor.size} were announced")
        os.fsync(stream.fileno())
    return digest.hexdigest()


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
