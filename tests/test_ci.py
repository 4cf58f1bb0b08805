"""What the page on CI shows is run: the steps of the workflow, the hook, the test of pytest, the baseline."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from normwise.cli import main

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "ci.md").read_text("utf-8")
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = _FENCE.findall(PAGE)
MODEL, TEST = (text for language, text in BLOCKS if language == "python")
WORKFLOW, HOOKS, WEIGHTS = (yaml.safe_load(text) for language, text in BLOCKS if language == "yaml")
PYTEST, BASELINE = (text.splitlines() for language, text in BLOCKS if language == "sh")
FAULTY = MODEL.replace("norm=nn.LayerNorm(64), ", "")
MANIFEST = ROOT / ".pre-commit-hooks.yaml"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def run(command: str, project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line as a runner of CI does, with the programs of this environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "COLUMNS": "100", "PATH": path, **variables}
    return subprocess.run(
        ["bash", "-e", "-c", command], cwd=project, env=variables, capture_output=True, text=True, check=False
    )


def steps() -> list[dict[str, Any]]:
    return WORKFLOW["jobs"]["check"]["steps"]


def test_the_steps_of_the_workflow_run(project: Path) -> None:
    lines = [step["run"] for step in steps() if "run" in step and not step["run"].startswith("pip ")]
    assert [line.split()[0] for line in lines] == ["normwise", "cat"]
    (project / "summary").touch()
    done = [run(line, project, GITHUB_STEP_SUMMARY="summary") for line in lines]
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    assert all(line.startswith(("::", "normwise")) for line in done[0].stdout.splitlines())
    assert (project / "summary").read_text() == (project / "normwise.md").read_text()
    assert json.loads((project / "normwise.sarif").read_text())["version"] == "2.1.0"
    assert ElementTree.parse(project / "normwise.xml").getroot().tag == "testsuites"


def test_a_step_that_finds_something_fails_and_leaves_its_files(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "model.py").write_text(FAULTY)
    monkeypatch.chdir(project)
    line = next(step["run"] for step in steps() if step.get("run", "").startswith("normwise"))
    assert main(shlex.split(f"{line} --fail-on warning")[1:]) == 1
    assert re.search(r"^::\w+ title=normwise \(PLC001\)", capsys.readouterr().out, flags=re.MULTILINE)
    assert {"normwise.md", "normwise.sarif", "normwise.xml"} < {path.name for path in project.iterdir()}


def test_steps_after_a_failure_run_and_only_on_files_that_exist() -> None:
    names = {step["run"].split()[1] if "run" in step else step["with"]["sarif_file"] for step in steps()[-2:]}
    assert {step["if"] for step in steps()[-2:]} == {f"always() && hashFiles('{name}') != ''" for name in names}


def test_the_hook_is_one_and_runs(project: Path) -> None:
    (hook,) = yaml.safe_load(MANIFEST.read_text())
    assert (hook["id"], hook["language"], hook["pass_filenames"]) == ("normwise", "python", False)
    valid = [sys.executable, "-m", "pre_commit", "validate-manifest", str(MANIFEST)]
    subprocess.run(valid, cwd=project, check=True, capture_output=True)
    done = run(f"{hook['entry']} demo:healthy-decoder --effort read", project)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_hook_of_the_page_is_one_and_runs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / ".pre-commit-config.yaml").write_text(yaml.safe_dump(HOOKS))
    valid = [sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml"]
    subprocess.run(valid, cwd=project, check=True, capture_output=True)
    (hook,) = HOOKS["repos"][0]["hooks"]
    (own,) = yaml.safe_load(MANIFEST.read_text())
    same = ("id", "name", "types_or", "pass_filenames")
    assert [hook[key] for key in same] == [own[key] for key in same]
    monkeypatch.chdir(project)
    assert main(shlex.split(hook["entry"])[1:]) == 0


LLAMA = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 16,
}  # fmt: skip


@pytest.mark.parametrize(("gain", "code"), [(1.5, 0), (float("nan"), 1)])
def test_the_hook_for_weights_needs_no_model(
    gain: float, code: int, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / ".pre-commit-config.yaml").write_text(yaml.safe_dump(WEIGHTS))
    valid = [sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml"]
    subprocess.run(valid, cwd=project, check=True, capture_output=True)
    (hook,) = WEIGHTS["repos"][0]["hooks"]
    folder = project / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_file({"model.norm.weight": torch.tensor([gain, *[1.0] * 7])}, folder / "model.safetensors")
    assert all(re.search(hook["files"], f"weights/{path.name}") for path in folder.iterdir())
    monkeypatch.chdir(project)
    assert main(shlex.split(hook["entry"])[1:]) == code
    assert "needs the model" in capsys.readouterr().out


def test_a_configuration_alone_is_checked_as_the_page_says(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (entry,) = re.findall(r"`(hf:\./weights [^`]*)`", PAGE)
    (project / "weights").mkdir()
    (project / "weights" / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(project)
    assert main(["check", "./weights"]) == 2
    assert "hf:weights" in capsys.readouterr().err
    assert main(["check", "weights/config.json"]) == 2
    assert f"give hf:{project / 'weights'}" in capsys.readouterr().err
    assert main(["check", *shlex.split(entry)]) == 0
    assert "needs trained weights" in capsys.readouterr().out


def test_the_test_of_the_page_passes_and_leaves_its_reports(project: Path) -> None:
    (project / "test_model.py").write_text(TEST)
    (project / "pyproject.toml").write_text('[tool.pytest]\npythonpath = ["."]\n')
    (line,) = PYTEST
    done = run(f"{sys.executable} -m {line} -p no:cacheprovider", project)
    assert done.returncode == 0, done.stdout
    assert sorted(path.suffix for path in (project / "reports").iterdir()) == [".html", ".json"]


def test_the_baseline_of_the_page_keeps_old_findings_quiet(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "model.py").write_text(FAULTY)
    monkeypatch.chdir(project)
    write, check = BASELINE
    without = re.sub(r"--baseline \S+", "", check)
    assert [main(shlex.split(line)[1:]) for line in (check, write, check, without)] == [2, 0, 0, 1]
