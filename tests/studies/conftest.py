"""What the tests of runs share: the toy as a study, its trials, its ledger, and a log of their starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normwise import studies
from tests.studies import toy


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the toy a study of this process; its workers find it by its module."""
    monkeypatch.setitem(studies._STUDIES, "toy", toy)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "toy.sqlite"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return the file in which every start of a trial leaves a line: process, trial."""
    return tmp_path / "log"


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the toy ask for these trials."""

    def ask(*params: dict[str, Any]) -> None:
        monkeypatch.setattr(toy, "trials", lambda quick: [{"at": at, **each} for at, each in enumerate(params)])

    return ask
