from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from normwise.rendering import clean, obeyed_by_none, shorten
from normwise.rendering.cleaning import LONGEST, visible

ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=()))
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


@given(ANY_TEXT)
@example("\x1b]0;title\x07 \x9b31m \x7f\r\n\t\u2028\u202e\u2066\u200b\ufeff\ud800\U000e0041")
def test_nothing_hidden_is_left_of_any_text(text: str) -> None:
    assert [c for c in clean(text) if unicodedata.category(c) in HIDDEN] == []


@given(ANY_TEXT)
def test_cleaning_twice_changes_nothing(text: str) -> None:
    assert clean(clean(text)) == clean(text)


@given(ANY_TEXT)
def test_what_was_cleaned_can_be_written_in_utf_8_on_one_line(text: str) -> None:
    assert len(clean(text).encode("utf-8").splitlines()) <= 1


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "Sm", "Zs"], max_codepoint=0x2FF)))
def test_plain_text_of_many_scripts_stays_as_it_is(text: str) -> None:
    visible = "".join(c for c in text if c != "\xad")
    assert clean(visible) == visible


@pytest.mark.parametrize("text", ["层归一化", "γ·x̂ + β", "model.layers.0", "[bold]", "a\\u202e", "Ünïcode", ""])
def test_names_people_use_stay_as_they_are(text: str) -> None:
    assert clean(text) == text


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x1b[31m", "␛[31m"),
        ("a\nb\r\tc", "a␊b␍␉c"),
        ("\x00\x07\x7f", "␀␇␡"),
        ("\x9b2J", "\\x9b2J"),
        ("\u202e\u2066\u200b\u200d\ufeff", "\\u202e\\u2066\\u200b\\u200d\\ufeff"),
        ("\u2028\u3164\ufe0f", "\\u2028\\u3164\\ufe0f"),
        ("\ud800\U000e0101", "\\ud800\\U000e0101"),
        (3.5, "3.5"),
    ],
)
def test_each_hidden_character_becomes_a_visible_one(text: object, seen: str) -> None:
    assert clean(text) == seen


@given(st.text(), st.integers(1, 40))
def test_a_shortened_text_is_never_longer_than_asked(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert len(short) <= limit
    assert short == text or "…" in short


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("::error::x", "∷ error::x"),
        ("\t ::set-output name=a::b", "\t ∷ set-output name=a::b"),
        ("x ##[error]y ##vso[task.complete]", "x ♯#[error]y ♯#vso[task.complete]"),
        ("##teamcity[x]", "♯#teamcity[x]"),
    ],
)
def test_no_line_of_a_page_is_a_command_to_a_ci_runner(line: str, shown: str) -> None:
    assert obeyed_by_none(line) == shown
    assert obeyed_by_none(shown) == shown
    assert len(shown) == len(line)


@pytest.mark.parametrize("line", ["at::native", "x ::error::", ":: x", "## heading", "a[::2]", "[::2]", "# ["])
def test_what_is_no_command_stays_as_it_is(line: str) -> None:
    assert obeyed_by_none(line) == line


@given(ANY_TEXT, st.integers(1, 3 * LONGEST))
def test_a_long_text_is_shown_by_its_ends(text: str, times: int) -> None:
    long = (text or "x") * times
    assert clean(long) == shorten(visible(long), LONGEST)
    assert clean(clean(long)) == clean(long)


def test_a_name_of_ten_megabytes_is_cleaned_at_once() -> None:
    cleaned = clean("\x1b" * 10_000_000)
    assert cleaned == f"{'␛' * 2047}…{'␛' * 2048}"
