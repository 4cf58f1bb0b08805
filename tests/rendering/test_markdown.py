from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from normwise.rendering import clean
from normwise.rendering.markdown import code, prose, table

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
# what Markdown is made of, densely
TEXT = st.text(st.sampled_from("\\`*_{}[]()<>#+-.!|~&;:/@$=^'\" \t\n1a层\x1b\u202ehttps"), max_size=40)


def shown(markdown: str) -> tuple[list[str], str]:
    """Return the kinds of blocks of a page and its text."""
    tokens = READER.parse(markdown)
    inner = [child for token in tokens for child in token.children or ()]
    assert {child.type for child in inner} <= {"text", "text_special", "code_inline", "html_inline"}
    assert {child.content for child in inner if child.type == "html_inline"} <= {"<code>", "</code>"}
    return [token.type for token in tokens], "".join(c.content for c in inner if c.type != "html_inline")


@given(TEXT)
@example("__c__ _a_ a_b ___ __init__")
@example("1. x")
@example("===")
@example("# x ##[group] #12")
@example("~~~ a\n---")
@example("&lt;b&gt; &#60;")
def test_any_text_is_one_paragraph_that_shows_it(text: str) -> None:
    said = clean(text).strip()
    assert shown(prose(text)) == ((["paragraph_open", "inline", "paragraph_close"], said) if said else ([], ""))


@given(TEXT)
@example("a|b")
@example("\\|")
@example("`` ` ```")
@example(" x ")
def test_any_name_is_code_that_shows_it(text: str) -> None:
    kinds, said = shown(f"x {code(text)}")
    assert kinds == ["paragraph_open", "inline", "paragraph_close"]
    assert said.split() == ["x", *clean(text).split()]


@given(st.lists(st.lists(TEXT, min_size=3, max_size=3), min_size=1, max_size=4))
def test_any_text_is_one_cell(rows: list[list[str]]) -> None:
    cells = [[prose(row[0]) or "x", code(row[1]) or "x", prose(row[2]) or "x"] for row in rows]
    kinds, _ = shown(table(["a", "b", "c"], cells))
    assert kinds.count("tr_open") == len(rows) + 1
    assert kinds.count("td_open") == 3 * len(rows)


def test_a_column_without_cells_is_left_out() -> None:
    assert table(["a", "b", "c"], [["1", "", "3"], ["4", "", ""]]) == "| a | c |\n| --- | --- |\n| 1 | 3 |\n| 4 |  |"


@pytest.mark.parametrize("text", ["www.x/y", "WWW.x", "https://x", "a ftp://x", ":smile:", "@team", "a@b", "#12"])
def test_what_github_acts_on_is_a_reference(text: str) -> None:
    assert "&#" in prose(text)


@pytest.mark.parametrize(
    "text", ["model.layers.0.q_proj", "eps 1e-12, 1.8 s", "层归一化：x", "a - b = c", "(-1,)", "12:30"]
)
def test_usual_text_stays_as_it_is(text: str) -> None:
    assert prose(text) == text
