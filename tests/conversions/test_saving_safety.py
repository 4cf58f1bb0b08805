"""What can go wrong while a model is written: the source stays as it is, and there is no half output."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import normwise as nw
from normwise.conversions import Converted
from normwise.conversions.saving import convert_checkpoint, publishing
from normwise.errors import ConversionRefused
from tests.conversions.folders import IDS, hashes, saved
from tests.file_limit import file_limit

MARK = ".normwise-"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("gpt2", tmp_path_factory.mktemp("safety") / "model")


@pytest.fixture(scope="module")
def converted(source: Path) -> Converted:
    return nw.convert("rms-norm", f"hf:{source}", IDS)


def streamed(done: Converted, out: Path, **options: Any) -> dict[str, Any]:
    source = done.target.name.removeprefix("hf:")
    return convert_checkpoint(done.plan, source, out, model=done.target.model, **options)


@pytest.fixture
def untouched(source: Path) -> Iterator[None]:
    before = hashes(source)
    yield
    assert hashes(source) == before


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda source: source, "is the source itself"),
        (lambda source: source / "model.safetensors", "is the source itself"),
        (lambda source: source / "deep" / "out", "lies inside the source"),
        (lambda source: source / ".." / source.name / "out", "lies inside the source"),
        (lambda source: source.parent, "contains the source"),
    ],
)
@pytest.mark.usefixtures("untouched")
def test_an_output_that_could_harm_the_source_is_refused_even_with_force(
    converted: Converted, source: Path, place: Callable[[Path], Path], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        streamed(converted, place(source), force=True)


@pytest.mark.usefixtures("untouched")
def test_a_link_to_the_source_is_the_source(converted: Converted, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "other").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is the source itself"):
        streamed(converted, tmp_path / "link", force=True)
    with pytest.raises(ValueError, match="lies inside the source"):
        streamed(converted, tmp_path / "link" / "out", force=True)
    with pytest.raises(ValueError, match="is a symbolic link"):
        streamed(converted, tmp_path / "other", force=True)


def test_what_is_there_is_replaced_only_on_request_and_as_a_whole(converted: Converted, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        streamed(converted, out)
    assert (out / "precious").read_text() == "mine"
    streamed(converted, out, force=True)
    assert "precious" not in hashes(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_and_missing_parents_are_no_obstacle(converted: Converted, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    streamed(converted, tmp_path / "empty")
    streamed(converted, tmp_path / "a" / "b" / "out")
    assert nw.load(tmp_path / "empty").state_dict().keys() == nw.load(tmp_path / "a" / "b" / "out").state_dict().keys()


def test_a_file_in_the_way_is_named(converted: Converted, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        streamed(converted, tmp_path / "file" / "out")
    with pytest.raises(ValueError, match="is a file, and the output is a folder"):
        streamed(converted, tmp_path / "file", force=True)
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(ValueError, match="is a folder, and the output is a file"):
        streamed(converted, tmp_path / "x.safetensors", force=True)


def test_the_folder_one_stands_in_is_never_replaced(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="contains the folder you are in"):
        streamed(converted, tmp_path, force=True)


@pytest.mark.usefixtures("untouched")
def test_too_little_room_is_said_before_anything_is_written(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(publishing.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"0\.00 GB free and 0\.01 GB are needed"):
        streamed(converted, tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("untouched")
def test_a_limit_of_file_size_met_while_writing_leaves_nothing(converted: Converted, tmp_path: Path) -> None:
    with file_limit(8192), pytest.raises(OSError, match="the disk is full, or a limit of file size was met") as failure:
        streamed(converted, tmp_path / "deep" / "out")
    assert failure.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("untouched")
def test_a_full_disk_leaves_the_old_output(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed(converted, tmp_path / "out")
    before = hashes(tmp_path / "out")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("normwise.conversions.saving.tensors.os.fsync", full)
    with pytest.raises(OSError, match="the disk is full"):
        streamed(converted, tmp_path / "out", force=True)
    assert hashes(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("untouched")
def test_an_interrupt_leaves_nothing(converted: Converted, tmp_path: Path) -> None:
    def interrupt(text: str, done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        streamed(converted, tmp_path / "out", advance=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_the_same_after_reload_is_not_kept(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "normwise.conversions.saving.streaming.make", lambda recipe, source: source(recipe.keys[0]) * 1.001
    )
    with pytest.raises(ConversionRefused, match="what was written is not what was converted"):
        streamed(converted, tmp_path / "out", converted=converted)
    assert list(tmp_path.iterdir()) == []


def test_without_verification_the_report_says_so(converted: Converted, tmp_path: Path) -> None:
    report = streamed(converted, tmp_path / "out")
    assert (report["verified"], report["proof"]) == (False, None)
    assert "**not verified" in (tmp_path / "out" / "report.md").read_text()
    assert converted.save(tmp_path / "saved", verify=False)["verified"] is False
    assert "**not verified" in (tmp_path / "saved" / "report.md").read_text()


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    source = saved("gpt2", tmp_path / "in")
    converted = nw.convert("rms-norm", f"hf:{source}", IDS)
    file = source / "model.safetensors"

    def meddle(text: str, done: int, total: int) -> None:
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")

    with pytest.raises(ConversionRefused, match="the source was changed while it was converted"):
        streamed(converted, tmp_path / "out", advance=meddle)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_a_killed_run_left_is_removed_and_what_it_had_moved_comes_back(
    converted: Converted, tmp_path: Path
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f"{MARK}{dead.pid}-1a2b3c4d-out").mkdir()
    (tmp_path / f"{MARK}{dead.pid}-old-kept").mkdir()
    (tmp_path / f"{MARK}{dead.pid}-old-kept" / "precious").write_text("mine")
    alive = tmp_path / f"{MARK}{os.getppid()}-1a2b3c4d-other"
    alive.mkdir()
    streamed(converted, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive.name, "kept", "out"])
    assert (tmp_path / "kept" / "precious").read_text() == "mine"


KILLER = """
import os, random, signal, sys, time
import torch
from torch import nn
from normwise.cli import main
from normwise.conversions import Plan, Recipe, Step
from normwise.conversions.saving import convert_checkpoint

source, out, times, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)  # no threads: every victim is a fork of this process, which has imported everything
with torch.device("meta"):
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(16))})
steps = (Step(function="centre", numbers={"dim": 0}),)
plan = Plan(conversion="by-hand", recipes=tuple(Recipe(keys=(key,), steps=steps) for key in model.state_dict()))
command = ["convert", "rms-norm", f"hf:{source}", "-o", out, "--force", "--inputs", "1x3:long"]
devnull, chance, longest = os.open(os.devnull, os.O_WRONLY), random.Random(0), 0.5 if how == "library" else 4.0
for _ in range(times):
    victim = os.fork()
    if victim == 0:
        os.dup2(devnull, 1)
        while how == "command":
            assert main(command) == 0
        while True:
            convert_checkpoint(plan, source, out, model=model, format="safetensors", force=True)
    time.sleep(chance.uniform(0.01, longest))
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    print("killed", flush=True)
    assert sys.stdin.readline() == "go on\\n"
"""


def shards(source: Path) -> None:
    """Write what the library converts: 16 matrices in two shards."""
    source.mkdir()
    torch.manual_seed(0)
    for half in range(2):
        tensors = {f"layers.{n}.weight": torch.randn(512, 512) for n in range(8 * half, 8 * half + 8)}
        save_file(tensors, source / f"model-{half}.safetensors", metadata={"format": "pt"})
    weight_map = {f"layers.{n}.weight": f"model-{n // 8}.safetensors" for n in range(16)}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def killed(folder: Path, times: int, how: str) -> None:
    """Kill a process that converts again and again, at random points; look at what is there each time."""
    source, out = folder / "in", folder / "out"
    before, outputs, strays = hashes(source), [], 0
    arguments = [sys.executable, "-c", KILLER, str(source), str(out), str(times), how]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as killer:
        assert killer.stdin is not None
        assert killer.stdout is not None
        for _ in range(times):
            assert killer.stdout.readline() == "killed\n"
            assert hashes(source) == before
            if out.exists():  # between the two renames of --force the old one lies beside: the next run puts it back
                outputs.append(hashes(out))
            left = [path.name for path in folder.iterdir() if path.name not in ("in", "out")]
            assert all(name.startswith(MARK) for name in left)
            strays += len(left)
            killer.stdin.write("go on\n")
            killer.stdin.flush()
    assert killer.returncode == 0
    assert strays > 0 or how == "command"  # the kills did hit the writing, which is a small part of a command
    assert outputs
    assert all(found == outputs[0] and len(found) >= 5 for found in outputs)
    publishing._sweep(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["in", "out"]
    assert hashes(out) == outputs[0]


@pytest.mark.slow
def test_sixty_kills_leave_the_source_and_no_half_output(tmp_path: Path) -> None:
    shards(tmp_path / "in")
    killed(tmp_path, 60, "library")


def test_a_few_kills_leave_the_source_and_no_half_output(tmp_path: Path) -> None:
    shards(tmp_path / "in")
    killed(tmp_path, 6, "library")


@pytest.mark.slow
def test_fifty_kills_of_the_command_leave_the_source_and_no_half_output(tmp_path: Path) -> None:
    saved("gpt2", tmp_path / "in")
    killed(tmp_path, 50, "command")
