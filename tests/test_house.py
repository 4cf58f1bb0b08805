"""The repository keeps its own promises: what its documents say is what its configuration does."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OWN_LAYERS = ("models", "blocks", "layers", "kernels")
VERBS = (
    "demo",
    "test",
    "test-slow",
    "kernels",
    "sanitize",
    "hostile",
    "check",
    "fix",
    "bench",
    "bench-faults",
    "docs",
    "build",
    "zoo",
    "studies",
)
LARGEST = 1_000_000  # bytes; larger files make every clone slow for ever

# A path of the machine something was written on, or the address of a package index.
OF_ONE_MACHINE = re.compile(
    r"(?<![\w.~-])/(?:work|root|home|opt|tmp)/\w|https?://[\w.-]*pypi[\w.-]*/simple|--index-url"
)


def tracked_files() -> list[Path]:
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip("not a git checkout")
    return [path for name in result.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[ ]", requirement, maxsplit=1)[0] for requirement in requirements}


def documented(heading: str) -> set[str]:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| ([\w-]+) \|", section, flags=re.MULTILINE)) - {"package"}


def test_every_dependency_is_argued_in_the_docs_and_no_other() -> None:
    assert documented("At run time") == names(PROJECT["project"]["dependencies"])


def test_every_extra_is_argued_in_the_docs_and_no_other() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    assert documented("Extras") == set().union(*map(names, extras))


def test_torch_is_not_needed_to_build() -> None:
    assert names(PROJECT["build-system"]["requires"]) == {"setuptools", "wheel"}


def test_the_citation_names_the_version_of_the_package() -> None:
    assert f"\nversion: {PROJECT['project']['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_what_examines_models_is_kept_from_every_package_of_our_own_layers() -> None:
    contract = next(each for each in PROJECT["tool"]["importlinter"]["contracts"] if each["id"] == "own-layers")
    present = {f"normwise.{name}" for name in OWN_LAYERS if list((ROOT / "src" / "normwise").glob(f"{name}*"))}
    assert set(contract["forbidden_modules"]) == present


def test_make_alone_lists_the_verbs() -> None:
    result = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^  make ([\w-]+)", result.stdout, flags=re.MULTILINE)) == {"help", *VERBS}


@pytest.mark.parametrize("verb", VERBS)
def test_contributing_explains_every_verb(verb: str) -> None:
    assert f"`make {verb}`" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_ci_script_is_executable() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_no_file_speaks_of_the_machine_it_was_written_on() -> None:
    texts = {path: path.read_text("utf-8", errors="replace") for path in tracked_files()}
    found = {str(path.relative_to(ROOT)): OF_ONE_MACHINE.search(text) for path, text in texts.items()}
    assert {name: match.group() for name, match in found.items() if match and name != "tests/test_house.py"} == {}


@pytest.mark.parametrize("text", ["see /work/x", "open('/tmp/a')", "https://pypi.org/simple", "pip --index-url x"])
def test_the_guard_sees_what_belongs_to_one_machine(text: str) -> None:
    assert OF_ONE_MACHINE.search(text)


@pytest.mark.parametrize("text", ["docs/work/x", "https://github.com/a/tmp/b", "a/b", "/usr/bin/env bash"])
def test_the_guard_leaves_other_paths_alone(text: str) -> None:
    assert not OF_ONE_MACHINE.search(text)


def test_no_tracked_file_is_large() -> None:
    assert {str(path.relative_to(ROOT)) for path in tracked_files() if path.stat().st_size > LARGEST} == set()
