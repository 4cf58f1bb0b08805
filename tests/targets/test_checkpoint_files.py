"""Files, indexes and folders as targets: which is taken, how much is read, and what is said where nothing can be."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import normwise as nw
from normwise import targets
from normwise.checkup.reports import render
from normwise.cli import main
from normwise.errors import CheckpointError, TargetError
from normwise.rendering import in_language
from normwise.targets.checkpoint import CODES, read
from tests.targets.checkpoint_files import sparse_llama

NORM = {"norm.weight": torch.full((8,), 1.1)}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Return a folder with two shards, their index and a config.json."""
    save_file({"a.norm.weight": torch.rand(8) + 1, "a.weight": torch.randn(8, 8)}, tmp_path / "model-1.safetensors")
    save_file({"b.norm.weight": torch.rand(8) + 1}, tmp_path / "model-2.safetensors")
    placed = {"a.norm.weight": "model-1.safetensors", "a.weight": "model-1.safetensors"}
    placed |= {"b.norm.weight": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5}))
    return tmp_path


def refusal(path: Path) -> CheckpointError:
    """Return the error that a path ends in."""
    with pytest.raises(CheckpointError) as caught:
        read(path)
    return caught.value


def placed_as(folder: Path, **changed: str) -> Path:
    """Write the index anew with some tensors elsewhere."""
    index = folder / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    held["weight_map"] |= {name.replace("_", "."): shard for name, shard in changed.items()}
    index.write_text(json.dumps(held))
    return index


@pytest.mark.parametrize("given", ["folder", "index"])
def test_an_index_and_its_folder_are_the_same_checkpoint(sharded: Path, given: str) -> None:
    found = read(sharded if given == "folder" else sharded / "model.safetensors.index.json")
    assert [n.path for n in found.norms] == ["a.norm", "b.norm"]
    assert found.files == 2
    assert found.config == {"model_type": "llama", "rms_norm_eps": 1e-5}


def test_the_links_of_a_hub_cache_are_followed(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    snapshot = tmp_path_factory.mktemp("snapshot")
    for file in sharded.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert len(read(snapshot).norms) == 2


def test_a_shard_that_is_missing_is_named(sharded: Path) -> None:
    (sharded / "model-2.safetensors").unlink()
    error = refusal(sharded)
    assert error.code == "shard-missing"
    assert "model-2.safetensors" in error.reason


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    error = refusal(placed_as(sharded, c_norm_weight="model-2.safetensors"))
    assert error.code == "tensor-missing"
    assert "c.norm.weight" in error.reason


def test_a_tensor_that_the_index_lacks_is_a_note(sharded: Path) -> None:
    save_file({"b.norm.weight": torch.ones(8), "spare.norm.weight": torch.ones(8)}, sharded / "model-2.safetensors")
    found = read(sharded)
    assert [n.path for n in found.norms] == ["a.norm", "b.norm"]
    assert "1 tensors of the shards are not in the index" in found.notes[1]


@pytest.mark.parametrize(
    "shard", ["../m.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", ".safetensors", "x\ny.safetensors", ""]
)  # fmt: skip
def test_a_shard_is_a_plain_file_name(sharded: Path, shard: str) -> None:
    assert refusal(placed_as(sharded, a_weight=shard)).code == "bad-shard-name"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[]", "bad-index"),
        ("{}", "bad-index"),
        ('{"weight_map": []}', "bad-index"),
        ('{"weight_map": {}}', "bad-index"),
        ('{"weight_map": {"a": 1}}', "bad-shard-name"),
        ('{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}', "bad-json"),
        ('{"weight_map": ', "bad-json"),
        ('{"weight_map": ' + "[" * 100_000, "json-too-large"),
        ("[" + "1," * 2_000_001 + "1]", "json-too-large"),
        (json.dumps({"weight_map": {"a" * 513: "m.safetensors"}}), "name-too-long"),
        (json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(5000)}}), "too-many-shards"),
        ("", "bad-json"),
    ],
    ids=range(12),
)
def test_a_broken_index_is_refused(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert refusal(tmp_path).code == code


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "bad-json"),
        (b"[]", "bad-config"),
        (b"3", "bad-config"),
        (b"null", "bad-config"),
        (b'{"a": 1', "bad-json"),
        (b'{"a": 1, "a": 2}', "bad-json"),
        (b"\xff\xfe{}", "bad-json"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "json-too-large"),
        (b'{"a": "' + b"x" * 10_000_001 + b'"}', "json-too-large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "bad-json"),
    ],
    ids=range(10),
)
def test_a_broken_configuration_is_refused(tmp_path: Path, data: bytes, code: str) -> None:
    save_file(NORM, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(data)
    error = refusal(tmp_path)
    assert error.code == code
    assert error.path.endswith("config.json")


def test_a_configuration_as_python_writes_it_is_read(tmp_path: Path) -> None:
    save_file(NORM, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}')
    assert read(tmp_path).config


def test_code_that_a_configuration_points_to_is_a_note(tmp_path: Path) -> None:
    save_file(NORM, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoModel": "m.Mine"}}')
    (tmp_path / "m.py").write_text("raise SystemExit")
    assert "auto_map" in read(tmp_path).notes[-1]


def test_the_weights_of_a_folder(tmp_path: Path) -> None:
    torch.save(NORM, tmp_path / "pytorch_model.bin")
    assert read(tmp_path).norms[0].path == "norm"
    save_file({"other.norm.weight": torch.ones(4)}, tmp_path / "adapter.safetensors")
    assert read(tmp_path).norms[0].path == "other.norm"
    save_file(NORM, tmp_path / "model.safetensors")
    assert read(tmp_path).norms[0].path == "norm"
    (tmp_path / "model.safetensors").rename(tmp_path / "second.safetensors")
    error = refusal(tmp_path)
    assert error.code == "several-weights"
    assert "adapter.safetensors, second.safetensors" in error.reason


def test_a_folder_without_weights_is_told_apart_from_one_with_pickled_shards(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    error = refusal(tmp_path)
    assert error.code == "no-weights"
    assert f"hf:{tmp_path}" in error.reason
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    assert refusal(tmp_path).code == "pickled-shards"


def test_an_archive_of_more_than_4_gb_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(NORM, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        members = {item.filename: archive.read(item) for item in archive.infolist()}
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)  # as if everything were beyond it
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    assert torch.equal(read(tmp_path / "model.pt").norms[0].tensors["weight"], NORM["norm.weight"])


# -- as a target ----------------------------------------------------------------------------------


def test_a_checkpoint_is_a_target_without_a_forward(sharded: Path) -> None:
    target = targets.load(str(sharded))
    assert target.inputs_from is targets.InputsFrom.NONE
    assert target.stored is not None
    assert target.weights is targets.Weights.REAL
    with pytest.raises(RuntimeError, match="not the model that uses them"):
        target.model(torch.ones(2))


@pytest.mark.parametrize("option", [{"inputs": "2x8"}, {"dtype": "float16"}, {"device": "cpu"}])
def test_what_is_about_a_run_is_refused(sharded: Path, option: dict[str, str]) -> None:
    with pytest.raises(TargetError, match="a checkpoint h"):
        targets.load(str(sharded), **option)  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="inputs= has no meaning here"):
        nw.check(str(sharded), torch.ones(2, 8))


@pytest.mark.parametrize("name", ["forward", "train", "_modules", ".", "a." * 200 + "norm", "<b>norm\x1b[31m", ""])
def test_any_name_may_stand_in_a_checkpoint(tmp_path: Path, name: str) -> None:
    key = f"{name}.weight" if name else "weight"
    save_file({key: torch.rand(6) + 1, key.replace("weight", "bias"): torch.rand(6)}, tmp_path / "model.safetensors")
    report = nw.check(str(tmp_path / "model.safetensors"))
    assert [row.path for row in report.norms] == [name]
    for style in ("text", "html", "json"):
        assert "\x1b" not in render(report, style)


def test_the_report_of_a_checkpoint_says_what_it_is(sharded: Path) -> None:
    report = nw.check(str(sharded))
    text = report.to_text()
    assert "inputs none, a checkpoint does not run" in text
    assert "where the norms sit is not in a checkpoint" in text
    assert "a checkpoint without its model: read " in text
    assert "# read off the keys" in text
    assert in_language(report.notes[0], "zh").startswith("没有模型的检查点")
    assert report.cost.forward_passes == report.cost.backward_passes == 0
    assert report.unchanged


def test_an_empty_checkpoint_has_no_norms(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    assert (
        "no keys of the checkpoint look like those of a norm" in nw.map(str(tmp_path / "model.safetensors")).to_text()
    )


def test_the_exit_codes_of_the_command_line(
    sharded: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(sharded)]) == 0
    assert capsys.readouterr().err == ""
    other = tmp_path_factory.mktemp("other")
    save_file({"norm.weight": torch.tensor([1.0, float("nan")])}, other / "model.safetensors")
    assert main(["check", str(other / "model.safetensors")]) == 1
    capsys.readouterr()
    (other / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0[1,2]")
    assert main(["check", str(other / "model.safetensors")]) == 2
    said = capsys.readouterr().err
    assert said == f"normwise: {other / 'model.safetensors'}: the header does not begin with {{\n"
    assert main(["map", str(sharded)]) == 0
    assert capsys.readouterr().err == ""


# -- size ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "width", "least", "most_bytes"),
    [(8, 1024, 2e8, 300_000), pytest.param(50, 8192, 1e11, 4_000_000, marks=pytest.mark.slow)],
    ids=["8 shards", "50 shards, 100 GB"],
)
def test_a_large_sharded_checkpoint_is_examined_in_seconds(
    tmp_path: Path, shards: int, width: int, least: float, most_bytes: int
) -> None:
    size = sparse_llama(tmp_path, shards=shards, width=width)
    assert size > least
    started = time.process_time()
    report = nw.check(str(tmp_path))
    seconds = time.process_time() - started
    found = read(tmp_path)
    print(f"{size / 1e9:.1f} GB in {shards} shards: {found.bytes_read:,} bytes read, {seconds:.2f} s of processor time")
    assert len(report.norms) == 4 * shards
    assert found.bytes_read < most_bytes
    assert seconds < 5


def test_every_code_has_a_meaning() -> None:
    assert all(meaning and code == code.lower() for code, meaning in CODES.items())


def test_layers_of_torch_are_recognised_by_their_keys(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.PReLU(8), nn.Linear(1, 8), nn.LayerNorm(8),
        nn.Conv1d(8, 8, 1, groups=8), nn.BatchNorm1d(8, affine=False), nn.LayerNorm([4, 8]), nn.Linear(8, 1),
    )  # fmt: skip
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = {n.path: str(n.keys) for n in read(tmp_path / "model.safetensors").norms}
    both, running = "weight and bias", "running statistics"
    assert found == {"1": running, "2": both, "5": both, "7": running}  # [4, 8] could be anything without a name
