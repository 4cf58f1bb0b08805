"""Names of files of code: what is not of the checkout is never called by a name that a file of it has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import normwise as nw
from normwise.checkup import reports
from normwise.rendering.sources import FOREIGN, checkout, located, named

_NORM = """
import torch
from torch import nn

class RootNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
"""


def write(path: Path, text: str = "x = 1\n") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder in no repository."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_file_below_the_current_folder_goes_by_its_path(here: Path) -> None:
    for name in ("model.py", "little/nn/norms.py", "..odd/model.py"):
        path = write(here / name)
        assert (named(path), located(named(path))) == (name, name)


def test_a_file_elsewhere_is_marked_and_named_from_its_package_on(here: Path) -> None:
    elsewhere = here.parent / "elsewhere"
    for package in ("little", "little/nn"):
        write(elsewhere / package / "__init__.py")
    for name, shown in [("little/nn/norms.py", "…/little/nn/norms.py"), ("norms.py", "…/elsewhere/norms.py")]:
        path = write(elsewhere / name)
        write(here / name)
        write(here / shown)  # not even a file of that very name
        assert named(path) == shown
        assert located(shown) is None


def test_an_installed_file_is_marked_also_where_the_environment_lies_below(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert named(torch.__file__) == "…/torch/__init__.py"
    monkeypatch.chdir(Path(torch.__file__).parents[1])
    assert named(torch.__file__) == "…/torch/__init__.py"


def test_below_a_subfolder_of_a_repository_files_are_named_from_there_and_found_from_the_root(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / ".git").mkdir()
    path, deep = write(here / "model.py"), write(here / "a" / "b" / "deep.py")
    monkeypatch.chdir(here / "a")
    assert checkout() == os.path.realpath(here)
    assert [(named(each), located(named(each))) for each in (path, deep)] == [
        ("../model.py", "model.py"),
        ("b/deep.py", "a/b/deep.py"),
    ]


@pytest.mark.parametrize(
    ("text", "root"), [("gitdir: /r/.git/worktrees/a\n", "a"), ("gitdir: ../.git/modules/a\n", "."), ("", "a")]
)
def test_a_work_tree_is_a_root_and_a_submodule_is_none(
    text: str, root: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / ".git").mkdir()
    write(here / "a" / ".git", text)
    monkeypatch.chdir(here / "a")
    assert checkout() == os.path.realpath(here / root)


def test_a_link_is_what_it_leads_to(here: Path) -> None:
    write(here / "real.py")
    outside = write(here.parent / "outside.py")
    (here / "link.py").symlink_to("real.py")
    (here / "away.py").symlink_to(outside)
    assert (named(str(here / "link.py")), located("link.py")) == ("real.py", "real.py")
    assert named(str(here / "away.py")).startswith(FOREIGN)
    assert located("away.py") is None


@pytest.mark.parametrize("name", ["", ".", "gone.py", "a\x00.py", "\ud800.py", "/etc/passwd", "../up.py", "x" * 5000])
def test_what_is_no_file_here_is_not_located(name: str, here: Path) -> None:
    write(here.parent / "up.py")
    assert located(name) is None


def test_a_norm_of_a_package_elsewhere_is_no_line_of_a_file_of_that_name_here(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here.parent / "elsewhere" / "norms_of_another.py", _NORM)
    write(here / "norms_of_another.py", "\n" * 40)
    monkeypatch.syspath_prepend(here.parent / "elsewhere")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    from norms_of_another import RootNorm  # pyright: ignore[reportMissingImports]

    report = nw.check(nn.Sequential(nn.Linear(8, 8), RootNorm()).half(), torch.randn(2, 8).half(), select=["NUM001"])
    assert [norm.source for norm in report.norms] == ["…/elsewhere/norms_of_another.py:7"]
    assert "::error title=normwise (NUM001)" in reports.render(report, "github")
    assert "file=" not in reports.render(report, "github")
