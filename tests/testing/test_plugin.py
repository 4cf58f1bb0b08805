"""The fixture of pytest and its reports, in a pytest of its own; ``assert_clean``, which it calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch import nn

from normwise.errors import ConfigurationError, TargetError
from normwise.targets import InputsFrom, Target
from normwise.testing import assert_clean, clean, plugin

TESTS = """
import pytest
import torch
from torch import nn


@pytest.fixture
def decayed():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    return {"model": model, "inputs": torch.randn(4, 8), "optimizer": torch.optim.AdamW(model.parameters())}


@pytest.mark.parametrize("name", ["a/b", "\\u4f60\\u597d", "x" * 300])
def test_clean(normwise_check, decayed, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        report = normwise_check(**decayed, select="PAR001")
    assert [finding.code for finding in report.findings] == ["PAR001"]


def test_fails(normwise_check, decayed):
    normwise_check(**decayed, select="PAR001", fail_on="warning")


def test_without_it():
    pass
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of pytest in a folder, as a user has it."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_model.py").write_text(TESTS, "utf-8")
    return tmp_path


def test_pytest_finds_the_plugin_of_an_installed_normwise() -> None:
    found = [each.value for each in entry_points(group="pytest11") if each.name == "normwise"]
    assert found == ["normwise.testing.plugin"], "install normwise again: the environment is older than pyproject.toml"


def test_the_fixture_fails_a_test_and_writes_the_reports(folder: Path) -> None:
    code, said = run(folder, "--normwise-report", "out/reports")
    assert code == 1
    assert "1 failed, 4 passed" in said
    assert re.search(r"E +AssertionError: normwise: 1 finding in Sequential\n", said)
    assert re.search(r"E +PAR001 decayed-norm-scale \(warning\) at 1: ", said)
    assert re.search(r"E +why: normwise explain PAR001\n", said)
    files = sorted(path.name for path in (folder / "out" / "reports").iterdir())
    assert len(files) == 2 * (3 * 2 + 1)
    assert all(
        re.fullmatch(r"test_model\.py-test_[A-Za-z0-9_.-]+-[0-9a-f]{8}(-2)?\.(html|json)", name) for name in files
    )
    assert max(map(len, files)) <= 120
    (failed,) = (folder / "out" / "reports").glob("test_model.py-test_fails-*.json")
    assert [each["code"] for each in json.loads(failed.read_text())["findings"]] == ["PAR001"]
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["out", "test_model.py"]


def test_the_fixture_follows_the_configuration_of_the_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = '[[tool.normwise.per-module-ignores]]\nmodules = ["*"]\nrules = ["PAR001"]\nreason = "on purpose"\n'
    (folder / "pyproject.toml").write_text(f"[tool.pytest]\n{ignored}")
    assert run(folder, "-k", "fails")[0] == 0
    (folder / "pyproject.toml").write_text(f"[tool.pytest]\n{ignored.replace('PAR001', 'PAR0001')}")
    monkeypatch.chdir(folder)
    said = "^pyproject.toml:4: rules: no rule is called 'PAR0001': did you mean 'PAR001'\\?"
    with pytest.raises(ConfigurationError, match=said):
        clean.examined(nn.LayerNorm(8), torch.randn(2, 8), folder=folder, select="PAR001")


def test_a_file_in_place_of_the_folder_is_refused_before_any_test(folder: Path) -> None:
    (folder / "taken").write_text("precious")
    code, said = run(folder, "--normwise-report", "taken")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--normwise-report" in said
    assert "is no folder, name another" in said
    assert (folder / "taken").read_text() == "precious"


def test_pytest_starts_without_torch(tmp_path: Path) -> None:
    code = "import pytest, sys; pytest.main(['--co', '-q', '-p', 'no:cacheprovider']); "
    loaded = "print('LOADED', *({'torch', 'numpy', 'jinja2', 'rich', 'normwise.testing.plugin'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code + loaded], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "LOADED normwise.testing.plugin"


@pytest.mark.parametrize(
    "node", ["a.py::t[../../etc]", "a.py::t[con\x00\n\ud800]", "../a.py::t", ".hidden", "", "é" * 400]
)
def test_the_names_of_files_are_safe(node: str) -> None:
    name = plugin._file_name(node)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name.lstrip("-"))
    assert len(name) <= 120
    assert name != plugin._file_name(node + "x")


# assert_clean


def test_a_message_names_every_finding_and_no_escape_of_the_model() -> None:
    model = nn.Sequential()
    for name in ("norm\x1b[31m", "b\u202ec"):
        model.add_module(name, nn.LayerNorm(8))
    target = Target(model=model, name="m\x1b]0;x\x07", args=(torch.randn(2, 8),))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(AssertionError) as caught:
        assert_clean(target, optimizer=optimizer, select="PAR001", fail_on="info", configuration=False)
    text = str(caught.value)
    assert text.startswith("normwise: 1 finding in m␛]0;x␇\n  PAR001 decayed-norm-scale (warning) at ")
    assert text.count("\n") == 3
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text) is None


def test_a_model_that_was_not_run_is_not_clean() -> None:
    target = Target(model=nn.Bilinear(3, 4, 5), name="it", inputs_from=InputsFrom.NONE)
    with pytest.raises(TargetError, match="it: the model was not run"):
        assert_clean(target, configuration=False)


def test_a_clean_model_gives_its_report(normwise_check: Callable[..., object]) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(4, 8)
    assert assert_clean(model, x, effort="read").target == "Sequential"
    assert normwise_check(model, x, effort="read") is not None
