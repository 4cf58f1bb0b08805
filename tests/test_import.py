"""``import normwise`` is quick, and its public names are what they claim to be."""

from __future__ import annotations

import subprocess
import sys

import pytest

import normwise

HEAVY = ("torch", "transformers", "rich", "click", "numpy", "jinja2")
PACKAGES = ("benchmarks", "checkup", "errors", "facts", "graph", "models", "rendering", "spec", "targets")


def loaded_by(statements: str) -> set[str]:
    """Return which of the heavy packages a fresh interpreter holds after the statements."""
    code = f"import sys\n{statements}\nprint('LOADED', *(name for name in {HEAVY!r} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split()[1:])


def test_importing_normwise_loads_nothing_heavy() -> None:
    assert loaded_by("import normwise") == set()


def test_the_guard_sees_a_heavy_import() -> None:
    assert loaded_by("import normwise, click") == {"click"}


def test_listing_the_names_loads_nothing_heavy() -> None:
    assert loaded_by("import normwise; assert 'check' in dir(normwise); normwise.errors; normwise.NormSpec") == set()


def test_help_loads_only_click() -> None:
    help_ = "from normwise.cli import main\nassert main(['--help']) == 0 and main(['check', '--help']) == 0"
    assert loaded_by(help_) == {"click"}


def test_names_are_sorted_and_listed_once() -> None:
    assert normwise.__all__ == sorted(set(normwise.__all__))


@pytest.mark.parametrize("name", normwise.__all__)
def test_every_public_name_loads_and_is_listed(name: str) -> None:
    assert getattr(normwise, name) is not None
    assert name in dir(normwise)


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_load_by_attribute(name: str) -> None:
    assert getattr(normwise, name).__name__ == f"normwise.{name}"


def test_the_verbs_are_functions_and_not_modules_of_the_same_name() -> None:
    assert callable(normwise.check)
    assert callable(normwise.map)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'normwise' has no attribute 'frob'"):
        normwise.frob  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_the_version_is_that_of_the_installed_package() -> None:
    assert normwise.__version__.split(".")[:2] == ["0", "1"]
