"""Forty-odd safetensors files and indexes, each with one defect."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.case import Case

__all__ = ["CASES", "GOOD", "file", "header", "many"]

GOOD: dict[str, Any] = {
    "h.0.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    "h.0.mlp.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [16, 48]},
}
_DATA = struct.pack("<12f", *[1.0] * 12)


def header(entries: Any) -> bytes:
    """Return a header as the library writes it."""
    return json.dumps(entries).encode()


def file(head: bytes, data: bytes = _DATA, length: int | None = None) -> bytes:
    """Return a file; ``length`` is what it says its header has."""
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def _one(name: str = "norm.weight", size: int = 16, **fields: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **fields}
    return file(header({name: entry}), b"\0" * size)


def _text(head: str, data: bytes = _DATA) -> bytes:
    return file(head.encode("utf-8", "surrogatepass"), data)


def _placed(*spans: tuple[int, int], size: int) -> bytes:
    entries = {
        f"h.{i}.norm.weight": {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for i, (start, end) in enumerate(spans)
    }
    return file(header(entries), b"\0" * size)


def _put(content: bytes, name: str = "model.safetensors") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _sparse(declared: int, size: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        with (folder / "model.safetensors").open("wb") as made:
            made.write(struct.pack("<Q", declared) + b"{")
            made.truncate(size)

    return make


def _index(weight_map: Any, **more: Any) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / "a.safetensors").write_bytes(file(header(GOOD)))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, **more}))

    return make


_NOTHING = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


def _shard(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """A folder in which a second shard is made by a function."""

    def fill(folder: Path) -> None:
        _index({"h.0.norm.weight": "a.safetensors", "x": "b.safetensors"})(folder)
        make(folder / "b.safetensors")

    return fill


def many(count: int, entry: str = _NOTHING) -> bytes:
    """Return a file of so many tensors without elements."""
    return _text("{" + ",".join(f'"n{i}":{entry}' for i in range(count)) + "}", b"")


def _linked(to: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").symlink_to(to)


def _socket(folder: Path) -> None:
    """Bind in the folder: a path of a socket may have about a hundred characters."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("model.safetensors")
    finally:
        os.chdir(here)


def _sparse_gains(count: int, width: int) -> Callable[[Path], object]:
    entries = {
        f"h.{i}.norm.weight": {"dtype": "F32", "shape": [width], "data_offsets": [4 * width * i, 4 * width * (i + 1)]}
        for i in range(count)
    }

    def make(folder: Path) -> None:
        head = file(header(entries), b"")
        with (folder / "model.safetensors").open("wb") as made:
            made.write(head)
            made.truncate(len(head) + 4 * width * count)

    return make


_ENTRY = '{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
_REST = '{"dtype":"F32","shape":[8],"data_offsets":[16,48]}'


def _sized(sizes: str) -> str:
    return f'{{"dtype":"F32","shape":[{sizes}],"data_offsets":[0,16]}}'


_AXES_64 = "[0" + ",1" * 63 + "]"
_SORTED = '{"data_offsets":[0,0],"dtype":"F32","shape":[0]}'
_INDEX = "model.safetensors.index.json"

_FILES: list[tuple[str, str, Callable[[Path], object]]] = [
    ("empty", "no safetensors file", _put(b"")),
    ("seven bytes", "no safetensors file", _put(b"\x10\0\0\0\0\0\0")),
    ("a header longer than the file", "a header of", _put(file(header(GOOD), b"", length=4096))),
    ("a header of 2 GB is declared", "limit", _sparse(2**31, 4096)),
    ("a header of 2 GB in a sparse file of 3 GB", "limit", _sparse(2**31, 3 * 2**30)),
    ("a header of 2**64 - 1 bytes", "limit", _put(file(header(GOOD), length=2**64 - 1))),
    ("a sparse header of 99 MB of zeros", "header", _sparse(99_000_000, 100_000_000)),
    ("a header of no bytes", "begin with {", _put(file(b""))),
    ("blanks before the brace", "begin with {", _put(file(b"  " + header(GOOD)))),
    ("a byte order mark before the brace", "begin with {", _put(file(b"\xef\xbb\xbf" + header(GOOD)))),
    ("UTF-16", "begin with {", _put(file(json.dumps(GOOD).encode("utf-16")))),
    ("a list for a header", "begin with {", _put(file(b"[]", b""))),
    ("a header that is cut", "header", _put(file(header(GOOD)[:-20]))),
    ("zeros behind the header", "header", _put(file(header(GOOD) + b"\0" * 8))),
    ("a second object behind the header", "header", _put(file(header(GOOD) + b"{}"))),
    ("a name that is no UTF-8", "no valid text", _put(file(header(GOOD).replace(b"h.0.norm", b"h.\xff.norm")))),
    ("half of a surrogate pair in a name", "no valid text", _put(_text(f'{{"\\ud800":{_ENTRY},"b":{_REST}}}'))),
    ("a name of 513 characters", "limit", _put(_one("n" * 513))),
    ("a name of 1 MB", "512", _put(_one("n" * 1_000_000))),
    ("a name twice", "twice", _put(_text(f'{{"a":{_ENTRY},"a":{_REST}}}'))),
    ("a name twice, once with an escape", "twice", _put(_text(f'{{"a":{_ENTRY},"\\u0061":{_REST}}}'))),
    ("metadata twice", "twice", _put(_text(f'{{"__metadata__":{{}},"a":{_ENTRY},"__metadata__":{{}},"b":{_REST}}}'))),
    ("a key of the metadata twice", "twice", _put(_text(f'{{"__metadata__":{{"k":"1","k":"2"}},"a":{_ENTRY}}}'))),
    ("a number in the metadata", "__metadata__", _put(file(header({"__metadata__": {"format": 1}, **GOOD})))),
    ("metadata of 11 MB", "larger", _put(file(header({"__metadata__": {"k": "v" * 11_000_000}, **GOOD})))),
    ("an unknown dtype", "dtype", _put(_one(dtype="F33"))),
    ("a number for a dtype", "dtype", _put(_one(dtype=7))),
    ("a negative size", "shape", _put(_one(shape=[-4]))),
    ("a broken number for a size", "shape", _put(_one(shape=[4.5]))),
    ("sizes whose product overflows", "overflow", _put(_one(shape=[2**40, 2**40, 2**40]))),
    ("sizes whose product wraps around to the right one", "overflow", _put(_one(shape=[2**32, 2**32, 4]))),
    ("a size of 5,000 digits", "header", _put(_text(f'{{"a":{_sized("9" * 5000)}}}'))),
    ("sixty-five dimensions", "65 axes", _put(_one(shape=[1] * 65))),
    ("a true for a size", "shape", _put(_one(shape=[True]))),
    ("offsets that fall", "offsets", _put(_one(data_offsets=[16, 0]))),
    ("three offsets", "offsets", _put(_one(data_offsets=[0, 8, 16]))),
    ("tensors that overlap", "overlap", _put(_placed((0, 16), (8, 24), size=24))),
    ("two tensors over the same bytes", "overlap", _put(_placed((0, 16), (0, 16), size=16))),
    ("a hole between tensors", "hole", _put(_placed((0, 16), (24, 40), size=40))),
    ("a hole before the first tensor", "hole", _put(_placed((8, 24), size=24))),
    ("data that are cut", "truncated", _put(file(header(GOOD), _DATA[:-1]))),
    ("offsets of 1 TB", "truncated", _put(_placed((0, 2**40), size=16))),
    ("data behind the last tensor", "follow the header", _put(file(header(GOOD), _DATA + b"\0"))),
    ("bytes that are not shape times dtype", "its shape", _put(_one(shape=[3]))),
    ("a further field", "fields", _put(_one(order="F"))),
    ("a field twice", "twice", _put(_text('{"a":{"dtype":"F32","dtype":"F64","shape":[4],"data_offsets":[0,16]}}'))),
    ("brackets 100,000 deep", "header", _put(_text('{"a":' + "[" * 100_000))),
    ("200,001 tensors without elements", "more than 200,000", _put(many(200_001))),
    ("a page of HTML", "header", _put(b"<!DOCTYPE html><html><body>404</body></html>" * 4)),
    ("a pointer of Git LFS", "header", _put(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")),
    ("a zip archive", "header", _put(b"PK\x03\x04" + b"\0" * 100)),
    ("a pipe", "no regular file", lambda folder: os.mkfifo(folder / "model.safetensors")),
    ("a socket", "cannot be opened", _socket),
    ("a link to a device without end", "no regular file", _linked("/dev/zero")),
    ("a link to nothing", "cannot be opened", _linked("nothing")),
    ("a link to itself", "cannot be opened", _linked("model.safetensors")),
    ("a link to the memory of the process", "no safetensors file", _linked("/proc/self/mem")),
    ("a folder", "no weights", lambda folder: (folder / "model.safetensors").mkdir()),
    ("4,500,000 axes", "header", _put(_text(f'{{"a":{_sized("1," * 4_500_000 + "4")}}}'))),
    ("64 axes for each of 40,000 tensors", "axes in all", _put(many(40_000, _NOTHING.replace("[0]", _AXES_64)))),
    ("250,000 tensors, their fields in escapes", "no library", _put(many(250_000, _NOTHING.replace("e", "\\u0065")))),
    ("1e999 for an offset", "offsets", _put(_text('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,1e999]}}', b""))),
    ("NaN for a size", "shape", _put(_one(shape=[float("nan")]))),
    ("a number that begins with 0", "no JSON", _put(_text(f'{{"a":{_NOTHING.replace("[0]", "[00]")}}}', b""))),
    ("digits of another script", "no JSON", _put(_text('{"a":{"dtype":"U8","shape":[\u0663],"data_offsets":[0,3]}}'))),
    ("an offset beyond 63 bits", "its shape", _put(_one(data_offsets=[0, 2**63]))),
    ("an entry that is null", "header", _put(_text('{"a":null}', b""))),
    ("an entry with another inside", "header", _put(_text(f'{{"a":{{"b":{_NOTHING}}}}}', b""))),
    ("metadata that are null", "header", _put(_text('{"__metadata__":null}', b""))),
    ("metadata as a tensor, by an escape", "__metadata__", _put(_text(f'{{"__met\\u0061data__":{_NOTHING}}}', b""))),
    ("no comma between tensors", "header", _put(_text(f'{{"a":{_NOTHING} "b":{_NOTHING}}}', b""))),
    ("a comma behind the last tensor", "header", _put(_text(f'{{"a":{_NOTHING},}}', b""))),
    ("a comment", "header", _put(_text(f'{{"a":{_NOTHING}/**/}}', b""))),
    ("single quotes", "header", _put(_text(f'{{"a":{_NOTHING}}}'.replace('"', "'"), b""))),
    ("a line in a name", "header", _put(_text(f'{{"a\n":{_NOTHING}}}', b""))),
    ("norms of 640 MB in a sparse file", "norms", _sparse_gains(40, 2**22)),
]  # fmt: skip

_INDEXES: list[tuple[str, str, Callable[[Path], object]]] = [
    ("an index that is no JSON", "no valid JSON", _put(b"{", _INDEX)),
    ("an index without a map", "weight_map", _put(b"{}", _INDEX)),
    ("an index that leads out of the folder", "../", _index({"w": "../a.safetensors"})),
    ("an index with an absolute path", "/etc/", _index({"w": "/etc/a.safetensors"})),
    ("an index that names a pickle", "a.bin", _index({"w": "a.bin"})),
    ("an index with a shard that is not there", "not there", _index({"w": "b.safetensors"})),
    ("an index with a tensor that its shard lacks", "lacks", _index({"other.weight": "a.safetensors"})),
    ("an index nested 100 deep", "nested", _put(b'{"weight_map":' + b"[" * 100 + b"]" * 100 + b"}", _INDEX)),
    ("an index of 3,000,000 items", "items", _put(b'{"weight_map":[' + b"1," * 3_000_000 + b"1]}", _INDEX)),
    ("an index that names itself", _INDEX, _index({"w": _INDEX})),
    ("an index that names its folder", "'.'", _index({"w": "."})),
    ("an index with an empty name", "''", _index({"w": ""})),
    ("an index with a NUL in a name", "x00", _index({"w": "a\0.safetensors"})),
    ("an index with half of a surrogate pair in a name", "ud800", _index({"w": "\ud800.safetensors"})),
    ("an index with a stream of Windows", "a:b", _index({"w": "a:b.safetensors"})),
    ("an index with null for a file", "None", _index({"w": None})),
    ("an index with a list for a file", "['a.", _index({"w": ["a.safetensors"]})),
    ("an index that is a list", "weight_map", _put(b"[]", _INDEX)),
    ("an index of 33 MB", "limit", _put(b'{"weight_map":{"a":"' + b"x" * 33_000_000 + b'"}}', _INDEX)),
    ("an index of 5,000 shards", "limit", _index({f"w{i}": f"{i}.safetensors" for i in range(5000)})),
    ("an index with a pipe for a shard", "b.safetensors: this is no regular file", _shard(os.mkfifo)),
    ("an index with a folder for a shard", "b.safetensors: this is no regular file", _shard(os.mkdir)),
    ("an index with a device for a shard", "no regular file", _shard(lambda path: os.symlink("/dev/zero", path))),
    ("an index with a shard that is an index", "header", _shard(lambda path: path.write_bytes(b'{"weight_map":{}}'))),
    ("an index that is a link to itself", "cannot be opened", lambda folder: (folder / _INDEX).symlink_to(_INDEX)),
    ("an index with a name twice", "twice", _put(b'{"weight_map":{"a":"a.safetensors","a":"b.safetensors"}}', _INDEX)),
]  # fmt: skip

_SOUND: list[tuple[str, Callable[[Path], object]]] = [
    ("NaN and Inf for values", _put(_one().replace(b"\0" * 16, struct.pack("<4f", *map(float, ["nan", "inf"] * 2))))),
    ("names with markup and escape sequences", _put(_one("<script>alert(1)</script>\x1b[2J\u202e.norm.weight"))),
    ("a name with 500 dots", _put(_one("." * 495 + "norm.weight"))),
    ("names that are those of methods", _put(_one("forward.__class__.norm.weight"))),
    ("a header without tensors", _put(file(b"{}", b""))),
    ("20,000 tensors without elements", _put(many(20_000))),
    ("60,000 tensors, their fields in the order of the alphabet", _put(many(60_000, _SORTED))),
    ("an empty name and one with a NUL", _put(_text(f'{{"":{_NOTHING},"a\\u0000.norm.weight":{_NOTHING}}}', b""))),
    ("a gain of 4 TB in a sparse file", _sparse_gains(1, 2**40)),
]

CASES = [
    *(Case(defect, "model.safetensors", word, make) for defect, word, make in _FILES),
    *(Case(defect, _INDEX, word, make) for defect, word, make in _INDEXES),
    *(Case(defect, "model.safetensors", "", make) for defect, make in _SOUND),
]
