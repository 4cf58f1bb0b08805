"""Whatever the bytes of a safetensors file, an index or a config.json are: they are read, or refused with a reason."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from normwise.errors import CheckpointError
from normwise.rendering import in_language
from normwise.targets.checkpoint import CODES, read
from normwise.targets.checkpoint.limits import DEPTH, HEADER_BYTES, NAME, TENSORS
from normwise.targets.checkpoint.safetensors_header import BITS, Entry, parse
from tests.targets.checkpoint_files import sound, sparse, with_header

TWO = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EIGHT = bytes(8)
EMPTY = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


def of(**changed: Any) -> dict[str, Any]:
    """Return a header with one tensor, one thing changed."""
    return {"a": TWO | changed}


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too-short"),
    "shorter than its length field": (b"\x02\0\0", "too-short"),
    "header longer than the file": (with_header(of(), length=10_000), "header-size"),
    "header beyond the limit": (with_header(of(), length=HEADER_BYTES + 1), "header-size"),
    "header of 2^63 bytes": (with_header(of(), length=2**63), "header-size"),
    "blanks before the brace": (with_header(b"  " + json.dumps(of()).encode(), EIGHT), "bad-header"),
    "an array": (with_header(b"[1, 2, 3]"), "bad-header"),
    "cut in the middle": (with_header(json.dumps(of()).encode()[:-9], EIGHT), "bad-header"),
    "text behind the end": (with_header(json.dumps(of()).encode() + b"x", EIGHT), "bad-header"),
    "a second object": (with_header(json.dumps(of()).encode() + b"{}", EIGHT), "bad-header"),
    "a comma at the end": (with_header(json.dumps(of()).encode()[:-1] + b",}", EIGHT), "bad-header"),
    "nested arrays": (with_header(b'{"a":' + b"[" * 100_000), "bad-header"),
    "no UTF-8": (with_header(b'{"\xff\xfe":' + json.dumps(TWO).encode() + b"}", EIGHT), "bad-name"),
    "half a surrogate pair": (with_header(b'{"\\ud800":' + json.dumps(TWO).encode() + b"}", EIGHT), "bad-name"),
    "a control character in a name": (with_header(b'{"a\x01":' + json.dumps(TWO).encode() + b"}", EIGHT), "bad-header"),
    "a long name": (with_header({"a" * (NAME + 1): TWO}, EIGHT), "name-too-long"),
    "a very long name": (with_header({"a" * 50_000: TWO}, EIGHT), "name-too-long"),
    "a long name of escapes": (with_header(b'{"' + b"\\u0041" * 9000 + b'":{}}', EIGHT), "name-too-long"),
    "a name twice": (with_header(f'{{"a":{json.dumps(TWO)},"a":{json.dumps(TWO)}}}'.encode(), EIGHT), "duplicate-name"),
    "a name twice, once escaped": (
        with_header(f'{{"a":{json.dumps(TWO)},"\\u0061":{json.dumps(TWO)}}}'.encode(), EIGHT),
        "duplicate-name",
    ),
    "a field twice": (
        with_header(b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', EIGHT),
        "bad-header",
    ),
    "a field missing": (with_header({"a": {"dtype": "F32", "shape": [2]}}, EIGHT), "bad-header"),
    "a field too many": (with_header(of(name="x"), EIGHT), "bad-header"),
    "an unknown dtype": (with_header(of(dtype="F33"), EIGHT), "bad-dtype"),
    "a dtype that is no text": (with_header(of(dtype=32), EIGHT), "bad-dtype"),
    "a negative size": (with_header(of(shape=[-2]), EIGHT), "bad-shape"),
    "a size that is a float": (with_header(of(shape=[2.0]), EIGHT), "bad-shape"),
    "a size that is true": (with_header(of(shape=[True]), EIGHT), "bad-shape"),
    "a shape that is a number": (with_header(of(shape=2), EIGHT), "bad-shape"),
    "a shape that overflows": (with_header(of(shape=[2**40, 2**40]), EIGHT), "bad-shape"),
    "65 axes": (with_header(of(shape=[1] * 64 + [2]), EIGHT), "bad-shape"),
    "falling offsets": (with_header(of(data_offsets=[8, 0]), EIGHT), "bad-offsets"),
    "negative offsets": (with_header(of(data_offsets=[-8, 0]), EIGHT), "bad-offsets"),
    "three offsets": (with_header(of(data_offsets=[0, 4, 8]), EIGHT), "bad-offsets"),
    "offsets beyond 2^63": (with_header(of(data_offsets=[2**70, 2**70 + 8]), EIGHT), "bad-offsets"),
    "overlapping tensors": (with_header({"a": TWO, "b": TWO | {"data_offsets": [4, 12]}}, bytes(12)), "bad-offsets"),
    "a hole": (with_header({"a": TWO, "b": TWO | {"data_offsets": [12, 20]}}, bytes(20)), "bad-offsets"),
    "a hole at the start": (with_header(of(data_offsets=[4, 12]), bytes(12)), "bad-offsets"),
    "bytes that are not the shape's": (with_header(of(shape=[3]), EIGHT), "size-mismatch"),
    "half a byte": (with_header(of(dtype="F4", shape=[3], data_offsets=[0, 1]), b"\0"), "size-mismatch"),
    "data cut off": (with_header(of(), bytes(7)), "length-mismatch"),
    "data behind the end": (with_header(of(), bytes(9)), "length-mismatch"),
    "metadata of numbers": (with_header({"__metadata__": {"a": 1}, **of()}, EIGHT), "bad-metadata"),
    "metadata twice": (
        with_header(f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{json.dumps(TWO)}}}'.encode(), EIGHT),
        "duplicate-name",
    ),
    "a name of the metadata twice": (
        with_header(f'{{"__metadata__":{{"x":"1","x":"2"}},"a":{json.dumps(TWO)}}}'.encode(), EIGHT),
        "duplicate-name",
    ),
    "large metadata": (with_header({"__metadata__": {"a": "x" * 11_000_000}, **of()}, EIGHT), "bad-metadata"),
    "too many tensors": (
        with_header(b"{" + b",".join(map(EMPTY.__mod__, range(TENSORS + 1))) + b"}"),
        "too-many-tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", MALFORMED)
def test_a_malformed_file_is_refused_with_its_defect(tmp_path: Path, defect: str) -> None:
    data, code = MALFORMED[defect]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert caught.value.code == code
    assert caught.value.path == str(path)
    assert len(caught.value.reason) < 400


def test_the_same_file_without_a_defect_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(with_header(of(), EIGHT))
    assert read(path).entries == {"a": Entry("F32", (2,), 0, 8)}


def test_a_header_may_be_written_in_any_way_that_is_json() -> None:
    text = json.dumps({"__metadata__": {"k": 'v "}{" \\ ü'}, 'ä\t"b': TWO}, indent=2, ensure_ascii=True) + "   "
    assert parse(text.encode(), 8, "x") == {'ä\t"b': Entry("F32", (2,), 0, 8)}
    swapped = b'{"a":{"data_offsets":[0,8],"shape":[2],"dtype":"F32"}}'
    assert parse(swapped, 8, "x") == {"a": Entry("F32", (2,), 0, 8)}


@pytest.mark.parametrize("kind", ["fifo", "folder", "missing", "nul"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "nul":
        path = Path("a\0.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert caught.value.code in ("not-a-file", "unreadable", "no-weights")


def test_the_numbers_are_those_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    stored = {
        f"norm{i}.weight": torch.randn(6).to(dtype)
        for i, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32, torch.float64))
    }
    stored |= {
        "bn.running_var": torch.rand(3),
        "bn.running_mean": torch.rand(3),
        "bn.num_batches_tracked": torch.tensor(7),
    }
    save_file(stored, path, metadata={"format": "pt"})
    held = {
        name: t for norm in read(path).norms for name, t in zip(norm.names.values(), norm.tensors.values(), strict=True)
    }
    theirs = load_file(path)
    assert held.keys() == theirs.keys()
    assert all(torch.equal(held[name], theirs[name]) and held[name].dtype == theirs[name].dtype for name in theirs)


def test_100000_tensors_take_less_than_two_seconds_of_processor_time(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sparse(path, {f"model.layers.{i // 256}.mlp.experts.{i % 256}.up.weight": ("BF16", (4, 4)) for i in range(100_000)})
    started = time.process_time()
    assert len(read(path).entries) == 100_000
    assert time.process_time() - started < 2


def test_only_norms_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    size = sparse(path, {"a.weight": ("F32", (40_000, 40_000)), "norm.weight": ("F32", (40_000,))})
    found = read(path)
    assert (found.size, found.bytes_read) == (size, size - 4 * 40_000**2)
    assert str(found.notes[0]).startswith("a checkpoint without its model: read 160 kB of 6.4 GB in 1 file")
    assert "6.4 GB" in in_language(found.notes[0], "zh")


@pytest.mark.parametrize(
    ("shape", "size"), [((2**23,), 2**25), ((0,), 0), ((1,), 4)], ids=["beyond any width", "empty", "one number"]
)
def test_a_vector_that_can_be_no_gain_is_not_read(tmp_path: Path, shape: tuple[int, ...], size: int) -> None:
    path = tmp_path / "model.safetensors"
    assert sparse(path, {"norm.weight": ("F32", shape)}) >= size
    assert read(path).norms == ()


def test_norms_beyond_the_limit_in_all_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sparse(path, {f"{i}.norm.weight": ("F32", (2**22,)) for i in range(9)})
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert caught.value.code == "norms-too-large"


# -- mutations ---------------------------------------------------------------------------------

_BYTES = st.binary(min_size=1, max_size=8)
_PIECES = st.sampled_from(
    [*(bytes([c]) for c in b'{}[]":,\\\0\xff'), b"-1", b"1e9", b"null", b"\\u0000", b'"a":', b"9" * 20]
)


@st.composite
def mutated(draw: st.DrawFn, original: bytes) -> bytes:
    """Draw some bytes changed, inserted, removed or repeated."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        piece = draw(st.one_of(_BYTES, _PIECES))
        match draw(st.integers(0, 4)):
            case 0:
                data[at : at + len(piece)] = piece
            case 1:
                data[at:at] = piece
            case 2:
                del data[at : at + draw(st.integers(1, 40))]
            case 3:
                data[at:at] = data[at : at + draw(st.integers(1, 60))]
            case _:
                data = data[:at]
    return bytes(data)


INDEX = json.dumps(
    {"metadata": {"total_size": 320}, "weight_map": {"layers.0.mlp.weight": "model-1.safetensors"}}
).encode()
CONFIG = json.dumps({"model_type": "llama", "rms_norm_eps": 1e-6, "text_config": {"norm_eps": [1e-5]}}).encode()


def _file(folder: Path, data: bytes) -> Path:
    (folder / "model.safetensors").write_bytes(data)
    return folder / "model.safetensors"


def _fixed_header(folder: Path, data: bytes) -> Path:
    """Write a changed header with the length that it has: changes reach the parser."""
    original = sound()
    length = int.from_bytes(original[:8], "little")
    return _file(folder, with_header(data, original[8 + length :]))


def _index(folder: Path, data: bytes) -> Path:
    (folder / "model-1.safetensors").write_bytes(sound())
    (folder / "model.safetensors.index.json").write_bytes(data)
    return folder / "model.safetensors.index.json"


def _config(folder: Path, data: bytes) -> Path:
    (folder / "config.json").write_bytes(data)
    _file(folder, sound())
    return folder


_HEADER = sound()[8 : 8 + int.from_bytes(sound()[:8], "little")]
FORMATS: dict[str, tuple[bytes, Callable[[Path, bytes], Path]]] = {
    "file": (sound(), _file),
    "header": (_HEADER, _fixed_header),
    "index": (INDEX, _index),
    "config": (CONFIG, _config),
}


def _read_or_refuse(name: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = FORMATS[name][1](Path(folder), data)
        before = sorted(os.listdir(folder))
        refused = None
        try:
            read(path)
        except CheckpointError as error:
            refused = error
        assert refused is None or (refused.code in CODES and refused.reason)
        assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150)
@given(data=st.data())
def test_mutations_are_read_or_refused(name: str, data: st.DataObject) -> None:
    _read_or_refuse(name, data.draw(mutated(FORMATS[name][0])))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20_000)
@given(data=st.data())
def test_20000_mutations_are_read_or_refused(name: str, data: st.DataObject) -> None:
    _read_or_refuse(name, data.draw(mutated(FORMATS[name][0])))


def test_what_the_library_takes_and_we_refuse_is_known() -> None:
    """Every dtype of the installed library is known here."""
    from safetensors.torch import _TYPES

    assert _TYPES.keys() <= BITS.keys()
    assert DEPTH < 1000  # of Python's own recursion
