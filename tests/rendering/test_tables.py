from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from normwise.rendering.tables import Column, by_terminal, draw, fitting, plain_ascii, table, text, wrap_path


def column(heading: str, *cells: str, spare: int = 0) -> Column:
    return Column(heading=heading, cells=tuple(map(text, cells)), spare=spare)


def test_markup_of_rich_in_a_name_is_text() -> None:
    assert draw([text("[red]x[/red] :smile: [link=y]z")], width=80, color=True) == "[red]x[/red] :smile: [link=y]z\n"


def test_without_colour_there_is_no_escape_sequence() -> None:
    page = draw([Text("x", "bold red")], width=80, color=False)
    assert page == "x\n"
    assert "\x1b" in draw([Text("x", "bold red")], width=80, color=True)


@given(st.text(alphabet="ab.层", min_size=1, max_size=80), st.integers(8, 40))
def test_a_wrapped_path_fits_and_loses_nothing(path: str, width: int) -> None:
    wrapped = wrap_path(Text(path), width).plain
    assert max(map(cell_len, wrapped.split("\n"))) <= width
    assert wrapped.replace("\n  ", "").replace(" ", "") == path


def test_a_path_breaks_in_front_of_dots() -> None:
    assert wrap_path(Text("model.layers.0.self_attn.q_norm"), 16).plain == "model.layers.0\n  .self_attn\n  .q_norm"


def test_a_narrow_table_leaves_out_what_can_be_spared_first_and_never_the_path() -> None:
    columns = [
        column("path", "a" * 60),
        column("x" * 20, "1", spare=1),
        column("y" * 20, "1", spare=2),
        column("z", "1"),
    ]
    assert [c.heading[0] for c in fitting(columns, 120)] == ["p", "x", "y", "z"]
    assert [c.heading[0] for c in fitting(columns, 60)] == ["p", "x", "z"]
    assert [c.heading[0] for c in fitting(columns, 40)] == ["p", "z"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_table_never_exceeds_the_width(width: int) -> None:
    columns = [column("path", "model.layers.{0-27}.post_attention_layernorm", "层" * 50), column("kind", "rms", "rms")]
    page = draw([table(columns, width)], width=width, color=False)
    assert max(map(cell_len, page.splitlines())) <= width


def test_the_width_is_that_of_the_terminal_and_a_hundred_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    assert by_terminal(None, False) == (77, False)
    assert by_terminal(90, False) == (90, False)
    monkeypatch.delenv("COLUMNS")
    assert by_terminal(None, False) == (100, False)


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_terminal(80, None) == (80, False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert by_terminal(80, None) == (80, True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert by_terminal(80, None) == (80, False)


@pytest.mark.parametrize(("encoding", "drawn"), [("utf-8", True), (None, True), ("ascii", False), ("no such", False)])
def test_drawing_characters_have_stand_ins_where_the_encoding_lacks_them(
    encoding: str | None, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "▁█ ── ✓ ×28 · ÷2 1 → 2 …"
    monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding=encoding))
    assert (plain_ascii(page) == page) is drawn
    assert drawn or plain_ascii(page).isascii()


def test_a_closed_standard_output_lacks_no_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert plain_ascii("→") == "→"
