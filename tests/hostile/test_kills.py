"""A process that is killed while it writes leaves the old file or the new one, whole; the next write sweeps up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hostile.commands import contents
from tests.hostile.warm import ROOT, Warm
from tests.hostile.writers import KILLED

KILLS = 500
_EACH = -(-KILLS // len(KILLED))
_CONVERSIONS = 20


def _judge(warm: Warm, name: str, times: int, folder: Path) -> None:
    answer = warm.do("writers:killed", name, str(folder), times, 7, limit=900)
    assert answer.status == 0
    found = answer.value
    print(f"{name}: {found}")
    assert found["contents"] == 2  # else a torn file could not be told
    assert (found["whole"], found["torn"]) == (times, 0)
    assert found["files"] == [name]


@pytest.mark.parametrize("name", ["report.html", "report.json", "baseline.json", "export.csv"])
def test_five_kills_tear_no_file(name: str, warm: Warm, tmp_path: Path) -> None:
    _judge(warm, name, 5, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED)
def test_no_kill_tears_a_file(name: str, warm: Warm, tmp_path: Path) -> None:
    _judge(warm, name, _EACH, tmp_path)


@pytest.mark.slow
def test_a_killed_conversion_leaves_a_whole_output(tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    command = [sys.executable, "-m", "normwise", "convert", "swap-layers", "demo:faulty-decoder", "-o", str(out)]
    command += ["--force", "--no-verify"]
    began = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    lasts, whole = time.monotonic() - began, contents(tmp_path)["model.safetensors"][2]
    for number in range(_CONVERSIONS):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(lasts * (0.7 + 0.4 * number / _CONVERSIONS))  # the write is at the end
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert contents(tmp_path)["model.safetensors"][2] == whole
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert {name for name in contents(tmp_path) if name.startswith(".normwise-")} == set()
