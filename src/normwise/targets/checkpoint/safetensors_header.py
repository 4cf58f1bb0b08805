"""The header of a safetensors file, read with a parser of our own.

    8 bytes, little-endian: the length of the header
    {"__metadata__": {TEXT: TEXT}, NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the bytes of the tensors, one after the other

Stricter than the library, which takes duplicate names and blanks before the brace. One pass over the bytes, entry by
entry: nothing is built of a header that is not one. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from normwise.errors import CheckpointError
from normwise.targets.checkpoint.json_text import unique
from normwise.targets.checkpoint.limits import METADATA_BYTES, NAME, TENSORS, broken

__all__ = ["BITS", "METADATA", "Entry", "parse", "text_of"]

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""The dtypes of safetensors, and the bits of an element."""

METADATA = "__metadata__"

_RANK = 64  # torch's own limit
_AXES = 10 * TENSORS  # of all tensors of a file: they are two on average
_ODD = 50_000  # entries that no writer writes so: each takes ten times as long
_TEXT = rb'"([^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+)"'
_BLANK = rb"[ \t\r\n]*+"
_NUMBER = rb"(?:0|[1-9][0-9]{0,18})"
_DTYPE = rb'"dtype": ?"(?P<dtype>[A-Z0-9_]{1,16})"'
_SHAPE = rb'"shape": ?\[(?P<shape>(?:' + _NUMBER + rb"(?:, ?" + _NUMBER + rb"){0,%d})?)\]" % _RANK
_OFFSETS = rb'"data_offsets": ?\[(?P<start>' + _NUMBER + rb"), ?(?P<end>" + _NUMBER + rb")\]"


def _written(*fields: bytes) -> re.Pattern[bytes]:
    """Return the pattern of an entry with one blank or none between its fields, and without escapes."""
    name = rb' ?"(?P<name>[^"\\\x00-\x1f]{0,2048}+)": ?'
    return re.compile(name + rb"\{" + rb", ?".join(fields) + rb"\}(?P<more>[,}])")


# as every writer writes it: in the order of the library, or in that of the alphabet (JSON from a sorted map)
_USUAL = _written(_DTYPE, _SHAPE, _OFFSETS)
_SORTED = _written(_OFFSETS, _DTYPE, _SHAPE)
_NAME_TEXT = rb'"((?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})){0,2048}+)"'
_ENTRY = re.compile(_BLANK + _NAME_TEXT + _BLANK + rb":" + _BLANK + rb"(\{[^{}]{0,4096}+\})" + _BLANK + rb"([,}])")
_LONG_NAME = re.compile(_BLANK + rb'"[^"]{%d}' % (NAME + 1))
_METADATA_START = re.compile(_BLANK + rb'"__metadata__"' + _BLANK + rb":" + _BLANK + rb"\{" + _BLANK)
_PAIR = re.compile(_BLANK + _TEXT + _BLANK + rb":" + _BLANK + _TEXT + _BLANK + rb"([,}])")
_END = re.compile(_BLANK + rb"([,}])")
_REST = re.compile(_BLANK + rb"\Z")
_EMPTY = re.compile(rb"\{" + _BLANK + rb"\}" + _BLANK + rb"\Z")
_FIELDS = ("dtype", "shape", "data_offsets")
_OVERFLOW = 2**63


class Entry(NamedTuple):
    """One tensor of a file: its form, and where its bytes lie behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def parse(header: bytes, length: int, path: str) -> dict[str, Entry]:
    """Return the tensors that a header names.

    Args:
        header: its bytes, without the 8 of its length.
        length: how many bytes of data follow it.
        path: the file, for the error.

    Raises:
        CheckpointError: anything else than a header that describes exactly these data.
    """
    if not header.startswith(b"{"):
        raise broken("bad-header", path, "the header does not begin with {")
    found: dict[str, Entry] = {}
    if not _EMPTY.match(header):
        _entries(header, path, found)
    _contiguous(found, length, path)
    return found


def text_of(raw: bytes, path: str) -> str:
    """Return the text of a JSON string without its quotes.

    Raises:
        CheckpointError: it is no valid UTF-8.
    """
    try:
        text = json.loads(b'"' + raw + b'"') if b"\\" in raw else raw.decode("utf-8")
        text.encode("utf-8")  # half of a surrogate pair, written as an escape, is no character
    except ValueError:
        raise broken("bad-name", path, f"a name in the header is no valid text: {raw[:80]!r}") from None
    return text


def _entries(header: bytes, path: str, found: dict[str, Entry]) -> None:
    if header.count(b'"data_offsets"') > TENSORS:
        raise _too_many(path)
    position, more, described, axes, odd = 1, b",", False, 0, 0
    usual, in_order = _USUAL.match, _SORTED.match
    while more == b",":
        plain = usual(header, position) or in_order(header, position)
        if plain is not None and plain["name"] != METADATA.encode():
            name = _name(plain["name"], path)
            sizes = plain["shape"]
            shape = tuple(map(int, sizes.split(b","))) if sizes else ()
            entry = Entry(plain["dtype"].decode(), shape, int(plain["start"]), int(plain["end"]))
            position, more = plain.end(), plain["more"]
        elif (start := _METADATA_START.match(header, position)) is not None:
            if described:
                raise broken("duplicate-name", path, f"{METADATA} occurs twice in the header")
            position, described = _metadata(header, start.end(), path), True
            if (end := _END.match(header, position)) is None:
                raise broken("bad-header", path, f"the header is no list of tensors at byte {position}")
            position, more = end.end(), end[1]
            continue
        elif (other := _ENTRY.match(header, position)) is not None:
            if (name := _name(other[1], path)) == METADATA:  # with an escape: the library reads it as metadata
                raise broken("bad-metadata", path, f"{METADATA} does not map text to text")
            entry = _fields(name, other[2], path)
            position, more, odd = other.end(), other[3], odd + 1
        else:
            if _LONG_NAME.match(header, position):
                raise broken("name-too-long", path, f"a name in the header is longer than {NAME} characters")
            raise broken("bad-header", path, f"the header is no list of tensors at byte {position}")
        if name in found:
            raise broken("duplicate-name", path, f"the tensor {name!r:.120} occurs twice in the header")
        _check(name, entry, path)
        found[name] = entry
        axes += len(entry.shape)
        if len(found) > TENSORS or odd > _ODD:  # fields may be written with escapes
            raise _too_many(path, "" if len(found) > TENSORS else f"{_ODD:,} entries that no library writes so")
        if axes > _AXES:
            raise broken("bad-shape", path, f"more than {_AXES:,} axes in all")
    if not _REST.match(header, position):
        raise broken("bad-header", path, "something follows the end of the header")


def _too_many(path: str, what: str = "") -> CheckpointError:
    return broken("too-many-tensors", path, f"more than {what or f'{TENSORS:,} tensors'} in one file")


def _name(raw: bytes, path: str) -> str:
    name = text_of(raw, path)
    if len(name) > NAME:
        raise broken("name-too-long", path, f"a name of {len(name):,} characters, the limit is {NAME}")
    return name


def _metadata(header: bytes, position: int, path: str) -> int:
    """Check the metadata, which are not used, and return where they end."""
    if header[position : position + 1] == b"}":
        return position + 1
    first, names, more = position, set[bytes](), b","
    while more == b",":
        if (pair := _PAIR.match(header, position)) is None:
            raise broken("bad-metadata", path, f"{METADATA} does not map text to text at byte {position}")
        if pair.end() - first > METADATA_BYTES:
            raise broken("bad-metadata", path, f"{METADATA} is larger than {METADATA_BYTES:,} bytes")
        for raw in pair.group(1, 2):
            text_of(raw, path)
        if pair.group(1) in names:
            raise broken("duplicate-name", path, f"{pair.group(1)[:80]!r} occurs twice in {METADATA}")
        names.add(pair.group(1))
        position, more = pair.end(), pair.group(3)
    return position


def _fields(name: str, raw: bytes, path: str) -> Entry:
    """Return an entry that is written in another way."""
    try:
        fields = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise broken("bad-header", path, f"the entry of {name!r:.120} is no JSON: {error!s:.120}") from None
    if fields.keys() != set(_FIELDS):
        raise broken("bad-header", path, f"the entry of {name!r:.120} has other fields than {', '.join(_FIELDS)}")
    dtype, shape, offsets = (fields[field] for field in _FIELDS)
    if not isinstance(dtype, str):
        raise broken("bad-dtype", path, f"the dtype of {name!r:.120} is no text")
    if not _numbers(shape):
        raise broken("bad-shape", path, f"the shape of {name!r:.120} is no list of numbers from 0")
    if not _numbers(offsets) or len(offsets) != 2:
        raise broken("bad-offsets", path, f"the offsets of {name!r:.120} are no pair of numbers from 0")
    return Entry(dtype, tuple(shape), *offsets)


def _check(name: str, entry: Entry, path: str) -> None:
    dtype, shape, start, end = entry
    if dtype not in BITS:
        raise broken("bad-dtype", path, f"{name!r:.120} has the dtype {dtype!r:.40}, which safetensors does not have")
    if len(shape) > _RANK:
        raise broken("bad-shape", path, f"{name!r:.120} has {len(shape)} axes, the limit is {_RANK}")
    if start > end:
        raise broken("bad-offsets", path, f"the offsets of {name!r:.120} are no pair of rising numbers")
    bits = BITS[dtype]
    for size in shape:
        bits *= size
        if bits >= _OVERFLOW:
            raise broken("bad-shape", path, f"the size of {name!r:.120} overflows")
    if bits != 8 * (end - start):
        held = end - start
        raise broken("size-mismatch", path, f"{name!r:.120} has {held:,} bytes, its shape and dtype need {bits / 8:,g}")


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < _OVERFLOW for n in value)


def _contiguous(found: dict[str, Entry], length: int, path: str) -> None:
    """Check that the tensors cover the data once, from the first byte to the last."""
    reached = 0
    for name, entry in sorted(found.items(), key=lambda item: item[1][2:]):
        if entry.start != reached:
            what = "overlaps the tensor before it" if entry.start < reached else "leaves a hole before it"
            raise broken("bad-offsets", path, f"{name!r:.120} {what}: it starts at {entry.start:,}, not {reached:,}")
        reached = entry.end
    if reached != length:
        word = "truncated: " if reached > length else ""
        raise broken("length-mismatch", path, f"{word}the tensors take {reached:,} bytes, {length:,} follow the header")
