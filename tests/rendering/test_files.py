from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from normwise.rendering.files import replace, suffix


def dead() -> int:
    """Return the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_write_takes_away_what_dead_processes_left_and_nothing_else(tmp_path: Path) -> None:
    gone = dead()
    stale = tmp_path / f".normwise-{gone}-0123abcd.tmp"
    kept = [
        tmp_path / f".normwise-{os.getppid()}-0123abcd.tmp",  # its process lives
        tmp_path / f".normwise-{gone}-0123abcd.tmp.json",
        tmp_path / f"normwise-{gone}-0123abcd.tmp",
        tmp_path / f".normwise-{gone}-0123ABCD.tmp",
        tmp_path / f".normwise-0{gone}-0123abcd.tmp",
        tmp_path / f".normwise-{10**30}-0123abcd.tmp",  # no process can have this number
        tmp_path / ".normwise-0-0123abcd.tmp",  # signal 0 to 0 asks the whole group
        tmp_path / ".report.json.0123abcd.tmp",
    ]
    for path in (stale, *kept):
        path.write_text("precious")
    target = tmp_path / "precious"
    target.write_text("precious")
    link = tmp_path / f".normwise-{gone}-00000000.tmp"
    link.symlink_to(target)
    folder = tmp_path / f".normwise-{gone}-11111111.tmp"
    folder.mkdir()
    replace(tmp_path / "report.txt", "new")
    assert not stale.exists()
    assert {path.name for path in tmp_path.iterdir()} == {
        *(path.name for path in kept), "precious", link.name, folder.name, "report.txt",
    }  # fmt: skip


def test_a_killed_write_leaves_the_old_file_and_the_next_write_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    code = (
        "import os, signal, sys; from pathlib import Path; from normwise.rendering import files\n"
        "files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.replace(Path(sys.argv[1]), 'new')"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2
    replace(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text() == "new"


def test_a_folder_that_cannot_be_listed_can_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no list")

    monkeypatch.setattr(os, "scandir", refuse)
    replace(tmp_path / "a", b"\x00")
    assert (tmp_path / "a").read_bytes() == b"\x00"


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("a.json", ".json"), ("A.SARIF.JSON", ".sarif.json"), ("v1.2.json", ".json"), ("a.sarif", ".sarif"),
        ("a.json.gz", None), ("json", None), (".json", None), ("a.", None), ("a.sarif.x.json", ".json"),
    ],
)  # fmt: skip
def test_the_longest_known_ending_counts(name: str, ending: str | None) -> None:
    assert suffix(Path("v1.sarif.d") / name, [".json", ".sarif.json", ".sarif"]) == ending


def test_what_cannot_be_written_is_named_and_not_its_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "report.json"
    with pytest.raises(FileNotFoundError) as caught:
        replace(path, "new")
    assert caught.value.filename == str(path)


def test_a_write_that_the_system_breaks_off_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: .*report\.json"):
        replace(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]
