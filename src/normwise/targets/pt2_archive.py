"""The archive of an exported program: a zip file of stored members, read without any pickle but for tensors.

Layout: torch/export/pt2_archive/constants.py and torch/_export/serde/schema.py of torch.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch
from torch import Tensor, nn

from normwise.errors import TargetError
from normwise.rendering import clean
from normwise.targets.checkpoint import json_text
from normwise.targets.checkpoint.globals_of import named
from normwise.targets.program import MOST_ELEMENTS

__all__ = ["DTYPES", "Archive", "whole"]

# torch._export.serde.schema.ScalarType
DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip
"""The types of torch by the numbers of the schema."""

_LARGEST_JSON = 2**26
_LARGEST_PICKLE = 2**20  # of the example inputs: what is around their tensors
# What a pickle of tensors names. torch lets more pass, of which some make what they are told to: bytearray(2**40).
_OF_TENSORS = {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", "collections.OrderedDict"}
_OF_TENSORS |= {f"torch.{kind}Storage" for kind in (
    "Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")}  # fmt: skip


class Archive:
    """The members of one archive.

    Args:
        file: open for reading bytes.

    Raises:
        TargetError: not such an archive, or one with packed members, which may unpack to any size.
    """

    def __init__(self, file: io.BufferedIOBase) -> None:
        self.zip = zipfile.ZipFile(file)  # type: ignore[arg-type]
        _refuse_packed(self.zip)
        self.names = {name.partition("/")[2]: name for name in self.zip.namelist()}
        if len(self.names) < len(self.zip.namelist()):  # torch and zipfile may take another of the two
            raise TargetError("the archive has a name twice; save it again with torch.export.save")
        models = [name for name in self.names if name.startswith("models/") and name.endswith(".json")]
        if "serialized_exported_program.json" in self.zip.namelist():
            raise TargetError(
                "this was written by torch before 2.8; load it there and save it again with a later torch"
            )
        if len(models) != 1:
            raise TargetError(
                f"the archive holds {len(models)} programs, one is needed; write it with torch.export.save"
            )
        self.model = models[0].removeprefix("models/").removesuffix(".json")
        self._shared: dict[tuple[Any, ...], Tensor] = {}
        self._bytes: dict[str, bytearray] = {}  # of a member, however many tensors lie in it

    def json(self, name: str) -> Any:
        """Return a member that is JSON."""
        if name not in self.names or self.zip.getinfo(self.names[name]).file_size > _LARGEST_JSON:
            raise TargetError(f"{clean(name)} is missing or too large")
        return json_text.parse(self.zip.read(self.names[name]), clean(name), most=_LARGEST_JSON)

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Return the ``weights`` or ``constants`` by name.

        Raises:
            TargetError: one is pickled, or lies outside its bytes.
        """
        config = self.json(f"data/{kind}/{self.model}_{kind}_config.json")["config"]
        return {name: self._tensor(name, kind, entry) for name, entry in config.items()}

    def examples(self) -> Any:
        """Return the example inputs; None where they hold more than tensors and numbers."""
        name = f"data/sample_inputs/{self.model}.pt"
        if name not in self.names:
            return None
        data = self.zip.read(self.names[name])
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as inner:
                _refuse_packed(inner)
                members = [item for item in inner.infolist() if item.filename.endswith(".pkl")]
                if sum(item.file_size for item in members) > _LARGEST_PICKLE:
                    return None
                if not {name for item in members for name in named(inner.read(item))} <= _OF_TENSORS:
                    return None
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True, mmap=False)
        except TargetError:
            raise
        except Exception:  # objects of other classes: torch says which in many words
            return None

    def _tensor(self, name: str, kind: str, entry: dict[str, Any]) -> Tensor:
        meta, place = entry.get("tensor_meta"), f"data/{kind}/{entry.get('path_name')}"
        if entry.get("use_pickle") or meta is None:
            raise TargetError(
                f"{clean(name)[:80]!r} is stored as a pickle, which can run any code when it is opened; "
                "export the model with plain tensors, or give FILE.py:callable that builds it"
            )
        if meta["dtype"] not in DTYPES or place not in self.names:
            raise TargetError(f"{clean(name)[:80]!r} is of a type that is not read here, or missing")
        sizes, strides = ([whole(item) for item in meta[key]] for key in ("sizes", "strides"))
        key = (place, meta["dtype"], *sizes, *strides, offset := whole(meta["storage_offset"]))
        if key not in self._shared:
            self._shared[key] = self._strided(place, DTYPES[meta["dtype"]], sizes, strides, offset)
            if entry.get("is_param"):
                self._shared[key] = nn.Parameter(self._shared[key], bool(meta.get("requires_grad", True)))
        return self._shared[key]

    def _strided(self, place: str, dtype: torch.dtype, sizes: list[int], strides: list[int], offset: int) -> Tensor:
        if place not in self._bytes:
            self._bytes[place] = bytearray(self.zip.read(self.names[place]))
        data = self._bytes[place]
        if len(data) % dtype.itemsize or min([*sizes, *strides, offset, 0]) < 0:
            raise TargetError(f"{clean(place)} does not fit its type")
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        made = torch.as_strided(flat, sizes, strides, offset)  # torch refuses what lies outside
        if made.numel() > max(len(flat), 1):
            raise TargetError(f"{clean(place)} holds {len(flat):,} numbers, its sizes make it {made.numel():,}")
        return made


def whole(item: Any) -> int:
    """Return a size of the schema; a symbolic one by the number it had at the export."""
    found = item.get("as_int", ((item.get("as_expr") or {}).get("hint") or {}).get("as_int"))
    if not isinstance(found, int) or abs(found) > MOST_ELEMENTS:
        raise TargetError("a size is no number, or too large")
    return found


def _refuse_packed(archive: zipfile.ZipFile) -> None:
    if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
        raise TargetError(
            "the archive has packed members, which torch never writes; save it again with torch.export.save"
        )
