"""package.module:callable: found where Python finds it, and in the current folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from normwise.errors import TargetError
from normwise.targets import load, python_module


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "users_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "net.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(3, 2)\n")
    (folder / "broken.py").write_text("x = 1\ny = 1 / 0\n")
    (folder / "needy.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    yield folder
    for name in set(sys.modules) - known:
        if name.startswith("users_package"):
            del sys.modules[name]


def test_loads_from_the_current_folder_without_leaving_it_on_the_path(package: Path) -> None:
    path = list(sys.path)
    target = load("users_package.net:build")
    assert isinstance(target.model, torch.nn.Linear)
    assert sys.path == path
    assert not (package / "__pycache__").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("users_package.absent:build", r"there is no module 'users_package.absent' here; install it"),
        ("no_such_package:build", r"there is no module 'no_such_package' here; install it"),
        ("users_package.broken:build", r"failed at .*broken\.py:2: ZeroDivisionError: division by zero"),
        ("users_package.needy:build", r"failed at .*needy\.py:1: ModuleNotFoundError: .*a_package_that_is_missing"),
        ("users_package.net:bild", r"there is no 'bild'; did you mean build\? it defines build"),
    ],
)
@pytest.mark.usefixtures("package")
def test_says_what_is_wrong_and_where(text: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        load(text)


@pytest.mark.parametrize(
    "text", ["hf:bert", "demo:x", "pkg:x", "timm:x", "a.py:b", "a b:c", "bert", "a:", ":b", "1a:b"]
)
def test_leaves_other_forms_to_other_kinds(text: str) -> None:
    assert not python_module.claims(text)
