"""Pages full of hostile names opened in a real browser: no dialog, no request, nothing that could act."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkup.browser import Browser, browser
from tests.checkup.hostile_names import NAMES, checked, filled

pytestmark = pytest.mark.slow

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("no Chromium on PATH")
    with browser(PROGRAM, tmp_path_factory.mktemp("profile")) as page:
        yield page


def test_the_browser_tells_of_dialogs_requests_and_elements_that_act(chromium: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        f'<!DOCTYPE html><meta charset=utf-8>{NAMES["script"]}{NAMES["image"]}<p x="{NAMES["double quote"]}">x</p>',
        "utf-8",
    )
    seen = chromium.open(page)
    assert len(seen.dialogs) >= 3
    assert seen.requests == [(tmp_path / "x").as_uri()]
    assert seen.active == 4  # two elements of their own, two with attributes


@pytest.mark.parametrize("policy", [True, False])
def test_pages_of_hostile_names_open_no_dialog_and_ask_for_nothing(
    policy: bool, chromium: Browser, tmp_path: Path
) -> None:
    """Also without the policy that forbids scripts and sources: the escaping alone must hold."""
    for number, name in enumerate(NAMES.values()):
        for report in (checked(name), filled(name)):
            html = report.to_html()
            html, left_out = (html, 1) if policy else POLICY.subn("", html)
            assert left_out == 1
            page = tmp_path / f"{number}.html"
            page.write_text(html, "utf-8")
            seen = chromium.open(page)
            assert (seen.dialogs, seen.requests, seen.active) == ([], [], 0), name
