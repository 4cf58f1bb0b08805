"""25 hostile names in 8 sinks: as modules of a real model, and in every text of a report."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from normwise.checkup import reports
from normwise.checkup.report import Report
from normwise.cli import main
from normwise.rendering import clean
from tests.checkup.hostile_names import HARMLESS, NAMES, checked, filled

SARIF = jsonschema.Draft4Validator(
    json.loads((Path(__file__).parent.parent / "data" / "sarif-2.1.0-rtm.5.json").read_text("utf-8"))
)
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
# what GitHub's runner reads as a command (actions/runner, ActionCommand.cs): "::name" first in a line, "##[" anywhere
COMMAND = re.compile(r"^\s*::\w|##\w*\[", re.MULTILINE)
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])

each_name = pytest.mark.parametrize("name", NAMES.values(), ids=[key.replace(" ", "-") for key in NAMES])
each_report = pytest.mark.parametrize("report", [checked, filled])


def hidden(page: str) -> list[str]:
    """What a terminal or an editor would obey or not show, but for line ends."""
    return [c for c in page if c != "\n" and unicodedata.category(c) in HIDDEN]


# text


@each_name
@each_report
@pytest.mark.parametrize("options", [{"color": False, "width": 100}, {"color": False, "width": 60, "full": True}])
def test_text_holds_no_byte_that_a_terminal_or_a_runner_obeys(name: str, report: Any, options: dict[str, Any]) -> None:
    page = reports.render(report(name), "text", **options)
    assert hidden(page) == []
    assert COMMAND.findall(page) == []
    assert max(map(len, page.splitlines())) <= options["width"]


@each_name
def test_in_colour_the_only_escapes_are_ours(name: str) -> None:
    page = reports.render(filled(name), "text", color=True, width=100)
    assert hidden(re.sub(r"\x1b\[[0-9;]*m", "", page)) == []
    colours = set(re.findall(r"\x1b\[[0-9;]*m", page))
    assert colours <= set(
        re.findall(r"\x1b\[[0-9;]*m", reports.render(filled(HARMLESS), "text", color=True, width=100))
    )


# HTML


@cache
def harmless(report: Any) -> list[tuple[object, ...]]:
    """Return the elements of the page of a model with a name that attacks nobody."""
    return Elements(report(HARMLESS).to_html()).found


class Elements(HTMLParser):
    """The elements of a page with the names of their attributes; styles and classes with their values."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[object, ...]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kept = ((name, value if name in ("class", "style", "id") else "") for name, value in attrs)
        self.found.append((tag, *kept))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_comment(self, data: str) -> None:
        self.found.append(("comment", data))

    def handle_pi(self, data: str) -> None:
        self.found.append(("instruction", data))


@each_name
@each_report
def test_a_name_makes_no_element_and_no_attribute_of_a_page(name: str, report: Any) -> None:
    page = report(name).to_html()
    assert hidden(page) == []
    assert COMMAND.findall(page) == []
    elements = Elements(page)
    assert elements.found == harmless(report)
    assert clean(f"{name} unused") in "".join(elements.words)


# JSON


@each_name
@each_report
def test_json_is_plain_ascii_and_gives_the_name_back(name: str, report: Any) -> None:
    page = report(name).to_json()
    assert page.isascii()
    assert hidden(page) == []
    assert COMMAND.findall(page) == []
    document = json.loads(page)
    assert {norm["path"] for norm in document["norms"]} == {f"{name}.{i}.{name}" for i in range(3)}
    assert document["not_executed"][0] in (name, f"{name} unused")


# Markdown


@cache
def tokens(page: str) -> tuple[Token, ...]:
    return tuple(MARKDOWN.parse(page))


def inside(parsed: tuple[Token, ...]) -> Iterator[Token]:
    for token in parsed:
        yield from token.children or ()


@each_name
@each_report
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_name_is_no_markdown(name: str, report: Any, lang: str) -> None:
    page, plain = (report(each).to_markdown(lang=lang) for each in (name, HARMLESS))
    assert hidden(page) == []
    assert COMMAND.findall(page) == []
    assert len(page.splitlines()) == len(plain.splitlines())
    blocks, expected = ([(token.type, token.tag) for token in tokens(each)] for each in (page, plain))
    assert blocks == expected
    made = Counter(token.type for token in inside(tokens(page)))
    assert set(made) <= {"text", "code_inline", "html_inline", "strong_open", "strong_close", "text_special"}
    assert made["strong_open"] == Counter(token.type for token in inside(tokens(plain)))["strong_open"]
    markup = {token.content for token in inside(tokens(page)) if token.type == "html_inline"}
    assert markup <= {"<code>", "</code>", "<br>"}
    # what GitHub acts on beyond Markdown: addresses, mentions, references to issues, formulas
    unset = re.sub(r"`[^`\n]*`", "", page)
    assert re.findall(r"https?://|\bwww\.|(?<![/\w])@\w|(?<!&)#\d|\$\w", unset) == []


@each_name
def test_markdown_shows_the_name(name: str) -> None:
    said = "".join(token.content for token in inside(tokens(filled(name).to_markdown())) if token.type != "html_inline")
    assert clean(name).strip() in said


# SARIF


@each_name
@pytest.mark.parametrize(
    ("report", "full"),
    [
        (checked, True),
        (filled, False),
        pytest.param(checked, False, marks=pytest.mark.slow),  # the two above hold all that these do
        pytest.param(filled, True, marks=pytest.mark.slow),
    ],
)
def test_sarif_is_valid_and_shows_the_name(name: str, report: Any, full: bool) -> None:
    page = report(name).to_sarif(full=full)
    assert page.isascii()
    assert COMMAND.findall(page) == []
    document = json.loads(page)
    SARIF.validate(document)
    assert hidden("".join(strings(document))) == []
    places = [place for each in document["runs"][0]["results"] for place in each.get("locations", ())]
    assert clean(f"{name}.0.{name}") in {
        module["fullyQualifiedName"] for place in places for module in place["logicalLocations"]
    }
    if report is filled:
        message = document["runs"][0]["results"][0]["message"]["text"]
        assert not re.search(r"(?<!\\)(?:\\\\)*[\[\]]", message)  # no link
        shown = re.sub(r"\\([\\\[\]])", r"\1", message.replace("{{", "{").replace("}}", "}"))
        message, where, effect, fix = shown.split("\n")
        assert (message, fix) == (clean(name), f"Fix: {clean(name)}")
        assert where.startswith(f"Where: {clean(name)[:99]}")
        assert effect.startswith("Effect: ")


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


# GitHub


@each_name
@each_report
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_finding_is_one_command_whatever_its_names_hold(name: str, report: Any, lang: str) -> None:
    page = reports.render(report(name), "github", lang=lang)
    assert hidden(page) == []
    *lines, last = page.splitlines()
    assert len(lines) == len(report(name).findings) + len(report(name).unused)
    assert COMMAND.findall(last) == []
    parsed = [
        re.fullmatch(r"::(error|warning|notice) title=[^:,]*(?:,file=[^:,]*,line=\d+)?::(.*)", line) for line in lines
    ]
    assert None not in parsed
    if report is filled:
        first = parsed[0]
        assert first is not None
        undone = first[2].replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")  # as the runner does
        assert undone.split("\n")[1] == clean(name)


# JUnit


@each_name
@each_report
def test_junit_is_xml_that_gives_the_name_back(name: str, report: Any) -> None:
    page = reports.render(report(name), "junit")
    assert re.findall("[^\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", page) == []
    assert hidden(page) == []
    assert COMMAND.findall(page) == []
    root, plain = (ElementTree.fromstring(each) for each in (page, reports.render(report(HARMLESS), "junit")))
    assert [(e.tag, sorted(e.attrib)) for e in root.iter()] == [(e.tag, sorted(e.attrib)) for e in plain.iter()]
    if report is filled:
        shown = clean(name).replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")
        assert shown in {each.attrib["message"] for each in root.iter("failure")}


# messages of the command line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def message(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert hidden(err) == []
    assert COMMAND.findall(err) == []
    assert err.startswith("normwise: ")
    assert "Traceback" not in err
    return err


@each_name
def test_a_hostile_exception_is_one_message(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.py").write_text(f"def build():\n    raise ValueError({name!a})\n")
    assert message(capsys, "check", "bad.py:build").count("normwise: ") == 1


@each_name
def test_a_hostile_argument_is_one_message(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["check", name],
        ["check", "demo:x", "--format", name],
        ["explain", name],
        ["check", "-o", f"{name}.pdf"],
    ):
        message(capsys, *arguments)
    assert list(folder.iterdir()) == []


@each_name
def test_a_model_with_hostile_names_is_checked_by_the_command(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(__file__).with_name("hostile_names.py").read_text("utf-8")
    (folder / "net.py").write_text(f"{source}\n\ndef build():\n    return Net({name!a}), torch.randn(2, 5, 8)\n")
    main(["check", "net.py:build", "--select", "NUM005,PLC001", "-o", "r.sarif", "-o", "r.md", "-o", "r.xml"])
    out, err = capsys.readouterr()
    assert hidden(out) == []
    assert hidden(err) == []
    assert COMMAND.findall(out + err) == []
    assert "NUM005" in out
    assert sorted(path.name for path in folder.glob("r.*")) == ["r.md", "r.sarif", "r.xml"]


def test_there_are_25_names_and_all_are_different() -> None:
    assert len(set(NAMES.values())) == 25
    assert all(first != second for first, second in pairwise(sorted(NAMES)))


def test_the_names_reach_every_text_of_a_report() -> None:
    """Each name stands in more places of a report than the paths alone."""

    def mentions(report: Report) -> int:
        return report.to_json().count(HARMLESS)

    assert mentions(filled(HARMLESS)) > 2 * mentions(checked(HARMLESS))
