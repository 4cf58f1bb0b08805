"""The documents say what the program does: everything public is in them, and what they show is run."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import re
import runpy
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest
import torch

from normwise import conversions, errors, functional, layers, placements, studies
from normwise._parts import page_title
from normwise.benchmarks import Machine, Method, Result, Row
from normwise.checkup import Basis, Configuration, Finding, Report, Severity, Suppressed, Unused, rules
from normwise.checkup.configuration import PerModuleIgnore
from normwise.checkup.finding import NotChecked
from normwise.checkup.report import Cost
from normwise.cli import commands, main
from normwise.conversions import Change, Converted, Plan, Proof, Recipe, Refusal, Step, proof
from normwise.facts.records import Break, Evidence, NormSite, Place, Placement, ProfileRow, Stack, StackKind, Sublayer
from normwise.models.demo import DEMOS
from normwise.rendering.plots import Chart, Line
from normwise.spec import Cast, Form, Gate, Kind, Modulation, NormSpec, Scope, Statistic, Weight, Wiring
from normwise.studies import Claim, Judgement, Table, Verdict
from normwise.targets import KINDS, InputsFrom, Target, Weights
from normwise.targets.packages import PACKAGES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README, README_ZH = "README.md", "README.zh-CN.md"
TWINS = [
    (README, README_ZH),
    *(
        (f"docs/{n}.md", f"docs/{n}.zh-CN.md")
        for n in (
            "ci",
            "configuration",
            "find-the-cause",
            "how-it-works",
            "glossary",
            "which-norm",
            "placements",
            "layer-to-rms",
            "formats",
            "fault-benchmark",
            "security",
        )
    ),
]
PAGES = [README, README_ZH, *sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))]
RULES = sorted(rules.all_rules().items(), key=lambda item: item[1].CODE)
CODES = [part.CODE for _, part in RULES]
FAMILIES = ("AXS", "BNS", "NUM", "PAR", "PLC", "CKP", "DYN", "DST")
CODES_BY_FAMILY = [code for family in FAMILIES for code in CODES if code.startswith(family)]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_RUNNABLE = re.compile(r"<!-- runnable(?:: (\S+))? -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_REPORT = re.compile(r"(<!-- report: .+? -->\n)```text\n(.*?)```\n", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def prose(text: str) -> str:
    return _FENCE.sub("", text)


def code_words(text: str) -> set[str]:
    """Every word set as code, or in a table's first column."""
    spans = re.findall(r"`([^`\n]+)`", prose(text))
    first = re.findall(r"^\| ([^|]+) \|", prose(text), flags=re.MULTILINE)
    return {word for span in (*spans, *first) for word in re.split(r"[,、\s]+", span)}


# -- what is public is documented ------------------------------------------------------------


@pytest.mark.parametrize("name", commands.commands)
def test_every_command_and_option_is_documented(name: str) -> None:
    section = page("docs/cli.md").split(f"\n## normwise {name}\n")[1].split("\n## ")[0]
    options = [option for parameter in commands.commands[name].params for option in parameter.opts if option[0] == "-"]
    assert options
    assert [option for option in options if not re.search(rf"^  {option}\b", section, flags=re.MULTILINE)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_a_target_is_documented(kind: str) -> None:
    assert f"`{KINDS[kind].EXAMPLE}`" in page("docs/targets.md")


@pytest.mark.parametrize("name", [*(f"demo:{name}" for name in DEMOS), *(f"pkg:{name}" for name in PACKAGES)])
def test_every_name_of_a_target_is_documented(name: str) -> None:
    assert f"`{name}`" in page("docs/targets.md")


@pytest.mark.parametrize("name", errors.__all__)
def test_every_exception_is_documented(name: str) -> None:
    assert f"| `{name}` |" in page("docs/python-api.md")


RECORDS = (
    Break, Change, Chart, Claim, Configuration, Converted, Cost, Finding, proof.Gate, Judgement, Line, Machine, Method,
    NormSite, NormSpec, NotChecked, PerModuleIgnore, Placement, Plan, ProfileRow, Proof, Recipe, Refusal, Report,
    Result, Row, Stack, Step, Sublayer, Suppressed, Table, Target, Unused, Verdict, Wiring, studies.Evidence,
    studies.Row, studies.Unrun,
)  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_is_documented(record: type) -> None:
    fields = {field.name for field in dataclasses.fields(record)}
    assert fields - code_words(page("docs/python-api.md")) == set()


def test_every_key_of_the_json_report_is_documented() -> None:
    schema = json.loads(files("normwise.checkup.reports").joinpath("schema-1.json").read_text("utf-8"))
    section = page("docs/python-api.md").split("## JSON, schema 1")[1]
    assert set(keys_of(schema)) - code_words(section.replace("[]", "")) == set()


def keys_of(schema: object) -> Iterator[str]:
    """Return the names of all properties of a JSON schema, however deep."""
    if isinstance(schema, dict):
        properties = schema.get("properties", {})
        yield from properties
        for name, inner in schema.items():
            yield from keys_of(inner if name != "properties" else list(inner.values()))
    elif isinstance(schema, list):
        for inner in schema:
            yield from keys_of(inner)


def test_the_guard_of_the_json_keys_sees_deep_ones() -> None:
    schema = {"properties": {"a": {"items": {"properties": {"b": {}}}}}, "$defs": {"c": {"properties": {"d": {}}}}}
    assert set(keys_of(schema)) == {"a", "b", "d"}


WORDS = {
    "docs/glossary": (Place, StackKind, Kind),
    "docs/how-it-works": (Evidence, Basis, Severity, InputsFrom, Weights),
}


@pytest.mark.parametrize("suffix", [".md", ".zh-CN.md"])
@pytest.mark.parametrize("stem", WORDS)
def test_every_word_of_a_report_is_explained_in_both_languages(stem: str, suffix: str) -> None:
    wanted = {str(word) for enum in WORDS[stem] for word in enum}
    assert wanted - code_words(page(stem + suffix)) == set()


@pytest.mark.parametrize(
    "enum", [Scope, Statistic, Weight, Cast, Form, Gate, Modulation], ids=lambda enum: enum.__name__
)
def test_every_value_of_a_spec_is_documented(enum: type[StrEnum]) -> None:
    assert {str(word) for word in enum} - code_words(page("docs/python-api.md")) == set()


LAYERS = [*layers.__all__, *(f"functional.{name}" for name in functional.__all__)]


def layer_section(name: str) -> str:
    return page("docs/layers.md").split(f"\n### {name}\n")[1].split("\n### ")[0].split("\n## ")[0]


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_and_function_is_explained_with_an_example(name: str) -> None:
    thing = getattr(layers, name, None) or getattr(functional, name.removeprefix("functional."))
    if callable(thing):
        assert len(layer_section(name).split("```pycon\n")) == 2
        assert undocumented(name) == set()
    else:
        assert set(thing) - code_words(layer_section(name)) == set()


def undocumented(name: str) -> set[str]:
    """The arguments that neither the section of a layer explains nor those that it points to."""
    thing = getattr(layers, name, None) or getattr(functional, name.removeprefix("functional."))
    pointed = re.findall(r"(?:see|as in) \[`(\w+)`\]\(#(functional)?", layer_section(name))
    sections = [name, *("functional." * bool(home) + other for other, home in pointed)]
    explained = {word for each in sections for word in re.findall(r"^\| `(\w+)` \|", layer_section(each), flags=re.M)}
    return set(inspect.signature(thing).parameters) - explained


@pytest.mark.parametrize("name", [name for name in layers.__all__ if inspect.isclass(getattr(layers, name))])
def test_every_layer_is_shown_at_work_in_the_guide(name: str) -> None:
    code = "".join(code for _, code in _RUNNABLE.findall(page("docs/which-norm.md")))
    assert re.search(rf"\b{name}\b[(,:.]", "".join(code.splitlines(keepends=True)))


def test_every_family_is_in_the_table_of_families_once() -> None:
    table = page("docs/which-norm.md").split("<!-- families -->")[1].split("<!-- /families -->")[0]
    names = [name for row in table.splitlines()[3:] for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert sorted(names) == sorted(layers.FAMILIES)


def test_the_guide_gives_the_figures_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "norms_of_one_name.py"), run_name="__main__")
    measured = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    section = page("docs/which-norm.md").split("\n## What differs")[1].split("\n## ")[0]
    rows = {row[0].strip("| `"): row[2] for line in section.splitlines() if len(row := line.split(" | ")) == 3}
    assert set(measured) == set(rows) - {"field of `NormSpec"}
    number = r"\d+\.\d+|\d+(?= %)|float32|bfloat16"
    for field, figures in measured.items():
        told = iter(re.findall(number, rows[field]))
        assert all(figure in told for figure in re.findall(number, figures)), field


# -- the guide to placements -----------------------------------------------------------------------


PLACEMENTS = placements.names()


def rows_between(name: str, mark: str) -> dict[str, list[str]]:
    """The rows of a marked table by their first word."""
    table = page(name).split(f"<!-- {mark} -->\n")[1].split(f"<!-- /{mark} -->")[0]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in table.splitlines()[2:]]
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0].strip("`"): row[1:] for row in rows}


def test_the_guide_knows_every_placement_and_which_need_a_final_norm() -> None:
    rows = rows_between("docs/placements.md", "every placement")
    assert sorted(rows) == sorted(PLACEMENTS)
    assert {name: row[1] for name, row in rows.items()} == {
        name: "yes" if placements.get(name).needs_final_norm else "no" for name in PLACEMENTS
    }


@pytest.mark.parametrize("name", ["docs/placements.md", "docs/placements.zh-CN.md"])
def test_the_figures_of_placements_are_those_that_were_measured(name: str) -> None:
    rows = rows_between("docs/measured.md", "measured placements")
    assert sorted(rows) == sorted(PLACEMENTS)
    assert rows_between(name, "measured placements") == rows


@pytest.mark.slow
def test_a_placement_measured_again_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)  # the script imports what stands beside it
    again = runpy.run_path(str(DOCS / "measure_placements.py"))["row"]("deep-norm")
    told = rows_between("docs/measured.md", "measured placements")["deep-norm"]
    assert same(" ".join(told), " ".join(again[1:]))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_has_its_page(name: str) -> None:
    section = page("docs/placement-list.md").split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert set(placements.get(name).aliases) <= code_words(section)
    assert f"`{placements.get(name).init}`" in section


# -- conversions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", conversions.names())
def test_every_conversion_has_its_page_in_two_languages(name: str) -> None:
    english, chinese = page(f"docs/conversions/{name}.md"), page(f"docs/conversions/{name}.zh-CN.md")
    assert english.count("\n## ") == chinese.count("\n## ")
    assert re.search(r"[\u4e00-\u9fff]{8}", chinese.split("\n# ")[1])
    options = [option for option in inspect.signature(conversions.get(name).plan).parameters if option != "facts"]
    assert [option for option in options if f"`{option}`" not in english or f"`{option}`" not in chinese] == []


@pytest.mark.parametrize("mark", ["measured conversions", "measured precision", "measured training"])
def test_the_figures_of_conversions_are_those_that_were_measured(mark: str) -> None:
    rows = rows_between("docs/measured.md", mark)
    assert len(rows) >= 4
    for guide in ("docs/layer-to-rms.md", "docs/layer-to-rms.zh-CN.md"):
        assert rows_between(guide, mark) == rows


@pytest.mark.slow
def test_an_architecture_converted_again_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    again = runpy.run_path(str(DOCS / "measure_conversions.py"))["architecture"]("whisper")
    assert again[1:4] == rows_between("docs/measured.md", "measured conversions")["whisper"][:3]


# -- the tables of rules ------------------------------------------------------------------------


INDEX = {"en": "docs/rules/README.md", "zh": "docs/rules/README.zh-CN.md"}


@pytest.mark.parametrize("lang", INDEX)
def test_the_index_lists_every_rule_with_its_own_words(lang: str) -> None:
    suffix = INDEX[lang].partition("README")[2]
    assert [line for line in page(INDEX[lang]).splitlines() if line.startswith("| [")] == [
        f"| [{part.CODE}]({part.CODE}{suffix}) | {name} | {part.SEVERITY} | {page_title(part, lang)} |"
        for name, part in RULES
    ]


@pytest.mark.parametrize("name", [README, README_ZH])
def test_the_readme_leads_to_every_rule_and_to_the_index(name: str) -> None:
    table = page(name).split("<!-- rules -->\n")[1].split("\n<!-- /rules -->")[0]
    assert re.findall(r"\[(\w+)\]\(docs/rules/\1", table) == CODES_BY_FAMILY
    assert len(table.splitlines()) == 2 + len({code[:3] for code in CODES})
    assert f"(docs/rules/README{name.removeprefix('README')})" in page(name)


@pytest.mark.parametrize("suffix", [".md", ".zh-CN.md"])
@pytest.mark.parametrize("code", CODES)
def test_every_rule_has_a_page_in_both_languages(code: str, suffix: str) -> None:
    first, blank, title, *_ = page(f"docs/rules/{code}{suffix}").splitlines()
    assert (first, blank) == (f"[English]({code}.md) | [简体中文]({code}.zh-CN.md)", "")
    assert title.startswith(f"# {code} ")


# -- the guide that shows real reports ------------------------------------------------------------


@pytest.fixture(scope="module")
def make_reports() -> ModuleType:
    return script("make_reports")


def same(shown: str, real: str) -> bool:
    """Whether two texts say the same, figures loosely: rounding differs from machine to machine."""
    pair = words_and_figures(shown), words_and_figures(real)
    return len(pair[0]) == len(pair[1]) and all(map(alike, *pair))


def words_and_figures(text: str) -> list[str]:
    without_curves = re.sub("[▁▂▃▄▅▆▇█!]+", " ", text)
    return re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?|[^\W\d]+", without_curves)


def alike(shown: str, real: str) -> bool:
    if not shown[0].isdigit() or not real[0].isdigit():
        return shown == real
    return float(shown) == pytest.approx(float(real), rel=0.1, abs=1e-4)


def test_a_report_that_says_something_else_is_not_the_same() -> None:
    assert same("5 norms: 0.4132 → 0\n  ▁▂▃▄▅ 1.0", "5 norms: 0.4129 → 0  ▁▂▄▄▅ 1.0")
    assert not same("5 norms: 0.4132", "5 norms: 0.31")
    assert not same("5 norms: 0.4132", "5 layers: 0.4132")
    assert not same("5 norms", "5 norms: 1")


@pytest.mark.usefixtures("settings_of_torch")
@pytest.mark.parametrize("name", ["find-the-cause.md", "find-the-cause.zh-CN.md"])
def test_the_guide_shows_what_the_check_says(name: str, make_reports: ModuleType) -> None:
    blocks = list(make_reports.blocks(name))
    assert len(blocks) == 6
    for target, wanted, shown in blocks:
        real = make_reports.sections(target, wanted, make_reports.GUIDES[name])
        assert same(shown, real), f"{target}: run python docs/make_reports.py\n{real}"


# -- the two languages ------------------------------------------------------------------------------


def outline(text: str) -> list[object]:
    """The headings' levels, the lengths of tables and lists, in their order."""
    shapes = (("#" * 3, r"#{1,6}(?= )"), ("|", r"\|"), ("-", r"-(?= )"), ("1", r"\d+\.(?= )"), ("!", r"!\["))
    found: list[object] = []
    for line in prose(text).splitlines():
        match = next(((name, m) for name, pattern in shapes if (m := re.match(pattern, line))), None)
        if match is not None:
            found.append(match[1].group() if match[0] == "###" else match[0])
    return found


@pytest.mark.parametrize(("english", "chinese"), TWINS, ids=[name for name, _ in TWINS])
class TestTwins:
    def test_link_to_each_other_in_the_first_line(self, english: str, chinese: str) -> None:
        line = f"[English]({Path(english).name}) | [简体中文]({Path(chinese).name})"
        assert page(english).splitlines()[0] == page(chinese).splitlines()[0] == line

    def test_have_the_same_sections_tables_and_lists(self, english: str, chinese: str) -> None:
        assert outline(page(chinese)) == outline(page(english))

    def test_have_the_same_code(self, english: str, chinese: str) -> None:
        # a report is shown in the language of its page: what must agree is how it was made
        texts = [_REPORT.sub(r"\1", page(name)) for name in (chinese, english)]
        assert _FENCE.findall(texts[0]) == _FENCE.findall(texts[1])
        assert [found[0] for found in _REPORT.findall(page(chinese))] == [
            found[0] for found in _REPORT.findall(page(english))
        ]

    def test_link_to_the_same_places(self, english: str, chinese: str) -> None:
        targets = [
            [re.sub(r"\.zh-CN|#.*", "", link) for link in _LINK.findall(page(name))[2:]] for name in (english, chinese)
        ]
        assert targets[1] == targets[0]

    def test_give_the_same_figures(self, english: str, chinese: str) -> None:
        tables = [re.findall(r"^\|.*\|$", page(name), flags=re.MULTILINE) for name in (english, chinese)]
        figures = [[re.findall(r"\d+\.\d+", row) for row in rows] for rows in tables]
        assert figures[1] == figures[0]


def test_the_outline_sees_a_section_or_a_row_that_is_missing() -> None:
    text = "# a\n\n## b\n\n| x |\n|---|\n| y |\n\n- z\n"
    assert outline(text) == ["#", "##", "|", "|", "|", "-"]
    assert outline(text.replace("| y |\n", "")) != outline(text)
    assert outline(text.replace("## b", "b")) != outline(text)


# -- links ------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_every_local_link_leads_somewhere(name: str) -> None:
    lost = []
    for link in _LINK.findall(prose(page(name))):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        there = (ROOT / name).parent / path if path else ROOT / name
        if not there.exists() or (anchor and anchor not in anchors(there.read_text("utf-8"))):
            lost.append(link)
    assert lost == []


# -- what is shown is run ------------------------------------------------------------------------


def runnable() -> list[tuple[str, str, str]]:
    return [(name, kind or "", code) for name in PAGES for kind, code in _RUNNABLE.findall(page(name))]


SCRIPTS = [(name, kind, code) for name, kind, code in runnable() if not kind.endswith(".py")]


def test_the_pages_have_code_to_run() -> None:
    guides = {
        f"docs/{name}{suffix}"
        for name in ("which-norm", "placements", "layer-to-rms", "formats", "configuration")
        for suffix in (".md", ".zh-CN.md")
    }
    assert {name for name, _, _ in SCRIPTS} == {README, README_ZH, "docs/python-api.md", *guides}


@pytest.fixture
def settings_of_torch() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


# the Chinese pages have the same code, see TestTwins
@pytest.mark.usefixtures("settings_of_torch")
@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        pytest.param(*script, marks=pytest.mark.slow if "nw.study(" in script[2] else ())  # a minute of training
        for script in SCRIPTS
        if ".zh-CN" not in script[0]
    ],
    ids=lambda x: x[:20],
)
def test_the_python_of_a_page_runs(
    name: str, kind: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, name, "exec"), {"__name__": "__main__"})
    if kind == "prints":
        shown = next(text for language, text in _FENCE.findall(page(name)) if language == "text")
        assert capsys.readouterr().out == shown
        assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_commands_of_the_readme_run_on_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    ((file, code),) = [(kind, code) for name, kind, code in runnable() if name == README and kind.endswith(".py")]
    Path(file).write_text(code)
    blocks = [text for language, text in _FENCE.findall(page(README)) if language == "sh" and "normwise check" in text]
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert {line[0] for line in lines} == {"normwise"}
    codes = [main(line[1:]) for line in lines]
    assert codes == [0, 1, 0, 0], capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {file, "report.html", "report.json"}


# -- the picture -----------------------------------------------------------------------------------


def script(name: str) -> ModuleType:
    """Return a program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make_images() -> ModuleType:
    return script("make_images")


PICTURE = DOCS / "images" / "check-demo.svg"


def words_of(svg: str) -> list[str]:
    """The words of a picture in their order: numbers and curves differ between machines."""
    lines = ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iterfind(".//{*}text")]
    return re.findall(r"[^\W\d_][^\W\d]*", " ".join(lines))


def test_the_picture_shows_what_the_program_prints(make_images: ModuleType) -> None:
    fresh = make_images.picture(make_images.demo_report(), f"$ {make_images.COMMAND}")
    assert words_of(PICTURE.read_text("utf-8")) == words_of(fresh), "run python docs/make_images.py"


def test_the_same_report_gives_the_same_picture(make_images: ModuleType) -> None:
    assert make_images.picture(make_images.demo_report(), "x") == make_images.picture(make_images.demo_report(), "x")


def test_the_picture_shows_the_command_and_the_kinds_of_findings() -> None:
    words = words_of(PICTURE.read_text("utf-8"))
    assert words[:3] == ["normwise", "check", "demo"]
    assert {"error", "warnings", "PLC", "AXS", "effect", "fix", "why", "pre", "post", "embedding"} <= set(words)


@pytest.mark.parametrize("path", sorted(PICTURE.parent.glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_loads_nothing(path: Path) -> None:
    svg = path.read_text("utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"@font-face|@import|href|<script|<image|url\((?!#)", svg) == []
    assert set(re.findall(r"https?://[^\s<>\"]+", re.sub(r"<!--.*?-->", "", svg))) == set()
