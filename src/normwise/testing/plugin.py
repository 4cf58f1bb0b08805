"""The plugin of pytest, active where normwise is installed: a fixture that checks models, and their reports as files.

    def test_model_is_clean(normwise_check):
        normwise_check(build_model(), torch.randn(2, 8, 64))

``pytest --normwise-report DIR`` writes a page and JSON for each check. Nothing but pytest is imported until a test
asks for the fixture.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from normwise.checkup import Report

__all__ = ["normwise_check", "pytest_addoption", "pytest_configure"]

_OPTION = "--normwise-report"
_LONGEST_NAME = 100  # of a file; file systems allow 255 bytes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the reports."""
    group = parser.getgroup("normwise")
    group.addoption(_OPTION, metavar="DIR", help="write an HTML and a JSON report of every normwise_check to DIR")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a file in place of the folder before any test runs."""
    folder = _folder(config)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise pytest.UsageError(f"{_OPTION} {folder}: is no folder, name another")


@pytest.fixture
def normwise_check(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Check a model and fail the test if something is found: ``normwise_check(model, inputs, fail_on="error")``.

    The arguments are those of ``normwise.testing.assert_clean``; a configuration is looked for from pytest's root
    folder upwards.
    """
    from normwise.testing import clean

    calls = 0

    def check(model: Any, inputs: Any = None, **asked: Any) -> Report:
        nonlocal calls
        calls += 1
        report, fail_on = clean.examined(model, inputs, folder=request.config.rootpath, **asked)
        folder = _folder(request.config)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            name = _file_name(request.node.nodeid) + (f"-{calls}" if calls > 1 else "")
            for suffix in (".html", ".json"):
                report.save(folder / f"{name}{suffix}")
        clean.require(report, fail_on)
        return report

    return check


def _folder(config: pytest.Config) -> Path | None:
    given = config.getoption(_OPTION)
    return config.invocation_params.dir / given if given else None


def _file_name(node: str) -> str:
    """Return a name that is safe on every file system, and another for every test.

    Examples:
        >>> _file_name("tests/test_a.py::test_b[2x8]")
        'tests-test_a.py-test_b-2x8-778db857'
    """
    digest = hashlib.sha256(node.encode(errors="backslashreplace")).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', node).strip('-.')[:_LONGEST_NAME]}-{digest}"
