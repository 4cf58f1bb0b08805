"""Forty-odd .pt files, each with one defect: of the zip archive, of its pickle, or of what the pickle describes."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.case import Case

__all__ = ["CASES", "Storage", "Tensor", "archive", "good", "pickled"]


class Storage:
    """The numbers behind a tensor, as its pickle names them; ``given`` replaces the whole name."""

    def __init__(self, key: str = "0", numel: int = 4, *, location: str = "cpu", given: Any = None) -> None:
        self.key, self.numel, self.location, self.given = key, numel, location, given


class Tensor:
    """A tensor as its pickle describes it, whether that is possible or not."""

    def __init__(
        self, shape: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), offset: int = 0,
        storage: Storage | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.stride, self.offset, self.storage = shape, stride, offset, storage or Storage()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        import torch

        if not isinstance(obj, Storage):
            return None
        return obj.given or ("storage", torch.FloatStorage, obj.key, obj.location, obj.numel)

    def reducer_override(self, obj: Any) -> Any:
        from torch import _utils

        if not isinstance(obj, Tensor):
            return NotImplemented
        return _utils._rebuild_tensor_v2, (obj.storage, obj.offset, obj.shape, obj.stride, False, OrderedDict())


def pickled(held: Any, protocol: int = 2) -> bytes:
    """Return the pickle of ``torch.save`` for anything, ``Tensor`` and ``Storage`` included."""
    made = io.BytesIO()
    _Pickler(made, protocol).dump(held)
    return made.getvalue()


def archive(
    pickle_: bytes | None, storages: dict[str, bytes] | None = None, *, top: str = "archive", byteorder: str = "little",
    version: str | None = "3\n", more: dict[str, bytes] | None = None, packed: int = zipfile.ZIP_STORED,
) -> bytes:  # fmt: skip
    """Return an archive as ``torch.save`` writes it."""
    made = io.BytesIO()
    members = {} if pickle_ is None else {f"{top}/data.pkl": pickle_}
    members |= {f"{top}/byteorder": byteorder.encode()}
    members |= {f"{top}/data/{key}": held for key, held in (storages or {"0": _FOUR}).items()}
    members |= {} if version is None else {f"{top}/version": version.encode()}
    with zipfile.ZipFile(made, "w", packed) as zipped:
        for name, held in {**members, **(more or {})}.items():
            zipped.writestr(zipfile.ZipInfo(name), held, packed)
    return made.getvalue()


_FOUR = struct.pack("<4f", 1, 1, 1, 1)


def good() -> bytes:
    """Return a sound archive with one norm."""
    return archive(pickled({"norm.weight": Tensor()}))


def _norm(**tensor: Any) -> bytes:
    return archive(pickled({"norm.weight": Tensor(**tensor)}))


def _put(content: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.pt").write_bytes(content())


class _Calls:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def _evil(function: Callable[..., Any], *arguments: Any) -> bytes:
    return archive(pickled({"norm.weight": Tensor(), "x": _Calls(function, *arguments)}))


def _legacy() -> bytes:
    import torch

    made = io.BytesIO()
    torch.save({"norm.weight": torch.ones(4)}, made, _use_new_zipfile_serialization=False)
    return made.getvalue()


def _module() -> bytes:
    import torch

    made = io.BytesIO()
    torch.save(torch.nn.LayerNorm(4), made)
    return made.getvalue()


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"\x80\x02N."))
    return made.getvalue()


def _bomb() -> bytes:
    return archive(pickled({"norm.weight": Tensor()}), {"0": b"\0" * 300_000_000}, packed=zipfile.ZIP_DEFLATED)


def _duplicate() -> bytes:
    """Readers that take the first of the two and those that take the last see different files."""
    return archive(pickled({"norm.weight": Tensor()}), more={"archive/datb.pkl": b"N."}).replace(
        b"datb.pkl", b"data.pkl"
    )


def _deep(levels: int) -> bytes:
    return b"\x80\x02" + b"}X\x01\0\0\0a" * levels + b"N" + b"s" * levels + b"."


def _itself() -> dict[str, Any]:
    held: dict[str, Any] = {"norm.weight": Tensor()}
    held["me"] = held
    return held


def _patched(at: bytes, offset: int, value: bytes, content: bytes) -> bytes:
    start = content.rindex(at) + offset
    return content[:start] + value + content[start + len(value) :]


def _encrypted() -> bytes:
    return _patched(b"PK\x01\x02", 8, struct.pack("<H", 1), good())


def _link() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as zipped:
        for name, held in {
            "archive/data.pkl": pickled({"norm.weight": Tensor()}), "archive/byteorder": b"little",
            "archive/data/0": _FOUR, "archive/version": b"3\n", "archive/link": b"/etc/passwd",
        }.items():  # fmt: skip
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o120777 if name.endswith("link") else 0o644) << 16
            zipped.writestr(info, held)
    return made.getvalue()


def _overlapping() -> bytes:
    """The directory sends the last member to the place of the first."""
    return _patched(b"PK\x01\x02", 42, struct.pack("<L", 0), good())


def _zip64(count: int) -> bytes:
    content = good()
    end = content.rindex(b"PK\x05\x06")
    length, start = struct.unpack_from("<2L", content, end + 12)
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, start)
    return content[:end] + record + struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1) + content[end:]


def _two() -> OrderedDict[str, Tensor]:
    shared = Storage()
    return OrderedDict([("a.norm.weight", Tensor(storage=shared)), ("b.norm.weight", Tensor(storage=shared))])


def _frame() -> bytes:
    return b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"}."


def _commented(content: bytes) -> bytes:
    """The end of the archive says that a comment follows, which is another end: of an archive without members."""
    end = content.rindex(b"PK\x05\x06")
    other = b"PK\x05\x06" + b"\0" * 18
    return content[: end + 20] + struct.pack("<H", len(other)) + other


_REFUSED: list[tuple[str, str, Callable[[], bytes]]] = [
    ("empty", "no checkpoint", lambda: b""),
    ("a wrong magic", "no zip", lambda: b"PK\x05\x04" + good()[4:]),
    ("junk before the archive", "no zip", lambda: b"MZ" + b"\0" * 62 + good()),
    ("junk behind the archive", "contradicts", lambda: good() + b"junk"),
    ("cut in the middle", "cut", lambda: good()[: len(good()) // 2]),
    ("an archive without members", "no zip", lambda: b"PK\x05\x06" + b"\0" * 18),
    ("written by torch before 1.6", "before 1.6", _legacy),
    ("a tar of torch before 0.1.10", "before 1.6", _tar),
    ("a bare pickle", "bare pickle", lambda: pickle.dumps({"norm.weight": [1.0] * 9}, 4)),
    ("a TorchScript archive", "TorchScript", lambda: archive(b"N.",
     more={"archive/code/a.py": b"", "archive/constants.pkl": b")."})),
    ("a bomb of 300 MB, deflated", "compressed", _bomb),
    ("a deflated pickle", "compressed", lambda: archive(pickled({}), packed=zipfile.ZIP_DEFLATED)),
    ("an encrypted member", "encrypted", _encrypted),
    ("a member outside the archive", "..", lambda: archive(pickled({}), more={"archive/../../evil": b""})),
    ("a member with an absolute path", "/etc", lambda: archive(pickled({}), more={"/etc/cron.d/evil": b""})),
    ("a member with a drive", "called", lambda: archive(pickled({}), more={"archive/C:evil": b""})),
    ("a member with a name that is no text", "called", lambda: good().replace(b"byteorder", b"byte\xff\xfe\xfder")),
    ("two pickles under one name", "twice", _duplicate),
    ("two folders with a pickle", "data.pkl", lambda: archive(pickled({}), more={"other/data.pkl": b"N."})),
    ("no pickle", "data.pkl", lambda: archive(None)),
    ("a member that is another in its own header", "own header",
     lambda: good().replace(b"archive/version", b"archive/Version", 1)),
    ("members that lie over each other", "member", _overlapping),
    ("a member beyond the file", "outside", lambda: _patched(b"PK\x01\x02", 42, struct.pack("<L", 2**31), good())),
    ("zip64 with another count", "directory", lambda: _zip64(3)),
    ("zip64 with 2**60 members", "members", lambda: _zip64(2**60)),
    ("a member that declares 3 GB", "declare", lambda: _patched(b"PK\x01\x02", 20,
     struct.pack("<2L", 3 * 2**30, 3 * 2**30), good())),
    ("os.system", "system", lambda: _evil(os.system, "true")),
    ("builtins.eval", "eval", lambda: _evil(eval, "1")),
    ("a whole module", "LayerNorm", _module),
    ("a pickle that is cut", "pickle", lambda: archive(pickled({"norm.weight": Tensor()})[:-30])),
    ("a pickle of no opcode", "pickle", lambda: archive(b"\xff\xfe\xfd")),
    ("a text that declares 4 EB", "pickle", lambda: archive(b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"a.")),
    ("a frame that declares 4 EB", "operand 149", lambda: archive(_frame())),
    ("a bytearray that declares 4 EB", "pickle", lambda: archive(b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".")),
    ("an opcode on an empty stack", "cannot read", lambda: archive(b"\x80\x02s.")),
    ("a memo that was never written", "cannot read", lambda: archive(b"\x80\x02h\x07.")),
    ("dicts 100,000 deep", "no tensors", lambda: archive(_deep(100_000))),
    ("a list for the name of a storage", "cannot read", lambda: _norm(storage=Storage(given=[1, 2]))),
    ("a name of a storage that is too short", "cannot read", lambda: _norm(storage=Storage(given=("storage",)))),
    ("a storage that is not there", "cannot read", lambda: _norm(storage=Storage("../../secret"))),
    ("a storage shorter than declared", "cannot read", lambda: _norm(shape=(2**20,), storage=Storage(numel=2**20))),
    ("a tensor beyond its storage", "cannot read", lambda: _norm(shape=(1000,))),
    ("a tensor of 2**62 elements", "cannot read", lambda: _norm(shape=(2**31, 2**31), stride=(1, 1))),
    ("a negative size", "cannot read", lambda: _norm(shape=(-4,))),
    ("a negative stride", "cannot read", lambda: _norm(stride=(-1,))),
    ("a negative offset", "cannot read", lambda: _norm(offset=-4)),
    ("fewer strides than sizes", "cannot read", lambda: _norm(shape=(2, 2), stride=(1,))),
    ("an unknown order of bytes", "cannot read", lambda: archive(pickled({"norm.weight": Tensor()}),
     byteorder="middle")),
    ("no version", "cannot read", lambda: archive(pickled({"norm.weight": Tensor()}), version=None)),
    ("a key of 1 MB", "limit", lambda: archive(pickled({"n" * 1_000_000: Tensor()}))),
    ("a storage of -4 numbers", "cannot read", lambda: _norm(storage=Storage(numel=-4))),
    ("a storage of 2**62 numbers", "cannot read", lambda: _norm(storage=Storage(numel=2**62))),
    ("a fraction for a size", "cannot read", lambda: _norm(shape=(4.5,))),
    ("a text for a size", "cannot read", lambda: _norm(shape=("4",))),
    ("a stride of 2**62", "cannot read", lambda: _norm(shape=(2, 4), stride=(2**62, 1))),
    ("bytes of 64 GB that are asked for", "bytearray", lambda: archive(pickled({"norm.weight": Tensor(),
     "x": _Calls(bytearray, 2**36)}))),
    ("200,000 lists in a pickle", "no tensors", lambda: archive(b"\x80\x02" + b"]" + b"]a" * 200_000 + b".")),
    ("a pickle of 101 MB", "100,000,000", lambda: archive(b"\x80\x02N" + b"0N" * 50_500_000 + b".")),
    ("a second end in the comment of the first", "directory", lambda: _commented(good())),
    ("an archive in another", "data.pkl", lambda: archive(None, more={"archive/inner.pt": good()})),
    ("a member of 600 characters", "called", lambda: archive(pickled({}), more={"archive/" + "n" * 600: b""})),
    ("a folder for a member", "called", lambda: archive(pickled({}), more={"archive/data/": b""})),
    ("a number of 5,000 digits for a key", "operand 139", lambda: archive(pickled({10**5000: Tensor()}))),
    ("an opcode that torch does not have", "operand 48", lambda: archive(b"\x80\x02]0}.")),
    ("numbers for keys", "no tensors", lambda: archive(pickled({0: Tensor()}))),
    ("nothing in it", "no tensors", lambda: archive(pickled({}))),
    ("a list of tensors", "no tensors", lambda: archive(pickled([Tensor()]))),
]  # fmt: skip

_READ: list[tuple[str, Callable[[], bytes]]] = [
    ("two tensors over one storage", lambda: archive(pickled(_two()))),
    ("a dict that contains itself", lambda: archive(pickled(_itself()))),
    ("a tensor on a device that is not there", lambda: _norm(storage=Storage(location="cuda:99"))),
    ("a member that is a link", _link),
    ("names with markup and escape sequences", lambda: archive(pickled({"<b>\x1b[2J\u202e.norm.weight": Tensor()}))),
    ("NaN for values", lambda: archive(pickled({"norm.weight": Tensor()}),
     {"0": struct.pack("<4f", *[float("nan")] * 4)})),
    ("a gain of 400 GB over a storage of 16 bytes", lambda: _norm(shape=(10**11,), stride=(0,))),
    ("100,000 axes", lambda: _norm(shape=(1,) * 100_000, stride=(1,) * 100_000)),
    ("big-endian numbers", lambda: archive(pickled({"norm.weight": Tensor()}), byteorder="big")),
    ("zip64 where it is not needed", lambda: _zip64(4)),
]  # fmt: skip

CASES = [
    *(Case(defect, "model.pt", word, _put(content)) for defect, word, content in _REFUSED),
    *(Case(defect, "model.pt", "", _put(content)) for defect, content in _READ),
    Case("a pipe", "model.pt", "no regular file", lambda folder: os.mkfifo(folder / "model.pt")),
    Case("a folder", "model.pt", "no weights", lambda folder: (folder / "model.pt").mkdir()),
]
