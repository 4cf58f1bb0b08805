from __future__ import annotations

import io

import pytest
from rich.console import Console

from normwise.rendering import progress as module


def test_what_is_running_is_shown_without_what_a_terminal_obeys(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, _environ={})
    monkeypatch.setattr(module, "Console", lambda stderr: console)
    with module.progress() as tell:
        tell("writing \x1b]0;mine\x07\x1b[31m", 1, 2)
    assert "writing ␛]0;mine␇␛[31m" in screen.getvalue()
    assert "\x1b]0;" not in screen.getvalue()
