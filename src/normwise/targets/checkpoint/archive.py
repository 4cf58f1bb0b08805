"""The zip archive of ``torch.save``, looked at before torch opens it: what it would have to believe is checked.

Every member is stored as it is, none is compressed or encrypted, names and places contradict nothing, and together
they are no larger than the file. Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from normwise.targets.checkpoint.files import File
from normwise.targets.checkpoint.limits import PICKLE_BYTES, TENSORS, broken

__all__ = ["Member", "convert", "pickle_of"]

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL = struct.Struct("<4s2B4HL2L2H")
_COMMENT = 65535  # bytes, at most
_DIRECTORY = 64_000_000  # bytes; 200,000 members of torch take 20 MB
_MEMBERS = TENSORS + 100
_ALLOWANCE = 1.05  # the members against the file
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # the pickled number with which torch.save began before 1.6


class Member(NamedTuple):
    """One file of the archive."""

    name: str
    start: int
    size: int


def pickle_of(file: File) -> bytes:
    """Return the pickle of an archive of ``torch.save`` that is sound.

    Raises:
        CheckpointError: it is something else, or contradicts itself.
    """
    _begins_like_zip(file)
    members = _members(file)
    pickles = [m for n, m in members.items() if n.rpartition("/")[2] == "data.pkl" and n.count("/") == 1]
    if len(pickles) != 1:
        raise broken("bad-zip", file.path, f"{len(pickles)} members are called data.pkl: torch.save writes one")
    if pickles[0].size > PICKLE_BYTES:
        raise broken("too-large", file.path, f"a pickle of {pickles[0].size:,} bytes, the limit is {PICKLE_BYTES:,}")
    return file.read(pickles[0].start, pickles[0].size)


def convert(path: str, load: str = "torch.load({name}, map_location='cpu', weights_only=False)") -> str:
    """Return two lines of Python that make a safetensors file of a pickle."""
    name = path.replace("\\", "/").rpartition("/")[2]
    made = f"{name.rpartition('.')[0] or name}.safetensors"
    return (
        f"  import torch; from safetensors.torch import save_file; state = {load.format(name=repr(name))}\n"
        "  state = state.state_dict() if hasattr(state, 'state_dict') else state.get('state_dict', state); "
        f"save_file({{k: v.detach().clone().contiguous() for k, v in state.items() if torch.is_tensor(v)}}, {made!r})"
    )


def _begins_like_zip(file: File) -> None:
    if file.size < 22:
        raise broken("too-short", file.path, f"{file.size} bytes are no checkpoint")
    first = file.read(0, min(file.size, 512))
    if first.startswith(b"PK\x03\x04"):
        return
    if first[257:262] == b"ustar" or (first[:1] == b"\x80" and first[1] <= 5):
        what = "written by torch before 1.6" if _LEGACY in first[:20] or first[257:262] == b"ustar" else "a bare pickle"
        raise broken(
            "legacy-pickle",
            file.path,
            f"this is {what}, and opening a pickle can run any code; convert it where you trust it:\n"
            + convert(file.path),
        )
    raise broken("not-zip", file.path, "this is no zip archive, as torch.save writes one; give a safetensors file")


def _members(file: File) -> Mapping[str, Member]:
    end, length, count = _directory(file)
    if count > _MEMBERS or length > _DIRECTORY:
        raise broken("too-large", file.path, f"{count:,} members in a zip archive, the limit is {_MEMBERS:,}")
    listed = list(_listed(file, file.read(end, length), count))
    names = [_plain(each.name, file.path) for each in listed]
    if any(n.split("/")[1:] == ["constants.pkl"] or n.split("/")[1:2] == ["code"] for n in names):
        raise broken(
            "torchscript",
            file.path,
            "this is a TorchScript archive, which holds code; convert it where you trust it:\n"
            + convert(file.path, load="torch.jit.load({name}, map_location='cpu')"),
        )
    found: dict[str, Member] = {}
    for name, each in zip(names, listed, strict=True):
        if name in found:
            raise broken("bad-member", file.path, f"the member {name!r:.120} occurs twice in the zip archive")
        if not each.stored:
            raise broken("compressed", file.path, f"the member {name!r:.120} is compressed or encrypted; save it again")
        found[name] = Member(name, _start(file, each, end), each.size)
    total, reached = sum(m.size for m in found.values()), 0
    if total > _ALLOWANCE * file.size:
        raise broken("bad-zip", file.path, f"its members declare {total:,} bytes, the file has {file.size:,}")
    for member in sorted(found.values(), key=lambda m: (m.start, m.size)):
        if member.start < reached or member.start + member.size > end:
            raise broken("bad-zip", file.path, f"the member {member.name!r:.120} overlaps another or the directory")
        reached = member.start + member.size
    return found


def _directory(file: File) -> tuple[int, int, int]:
    """Return where the central directory starts, its length, and the number of members."""
    tail = min(file.size, _END.size + _COMMENT)
    last = file.read(file.size - tail, tail)
    at = last.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(last):
        raise broken("bad-zip", file.path, "the zip archive has no end; the file was cut, copy it again")
    _, disk, first, here, count, length, start, comment = _END.unpack_from(last, at)
    end = file.size - tail + at
    if end + _END.size + comment != file.size or disk != first or here != count:
        raise broken("bad-zip", file.path, "the end of the zip archive contradicts the file")
    locator = end - _LOCATOR_64.size
    if locator >= 0 and (raw := file.read(locator, _LOCATOR_64.size)).startswith(b"PK\x06\x07"):
        _, _, at64, _ = _LOCATOR_64.unpack(raw)
        if at64 + _END_64.size > locator:
            raise broken("bad-zip", file.path, "the end of the zip archive contradicts the file")
        mark, _, _, _, _, _, here, count, length, start = _END_64.unpack(file.read(at64, _END_64.size))
        if mark != b"PK\x06\x06" or here != count:
            raise broken("bad-zip", file.path, "the end of the zip archive contradicts the file")
        end = at64
    if start + length != end:
        raise broken("bad-zip", file.path, "the directory of the zip archive is not where its end says")
    return start, length, count


class _Listed(NamedTuple):
    """A member as the directory has it."""

    name: bytes
    offset: int
    size: int
    stored: bool  # neither compressed nor encrypted


def _listed(file: File, directory: bytes, count: int) -> Iterator[_Listed]:
    position = 0
    for _ in range(count):
        if position + _CENTRAL.size > len(directory):
            raise broken("bad-zip", file.path, "the directory of the zip archive is too short")
        raw = _CENTRAL.unpack_from(directory, position)
        flags, method, (packed, size, name_length, extra_length, comment) = raw[5], raw[6], raw[10:15]
        offset = raw[-1]
        if raw[0] != b"PK\x01\x02":
            raise broken("bad-zip", file.path, "the directory of the zip archive is broken")
        position += _CENTRAL.size
        name = directory[position : position + name_length]
        extra = directory[position + name_length : position + name_length + extra_length]
        position += name_length + extra_length + comment
        packed, size, offset = _wide(extra, size, packed, offset)
        yield _Listed(name, offset, size, method == 0 and not flags & _ENCRYPTED and packed == size)
    if position != len(directory):
        raise broken("bad-zip", file.path, "the directory of the zip archive is longer than its members")


def _wide(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Return packed size, size and offset, taken from the extra field of zip64 where the short ones are full."""
    full, position = 0xFFFFFFFF, 0
    if full not in (size, packed, offset):
        return packed, size, offset
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            held = iter(
                struct.unpack_from(f"<{length // 8}Q", extra[position + 4 : position + 4 + length].ljust(length))
            )
            size, packed, offset = (next(held, -1) if short == full else short for short in (size, packed, offset))
        position += 4 + length
    return packed, size, offset


def _plain(raw: bytes, path: str) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        name = ""
    parts = name.split("/")
    if not name or len(name) > 512 or any(p in ("", "..") for p in parts) or any(c in name for c in "\\:\0"):
        raise broken("bad-member", path, f"a member of the zip archive is called {raw[:80]!r}")
    return name


def _start(file: File, member: _Listed, limit: int) -> int:
    """Return where the bytes of a member begin; its own header has to say the same as the directory."""
    name, offset = member.name, member.offset
    if not 0 <= offset <= limit - _LOCAL.size:
        raise broken("bad-zip", file.path, f"the member {name[:80]!r} lies outside the file")
    raw = file.read(offset, _LOCAL.size + len(name))
    mark, _, _, flags, method, *_, name_length, extra_length = _LOCAL.unpack_from(raw)
    same = mark == b"PK\x03\x04" and method == 0 and not flags & _ENCRYPTED and name_length == len(name)
    if not same or raw[_LOCAL.size :] != name:
        raise broken("bad-zip", file.path, f"the member {name[:80]!r} is another in its own header")
    return offset + _LOCAL.size + name_length + extra_length
