"""A disk that is full: exit 2, one message that names the file, the old content there, nothing left beside it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.warm import Warm
from tests.hostile.writers import COMMANDS

_SIZES = tuple(2**power * 1024 for power in range(6, 14))  # 64 KiB to 8 MiB


def _judge(found: dict[str, Any], place: Path, name: str) -> None:
    assert found["code"] == 2, found["err"]
    assert found["old"]
    assert found["others"] == []
    *_, last = found["err"].strip().splitlines()
    assert last.startswith("normwise: ")
    assert str(place / name) in last or f"{place}:" in last  # a conversion asks for room in the folder before it begins
    assert "bug in normwise" not in last


@pytest.mark.parametrize("most", [0, 100])
@pytest.mark.parametrize("name", ["report.html", "report.sarif", "baseline.json", "model.safetensors", "export.csv"])
def test_a_file_that_may_not_grow_stays_as_it_was(name: str, most: int, warm: Warm, tmp_path: Path) -> None:
    _judge(warm.do("writers:filled", name, str(tmp_path), most).value, tmp_path, name)


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Give a disk of a size, which only root may make."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk may be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("disk", _SIZES, indirect=True, ids=lambda size: f"{size // 1024} KiB")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_keeps_the_old_file(name: str, disk: Path, warm: Warm) -> None:
    _judge(warm.do("writers:filled", name, str(disk), None).value, disk, name)
