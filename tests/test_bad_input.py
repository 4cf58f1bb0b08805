"""Bad input, through the whole program: one clear message, exit code 2, no traceback, nothing written."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from normwise.cli import main

MODELS = '''
"""Models of a user who made a mistake."""

import torch
from torch import nn

not_callable = 3


class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError("shapes do not match")


def raises():
    raise KeyError("hidden_size")


def leaves():
    raise SystemExit(0)


def a_number():
    return 3


def fails():
    return Fails(), torch.ones(2, 3)


def needs_two():
    return nn.Bilinear(3, 3, 3), torch.ones(2, 3)


def wrong_width():
    return nn.Linear(3, 3), torch.ones(2, 4)


def linear():
    return nn.Linear(3, 3)


def plain():
    return nn.Linear(3, 3), torch.ones(2, 3)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a user's files, some of them broken."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("import no_such_package\n\ndef build(): ...\n")
    (tmp_path / "typo.py").write_text("def build(:\n")
    (tmp_path / "weights.pt").write_bytes(pickle.dumps({"weight": 1}))
    (tmp_path / "empty").mkdir()
    return tmp_path


BAD = [
    (["nowhere.py:build"], "nowhere.py"),
    (["mine.py"], "mine.py"),
    (["mine.py:no_such"], "no_such"),
    (["mine.py:not_callable"], "not_callable"),
    (["mine.py:raises"], "hidden_size"),
    (["mine.py:leaves"], "mine.py"),
    (["mine.py:a_number"], "int"),
    (["mine.py:fails"], "shapes do not match"),
    (["mine.py:needs_two"], ""),
    (["mine.py:wrong_width"], ""),
    (["mine.py:linear", "--inputs", "2x?"], "2x?"),
    (["mine.py:linear", "--inputs", "2x7"], ""),
    (["broken.py:build"], "no_such_package"),
    (["typo.py:build"], "typo.py"),
    (["no_such_package.models:build"], "no_such_package"),
    (["math:no_such"], "no_such"),
    (["demo:no-such"], "no-such"),
    (["weights.pt"], "weights.pt"),
    (["whatever"], "whatever"),
    (["hf:no-such-type"], "no-such-type"),
    (["hf:empty"], "empty"),
    (["pkg:no-such-package"], "no-such-package"),
    (["mine.py:plain", "--select", "XYZ999"], "XYZ999"),
    (["mine.py:plain", "--device", "no-such-device"], "no-such-device"),
]


@pytest.mark.parametrize(("arguments", "names"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_message_that_names_the_culprit(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], names: str
) -> None:
    before = sorted(folder.rglob("*"))
    assert main(["check", *arguments, "-o", "report.html"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("normwise: ")
    assert names in err
    assert "Traceback" not in err
    assert "bug in normwise" not in err
    assert [path for path in sorted(folder.rglob("*")) if path not in before and "__pycache__" not in path.parts] == []


def test_a_model_without_norms_is_no_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "mine.py:plain"]) == 0
    assert "no normalization found" in capsys.readouterr().out.lower()
