"""A pickle of weights is opened by torch in a process with limits, or refused: nothing in it ever runs."""

from __future__ import annotations

import os
import pickle
import random
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normwise.errors import CheckpointError
from normwise.targets.checkpoint import CODES, pickled, read
from normwise.targets.checkpoint.archive import pickle_of
from normwise.targets.checkpoint.files import File
from normwise.targets.checkpoint.globals_of import examine
from tests.targets.checkpoint_files import repacked


class Runs:
    """Runs a program when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a file with two norms and a matrix, as torch.save writes it."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(fc=nn.Linear(6, 6), norm=nn.LayerNorm(6), bn=nn.BatchNorm1d(6)))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def refusal(path: Path) -> CheckpointError:
    """Return the error that a file ends in."""
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert caught.value.code in CODES
    return caught.value


def test_the_tensors_of_norms_come_back_as_they_were(saved: Path) -> None:
    found = read(saved)
    stored = torch.load(saved, weights_only=True)
    assert found.entries.keys() == stored.keys()
    assert [n.path for n in found.norms] == ["norm", "bn"]
    for norm in found.norms:
        for role, tensor in norm.tensors.items():
            assert torch.equal(tensor, stored[norm.names[role]])
            assert tensor.dtype == stored[norm.names[role]].dtype
    assert found.bytes_read == found.size == saved.stat().st_size


def test_the_model_is_found_in_a_training_checkpoint(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {"epoch": 3, "optimizer": optimizer.state_dict(), "ema": model.state_dict(), "model": model.state_dict()}
    torch.save(state, tmp_path / "last.ckpt")
    found = read(tmp_path / "last.ckpt")
    assert [n.path for n in found.norms] == ["1"]
    assert found.notes[1].startswith("the tensors under the key model were read; not under ")
    assert "ema" in found.notes[1]


def test_tensors_that_share_or_repeat_their_numbers_come_back(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    torch.save({"a.norm.weight": base[1], "b.norm.weight": base[:, 2], "c.norm.weight": base.t()[3]}, tmp_path / "m.pt")
    held = {n.path: n.tensors["weight"] for n in read(tmp_path / "m.pt").norms}
    assert torch.equal(held["a.norm"], base[1])
    assert torch.equal(held["b.norm"], base[:, 2])
    assert torch.equal(held["c.norm"], base[:, 3])


PAYLOADS = {
    "os.system": Runs(os.system, "touch MARK"),
    "subprocess": Runs(subprocess.call, ["touch", "MARK"]),
    "exec": Runs(exec, "open('MARK', 'w')"),
    "importlib": Runs(__import__("importlib").import_module, "antigravity"),
    "a whole module": nn.LayerNorm(4),
}


@pytest.mark.parametrize(
    ("reads", "payload"),
    [
        *(pytest.param(examine, payload, id=f"{name}-by its opcodes") for name, payload in PAYLOADS.items()),
        # torch refuses every function alike, in a process of its own that takes seconds
        *(
            pytest.param(
                None, payload, id=f"{name}-by torch alone",
                marks=() if name in ("os.system", "a whole module") else pytest.mark.slow,
            )
            for name, payload in PAYLOADS.items()
        ),
    ],
)  # fmt: skip
def test_what_needs_code_is_refused_by_name_and_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Any, payload: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    if reads is None:  # the opcodes are looked at for speed alone: torch refuses without it
        monkeypatch.setattr(pickled, "examine", lambda *_: None)
    torch.save({"norm.weight": torch.ones(4), "x": payload}, tmp_path / "model.pt")
    error = refusal(Path("model.pt"))
    assert error.code == "pickle-needs-code"
    named = type(payload) if isinstance(payload, nn.Module) else payload.function
    assert named.__qualname__.rpartition(".")[2] in error.reason
    assert "save_file" in error.reason
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_hostile_name_of_a_global_is_cleaned(tmp_path: Path) -> None:
    torch.save({"norm.weight": torch.ones(4)}, tmp_path / "model.pt")
    evil = b"\x80\x02c\x1b[31mos\nsystem\n(tR."
    repacked(tmp_path / "model.pt", lambda name, data: evil if name.endswith("data.pkl") else data)
    reason = refusal(tmp_path / "model.pt").reason
    assert "\x1b" not in reason
    assert "␛[31mos.system" in reason


def test_a_legacy_pickle_is_refused_with_a_conversion_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {"state_dict": {"norm.weight": torch.randn(4), "epoch": 3}}
    torch.save(stored, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    error = refusal(tmp_path / "old.pt")
    assert error.code == "legacy-pickle"
    program = "\n".join(line.strip() for line in error.reason.splitlines()[1:])
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    made = read(tmp_path / "old.safetensors")
    assert torch.equal(made.norms[0].tensors["weight"], stored["state_dict"]["norm.weight"])


def test_a_plain_pickle_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(pickle.dumps({"a": Runs(os.system, "true")}))
    assert refusal(tmp_path / "model.bin").code == "legacy-pickle"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_with_a_conversion_that_works(tmp_path: Path) -> None:
    torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))).save(tmp_path / "script.pt")  # type: ignore[attr-defined]
    error = refusal(tmp_path / "script.pt")
    assert error.code == "torchscript"
    program = "\n".join(line.strip() for line in error.reason.splitlines()[1:])
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=tmp_path, check=True)
    assert [n.path for n in read(tmp_path / "script.safetensors").norms] == ["1"]


# -- archives ------------------------------------------------------------------------------------


def test_compressed_members_are_refused(saved: Path) -> None:
    repacked(saved, method=zipfile.ZIP_DEFLATED)
    assert refusal(saved).code == "compressed"


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a\\b", "C:x", "a//b", ""])
def test_members_with_hostile_names_are_refused(saved: Path, name: str) -> None:
    repacked(saved, extra={"marker-of-six": b"x"})
    raw = saved.read_bytes()
    new = name.encode().ljust(13, b"_") if name else b"\xff" * 13
    saved.write_bytes(raw.replace(b"marker-of-six", new))
    assert refusal(saved).code == "bad-member"


def test_a_member_that_occurs_twice_is_refused(saved: Path) -> None:
    repacked(saved, extra={"model/version2": b"3\n"})
    saved.write_bytes(saved.read_bytes().replace(b"model/version2", b"model/data.pkl"))
    assert refusal(saved).code == "bad-member"


def _put(raw: bytes, at: int, new: bytes) -> bytes:
    return raw[:at] + new + raw[at + len(new) :]


def _central(raw: bytes, field: int, new: bytes) -> bytes:
    """Return an archive with a field of the first entry of its directory changed."""
    return _put(raw, raw.index(b"PK\x01\x02") + field, new)


DEFECTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut in half": (lambda raw: raw[: len(raw) // 2], "bad-zip"),
    "bytes behind the end": (lambda raw: raw + b"x", "bad-zip"),
    "only a beginning": (lambda raw: b"PK\x03\x04" + bytes(60), "bad-zip"),
    "no archive": (lambda raw: b"\x89HDF" + bytes(100), "not-zip"),
    "nearly empty": (lambda raw: b"PK\x03\x04", "too-short"),
    "another method in the member's own header": (
        lambda raw: _put(raw, raw.index(b"PK\x03\x04") + 8, b"\x08\0"),
        "bad-zip",
    ),
    "declares more than the file": (lambda raw: _central(raw, 20, struct.pack("<2L", 2**31, 2**31)), "bad-zip"),
    "a member outside the file": (lambda raw: _central(raw, 42, struct.pack("<L", 2**31)), "bad-zip"),
    "encrypted": (lambda raw: _central(raw, 8, b"\x01\0"), "compressed"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_an_archive_that_contradicts_itself_is_refused(saved: Path, defect: str) -> None:
    change, code = DEFECTS[defect]
    repacked(saved)
    saved.write_bytes(change(saved.read_bytes()))
    assert refusal(saved).code == code


def test_an_archive_without_a_pickle_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model/version", "3\n")
    assert refusal(tmp_path / "model.pt").code == "bad-zip"


# -- what torch itself refuses, and what the process may not do ------------------------------------


def test_a_tensor_beyond_its_storage_is_refused(saved: Path) -> None:
    raw = {6: 2**31 - 1}

    def grow(name: str, data: bytes) -> bytes:
        return (
            data.replace(b"K\x06\x85", b"J" + struct.pack("<i", raw[6]) + b"\x85")
            if name.endswith("data.pkl")
            else data
        )

    repacked(saved, grow)
    assert refusal(saved).code in ("bad-pickle", "memory")


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "names": ["a", "b"]}, tmp_path / "model.pt")
    assert refusal(tmp_path / "model.pt").code == "no-tensors"


def test_a_process_that_takes_too_long_is_ended(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled, "_SECONDS", 0)
    assert refusal(saved).code == "timeout"


def test_a_process_that_dies_says_how(saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = tmp_path / "dies.py"
    worker.write_text("import os\nos.kill(os.getpid(), 11)\n")
    monkeypatch.setattr(pickled, "_WORKER", str(worker))
    error = refusal(saved)
    assert error.code == "killed"
    assert "SIGSEGV" in error.reason


def test_more_memory_than_the_file_allows_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled, "_HEADROOM", 0)
    assert refusal(saved).code in ("memory", "killed")


def test_a_file_larger_than_the_free_memory_is_refused_at_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled, "_free_memory", lambda: 1000)
    error = refusal(saved)
    assert error.code == "too-large"
    assert "save_file" in error.reason


def test_a_module_beside_the_file_is_not_imported(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "resource", "numpy"):
        (saved.parent / f"{name}.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(saved.parent)
    monkeypatch.setattr(sys, "path", ["", str(saved.parent), *sys.path])
    assert len(read(saved).norms) == 2
    assert not (saved.parent / "ran").exists()


def test_no_process_and_no_file_is_left_behind(saved: Path) -> None:
    opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    read(saved)
    repacked(saved, method=zipfile.ZIP_DEFLATED)
    refusal(saved)
    assert opened in (0, len(os.listdir("/proc/self/fd")))


# -- mutations -----------------------------------------------------------------------------------


def _changed(data: bytes, chance: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(made)) if made else 0
        match chance.randrange(4):
            case 0:
                made[at : at + 1] = chance.randbytes(1)
            case 1:
                made[at:at] = chance.randbytes(chance.randint(1, 4))
            case 2:
                del made[at : at + chance.randint(1, 30)]
            case _:
                made[at:at] = made[at : at + chance.randint(1, 50)]
    return bytes(made)


def _examine(data: bytes, folder: str) -> str | None:
    """Do everything that is done before torch sees the file, and return the code of the refusal."""
    path = Path(folder) / "model.pt"
    path.write_bytes(data)
    try:
        with File(path) as file:
            examine(pickle_of(file), str(path))
    except CheckpointError as error:
        return error.code
    return None


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", ["the archive", "the pickle"])
def test_mutations_end_in_a_refusal_or_reach_torch(saved: Path, part: str, count: int) -> None:
    chance = random.Random(0)
    original = saved.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(count):
            if part == "the pickle":
                saved.write_bytes(original)
                repacked(saved, lambda name, data: _changed(data, chance) if name.endswith("data.pkl") else data)
                data = saved.read_bytes()
            else:
                data = _changed(original, chance)
            assert _examine(data, folder) in {None, *CODES}


def test_mutated_pickles_that_reach_torch_end_in_a_refusal_or_are_read(saved: Path) -> None:
    chance = random.Random(1)
    original, seen = saved.read_bytes(), 0
    while seen < 3:
        saved.write_bytes(original)
        repacked(saved, lambda name, data: _changed(data, chance) if name.endswith("data.pkl") else data)
        with tempfile.TemporaryDirectory() as folder:
            if _examine(saved.read_bytes(), folder) is not None:
                continue
        seen += 1
        try:
            read(saved)
        except CheckpointError:
            continue
