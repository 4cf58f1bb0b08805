"""The lines of keys and values in a TOML text."""

from __future__ import annotations

import json
import time
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normwise.checkup._toml import Lines, deepest_key, statements

TEXT = '''# normwise = 1
[project]  # [tool.normwise]
name = "x"
about = """
[tool.normwise]
select = ["no"]
"""
regex = 'a = [ # "'

[tool.normwise]
select = [
  "PLC",  # "NUM"
  'NUM',
]
"fail-on" = "error"
inner.deep = { a = 1, b = [
  1,
] }

[[tool.normwise.per-module-ignores]]
modules = ["a"]
[[ tool . normwise . "per-module-ignores" ]]
modules = ["b"]

rules = []
'''


@pytest.mark.parametrize(
    ("keys", "value", "line"),
    [
        (("select",), None, 11),
        (("select",), "PLC", 12),
        (("select",), "NUM", 12),  # the comment says it first: the line is near enough
        (("select",), "BNS", 11),
        (("fail-on",), None, 15),
        (("inner", "deep"), None, 16),
        (("inner", "deep", "b"), None, 16),
        (("per-module-ignores",), None, 10),
        (("per-module-ignores", 0), None, 20),
        (("per-module-ignores", 0, "modules"), None, 21),
        (("per-module-ignores", 1), None, 22),
        (("per-module-ignores", 1, "modules"), None, 23),
        (("per-module-ignores", 1, "rules"), None, 25),
        (("per-module-ignores", 1, "reason"), None, 22),
        (("baseline",), None, 10),
        ((), None, 10),
    ],
)
def test_a_key_is_found_on_its_line(keys: tuple[str | int, ...], value: object, line: int) -> None:
    tomllib.loads(TEXT)
    for text in (TEXT, TEXT.replace("\n", "\r\n")):
        assert Lines(text).of("tool", "normwise", *keys, value=value) == line


def test_tables_within_a_line_are_on_it() -> None:
    text = 'x = 1\ntool.normwise = { select = ["PLC"], per-module-ignores = [{ modules = ["a"] }] }\n'
    assert Lines(text).of("tool", "normwise", "per-module-ignores", 0, "reason") == 2


KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\x7f", exclude_categories=("Cc", "Cs")), max_size=6)
SCALARS = st.one_of(
    st.integers(-9, 9), st.booleans(), st.text(max_size=8).map(lambda t: t.encode("ascii", "ignore").decode())
)


def written(value: object) -> str:
    return "[\n" + ",\n".join(map(written, value)) + "\n]" if isinstance(value, list) else json.dumps(value)


@given(st.dictionaries(KEYS, SCALARS | st.lists(SCALARS, max_size=3), max_size=8))
def test_every_statement_is_found_whole_at_its_line(table: dict[str, object]) -> None:
    lines = ["# first", "[t]"]
    expected = {}
    for key, value in table.items():
        expected[key] = sum(each.count("\n") + 1 for each in lines) + 1
        lines.append(f"{json.dumps(key)} = {written(value)}".replace("\x7f", ""))
    text = "\n".join(lines)
    try:
        assert list(tomllib.loads(text)["t"]) == list(table)
    except tomllib.TOMLDecodeError:  # json escapes that TOML does not have
        return
    assert len(list(statements(text))) == len(table) + 1
    assert {key: Lines(text).of("t", key) for key in table} == expected


@given(st.text("'\"\\#\n[]{}.,= a"))
def test_any_text_can_be_scanned(text: str) -> None:
    list(statements(text))
    deepest_key(text)


@pytest.mark.parametrize("piece", ['"""', "'''", '"', "'", '\\"""', "[", "a.", "#", '"""\\'])
def test_scanning_takes_time_in_proportion(piece: str) -> None:
    started = time.process_time()
    text = piece * 80_000
    deepest_key(text)
    list(statements(text))
    assert time.process_time() - started < 2  # at most 0.06 s measured; the square would be minutes


def test_only_dots_of_keys_count() -> None:
    assert deepest_key('a.b.c = "1.2.3.4.5"  # 1.2.3.4.5\nx = [1.0, 2.0, 3.0, 4.0]\n"p"."q" = 1') == 2
