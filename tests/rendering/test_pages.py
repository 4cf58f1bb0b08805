from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from normwise.rendering.pages import page_template
from normwise.rendering.prose import blocks, prose

TEMPLATES = sorted(Path(str(files("normwise"))).rglob("*.html.jinja"))
every_template = pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)


def unquoted(template: str) -> list[str]:
    markup = re.sub(r"\{#.*?#\}|\{%.*?%\}|<style>.*?</style>", " ", template, flags=re.DOTALL)
    markup = re.sub(r"\{\{.*?\}\}", "X", markup, flags=re.DOTALL)
    tags = re.findall(r"<[a-zA-Z][^<>]*>", re.sub(r'="[^"]*"', '=""', markup))
    return [tag for tag in tags if not re.fullmatch(r'<[a-zA-Z0-9]+(\s+[a-zA-Z-]+="")*\s*>', tag)]


@every_template
def test_every_attribute_of_a_template_is_quoted(path: Path) -> None:
    assert unquoted(path.read_text("utf-8").replace("<!DOCTYPE html>", "")) == []


@pytest.mark.parametrize("bad", ["<p class={{ x }}>", "<p class='{{ x }}'>", "<p hidden>", "<p {{ x }}>"])
def test_the_guard_sees_an_attribute_without_quotes(bad: str) -> None:
    assert unquoted(bad)


@every_template
def test_a_template_switches_no_escape_off(path: Path) -> None:
    assert not re.search(r"\|\s*safe|autoescape|Markup", path.read_text("utf-8"))


@every_template
def test_a_template_is_the_frame_or_extends_it(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.startswith(("<!DOCTYPE html>", '{% extends "page.html.jinja" %}'))
    assert "<script" not in text
    assert not re.search(r"@import|url\(|https?:", text)


def test_a_value_that_was_forgotten_is_an_error_rather_than_nothing() -> None:
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError):
        page_template("normwise.checkup.reports", "report.html.jinja").render(lang="en")


def test_a_page_is_cut_into_headings_paragraphs_and_code() -> None:
    text = "\n## Why\nA `b`\nc.\n- one\n  more\n- two\n\n```python\nx = 1\n\ny = 2\n```\nEnd."
    assert list(blocks(text)) == [
        ("h", [(False, "Why")]),
        ("p", [(False, "A "), (True, "b"), (False, " c.")]),
        ("p", [(False, "- one more")]),
        ("p", [(False, "- two")]),
        ("code", [(True, "x = 1\n\ny = 2")]),
        ("p", [(False, "End.")]),
    ]


def test_the_end_of_a_line_is_no_space_between_chinese_characters() -> None:
    assert list(blocks("残差\n流，\nPre 归一化")) == [("p", [(False, "残差流， Pre 归一化")])]


def test_code_keeps_its_lines_and_nothing_of_a_page_is_markup() -> None:
    page = "a <b> `<i>`\n\n```python\nx = 1\n\ny < 2\x1b\n```"
    assert prose(page) == (
        '<p class="nw-p">a &lt;b&gt; <code>&lt;i&gt;</code></p>\n<pre><code>x = 1\n\ny &lt; 2␛</code></pre>'
    )
