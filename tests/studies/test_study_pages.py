from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from normwise import studies
from normwise.errors import StudyError
from tests.studies.made_up import evidence

DOCS = Path(__file__).parent.parent.parent / "docs"
CHINESE = re.compile(r"[\u4e00-\u9fff]")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The generator, with made-up studies only: one that was run and one that was not."""
    spec = importlib.util.spec_from_file_location("study_pages", DOCS / "study_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DATA", tmp_path)
    never = evidence().part
    vars(never).update(trials=lambda quick: [{"rate": 1.0}] * 3, seconds=lambda params: 60.0)
    monkeypatch.setattr(studies, "_STUDIES", {"made-up": evidence().part, "never-run": never})
    evidence().save(tmp_path / "made-up.jsonl")
    return module


def test_a_study_has_a_page_and_its_charts_in_two_languages(pages: ModuleType) -> None:
    assert set(pages.study_pages("en")) == {"README.md", "made-up.md", "made-up-1.svg", "never-run.md"}
    assert set(pages.study_pages("zh")) == {
        "README.zh-CN.md", "made-up.zh-CN.md", "made-up-1.zh-CN.svg", "never-run.zh-CN.md",
    }  # fmt: skip


def test_a_page_has_the_study_then_what_was_found(pages: ModuleType) -> None:
    page = pages.study_pages("en")["made-up.md"]
    assert re.findall(r"^#+ .*$", page, re.MULTILINE) == [
        "# Losses that were made up", "## Claim", "## Cost", "## What was found", "### Loss by rate",
        "### Loss against rate", "### Without a result", "### Conditions",
    ]  # fmt: skip
    assert "**refuted**: Post is fine." in page
    assert "| post | 0.01 | inf |" in page
    assert "![Loss against rate](made-up-1.svg)" in page
    assert "12 blocks | &lt;b> (2 seeds · torch 2.14.1; 2.13.0" in page
    assert not CHINESE.search(page.replace("简体中文", ""))


def test_a_chinese_page_has_the_same_sections(pages: ModuleType) -> None:
    english, chinese = (pages.study_pages(lang) for lang in ("en", "zh"))
    page = chinese["made-up.zh-CN.md"]
    assert re.findall(r"^#+", page, re.MULTILINE) == re.findall(r"^#+", english["made-up.md"], re.MULTILINE)
    assert "**推翻**：Post 没问题。" in page
    assert "](made-up-1.zh-CN.svg)" in page
    assert "损失随学习率的变化" in chinese["made-up-1.zh-CN.svg"]


def test_no_page_tells_where_the_rows_were_read(pages: ModuleType) -> None:
    for text in (*pages.study_pages("en").values(), *pages.study_pages("zh").values()):
        assert str(pages.DATA) not in text
        assert "normwise-studies" not in text


def test_a_study_without_a_stored_run_says_so_with_what_it_would_cost(pages: ModuleType) -> None:
    files = pages.study_pages("en")
    assert files["never-run.md"].endswith("No full run is stored yet.\n")
    rows = [line for line in files["README.md"].splitlines() if "not run" in line]
    assert len(rows) == 4
    assert "full set: 6 trials, about 6.3 CPU-minutes" in rows[0]


def test_the_index_has_every_claim_with_its_verdict(pages: ModuleType) -> None:
    index = pages.study_pages("en")["README.md"]
    assert (
        "| [made-up](made-up.md): Losses that were made up | Pre is fine. | **confirmed** | full set · 2 seeds" in index
    )
    assert "|  | None is. | **not concluded** |  |" in index


def test_a_chart_is_a_picture_of_its_own(pages: ModuleType) -> None:
    svg = pages.study_pages("en")["made-up-1.svg"]
    root = ET.fromstring(svg)
    assert "background:#fff" in root.attrib["style"]
    assert "inherit" not in svg
    assert not re.search(r"@font-face|@import|href|<script|<image|url\(", svg)


def test_pages_are_the_same_each_time(pages: ModuleType) -> None:
    assert pages.study_pages("en") == pages.study_pages("en")


def test_a_run_of_another_version_is_not_shown_as_if_it_were_of_this_one(pages: ModuleType) -> None:
    vars(studies.get("made-up"))["VERSION"] = 4
    with pytest.raises(StudyError, match="version 3"):
        pages.study_pages("en")


def test_every_study_has_its_pages() -> None:
    for name in studies.names():
        for suffix in (".md", ".zh-CN.md"):
            assert (DOCS / "studies" / f"{name}{suffix}").exists(), "run make docs"
