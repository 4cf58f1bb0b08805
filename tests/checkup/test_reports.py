from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.cells import cell_len

from normwise.checkup import reports
from normwise.checkup.finding import NotChecked
from normwise.checkup.report import Report
from normwise.checkup.reports import _depth, _pages
from normwise.checkup.reports._words import ZH, words
from normwise.facts.records import ProfileRow, StackKind
from normwise.rendering import both
from normwise.spec import NormSpec, Statistic
from tests.checkup.sample_reports import HOSTILE, SAMPLES, decoder, empty, encoder, faulty, hostile, quiet

PART_FILES = files("normwise.checkup.reports")
SCHEMA = json.loads(PART_FILES.joinpath("schema-1.json").read_text("utf-8"))
SNAPSHOT = Path(__file__).parent.parent / "data" / "report_sample.txt"

MAPS = ("html", "json", "markdown", "text")  # the formats that show the map and what the check cost

every_format = pytest.mark.parametrize("name", reports.names())
every_sample = pytest.mark.parametrize("sample", SAMPLES)


def text(report: Report, **options: Any) -> str:
    return reports.render(report, "text", **{"width": 100, "color": False, **options})


class Page(HTMLParser):
    """Collects elements and their attributes, and checks that they nest."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


# every format, every sample


@every_format
@every_sample
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_format_names_every_finding_and_norm(name: str, sample: str, full: bool, lang: str) -> None:
    report = SAMPLES[sample]()
    page = reports.render(report, name, full=full, lang=lang, width=400)
    assert page.endswith("\n")
    for finding in report.findings:
        assert finding.code in page
    if full and sample != "hostile" and name in MAPS:
        assert [norm.path for norm in report.norms if norm.path not in page] == []


@every_format
@every_sample
def test_no_format_lets_a_control_or_hidden_character_through(name: str, sample: str) -> None:
    page = reports.render(SAMPLES[sample](), name)
    assert (
        re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]", page)
        == []
    )


@every_format
def test_every_format_shows_hostile_text_as_text(name: str) -> None:
    page = reports.render(hostile(), name, width=4000)
    visible = {
        "json": '"target": ' + json.dumps(HOSTILE),
        "html": "&lt;script&gt;alert(1)",
        "text": "[bold red]hi[/bold red]",
        "markdown": "<code>&#60;script&#62;alert(1)&#60;/script&#62;",
        "sarif": '"target": "<script>alert(1)</script>',
        "github": "]hi[/bold red]",
        "junit": "&lt;script&gt;alert(1)&lt;/script&gt;",
    }
    assert visible[name] in page


@every_format
def test_a_saved_report_is_what_is_rendered(name: str, tmp_path: Path) -> None:
    part = reports.FORMATS[name]
    for suffix in part.SUFFIXES:
        path = reports.save(hostile(), tmp_path / f"report{suffix}")
        assert path.read_text("utf-8") == reports.render(hostile(), name, **part.FILE_OPTIONS)
    assert len(list(tmp_path.iterdir())) == len(part.SUFFIXES)


@every_format
def test_no_format_grows_without_end(name: str) -> None:
    large = decoder(depth=200)
    assert len(reports.render(large, name)) < 1_200_000


# the family


def test_the_formats_are_known_by_name_and_suffix() -> None:
    assert reports.names() == ("github", "html", "json", "junit", "markdown", "sarif", "text")
    assert reports.suffixes() == {
        ".html": "html", ".htm": "html", ".json": "json", ".txt": "text", ".md": "markdown", ".sarif": "sarif",
        ".sarif.json": "sarif", ".xml": "junit",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "start"),
    [("r.sarif.json", '{\n  "$schema"'), ("r.JSON", '{\n  "schema"'), ("r.junit.xml", "<?xml"), ("v1.2.md", "# normw")],
)
def test_the_longest_suffix_chooses_the_format(name: str, start: str, tmp_path: Path) -> None:
    assert reports.save(empty(), tmp_path / name).read_text("utf-8").startswith(start)


def test_an_unknown_format_is_told_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="no format is called 'pdf': choose from github, html, json, junit, markdown, "
    ):
        reports.render(empty(), "pdf")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="no report format has the option 'colour': color, full, lang, width"):
        reports.render(empty(), "json", colour=True)


@pytest.mark.parametrize("name", ["text", "html"])
def test_an_unknown_language_is_told_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="reports speak en, zh, got 'fr'"):
        reports.render(empty(), name, lang="fr")


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.json.gz"])
def test_an_unknown_suffix_is_told_the_known_ones_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"{name} names no report format: let it end in .htm, .html, .json, .md, .sarif, ")
    ):
        reports.save(empty(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        reports.save(empty(), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_saved_report_can_be_read_by_whoever_may_read_new_files(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    path = reports.save(empty(), tmp_path / "report.txt")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_the_report_itself_prints_saves_and_shows(tmp_path: Path) -> None:
    report = encoder()
    assert str(report) == reports.render(report, "text")
    assert report.to_json() == reports.render(report, "json")
    assert report.to_markdown() == reports.render(report, "markdown")
    assert report.to_sarif(full=True) == reports.render(report, "sarif", full=True)
    assert report._repr_html_() == report.to_html() == reports.render(report, "html")
    assert report.save(tmp_path / "r.html").read_text("utf-8") == report.to_html()


def test_a_report_is_written_in_the_language_it_is_asked_for(tmp_path: Path) -> None:
    report = faulty()
    assert report.to_text(lang="zh") == reports.render(report, "text", lang="zh") != str(report)
    assert "发现的问题" in report.to_html(lang="zh")
    assert "发现的问题" in report.save(tmp_path / "r.txt", lang="zh").read_text("utf-8")
    assert report.save(tmp_path / "r.json", lang="zh").read_text("utf-8") == report.to_json()


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("normwise check hf:bert --inputs 2x8:long", "normwise check hf:bert --inputs 2x8:long --select NUM001"),
        ('nw.check(model, inputs, effort="full")', 'nw.check(model, inputs, effort="full", select=["NUM001"])'),
        ("", ""),
    ],
)
def test_a_finding_can_be_reproduced_by_one_line(call: str, line: str) -> None:
    report = replace(encoder(), call=call)
    assert report.reproduce(report.findings[0]) == line
    assert json.loads(report.to_json())["findings"][0]["reproduce"] == line
    assert ("reproduce" in words_in(report.to_html())) == bool(line)
    assert line in words_in(report.to_html())


def words_in(page: str) -> str:
    return " ".join(Page(page).words)


@pytest.mark.parametrize("name", [*MAPS, "sarif"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_format_with_a_map_says_what_the_check_cost(name: str, lang: str) -> None:
    cost = replace(decoder().cost, forward_passes=11, backward_passes=7, repair_passes=3)
    page = reports.render(replace(decoder(), cost=cost, effort="full"), name, lang=lang, width=200)
    said = {
        "data": ['"forward_passes": 11', '"backward_passes": 7', '"repair_passes": 3', '"effort": "full"'],
        "en": ["effort full", "11 forward passes, 7 backward passes, 3 of them for a repair"],
        "zh": ["力度 full", "11 次前向, 7 次反向, 其中 3 次为修复验证"],
    }["data" if name in ("json", "sarif") else lang]
    assert [each for each in said if each not in page] == []


# text


def test_the_text_of_a_report_with_six_findings_is_as_recorded() -> None:
    assert text(faulty()) == SNAPSHOT.read_text("utf-8")


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@every_sample
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_text_never_exceeds_the_width(sample: str, width: int, lang: str) -> None:
    page = text(SAMPLES[sample](), width=width, lang=lang)
    assert max(map(cell_len, page.splitlines())) <= width


@pytest.mark.parametrize("width", [80, 100])
def test_a_model_of_28_layers_fits_one_screen(width: int) -> None:
    assert len(text(decoder(28), width=width).splitlines()) <= 45


def test_repeated_blocks_are_one_line_unless_asked_for_all() -> None:
    assert re.search(
        r"model\.layers\.\{0-27\}\.input_layernorm +×28 +rms +-1 +1e-6 +fp32 +w +pre", text(decoder(), width=120)
    )
    assert "model.layers.13.input_layernorm" in text(decoder(), full=True)


def test_a_block_that_differs_has_its_own_line() -> None:
    report = decoder(6)
    odd = replace(report.norms[4], spec=replace(report.norms[4].spec, eps=1e-5))  # pyright: ignore[reportArgumentType]
    page = text(replace(report, norms=(*report.norms[:4], odd, *report.norms[5:])), width=120)
    assert re.search(r"layers\.\{0,2-5\}\.input_layernorm +×5 .* 1e-6", page)
    assert re.search(r"layers\.1\.input_layernorm  +rms .* 1e-5", page)


def test_a_norm_that_only_its_kind_makes_look_plain_says_what_else_it_does() -> None:
    report = decoder()
    odd = {"partial": 0.25, "statistic": Statistic.COMPLETED, "weight_on_input": True}
    for (field, value), shown in zip(odd.items(), ("of the first 0.25", "of n+1", "of w x"), strict=True):
        site = replace(report.norms[0], spec=NormSpec(**{field: value}))
        assert f"rms {shown}" in text(replace(report, norms=(site,)))
        (row,) = json.loads(reports.render(replace(report, norms=(site,)), "json"))["norms"]
        assert row[field] == value


def test_the_verdict_is_on_top_and_says_that_the_model_is_unchanged() -> None:
    first, second, *_ = text(faulty()).splitlines()
    assert first == "normwise check demo:faulty-decoder"
    assert second == "2 errors · 3 warnings · 1 info · 3 passed · 3 not checked · 1.8 s · model unchanged"


def test_in_colour_the_errors_of_the_verdict_are_bold_and_red() -> None:
    assert "\x1b[1;31m2 errors\x1b[0m" in text(faulty(), color=True)


def test_a_changed_model_is_said_loudly() -> None:
    assert "MODEL CHANGED" in text(replace(empty(), unchanged=False))
    assert "CHANGED" not in text(replace(empty(), unchanged=None)).upper()


def test_a_model_without_norms_is_told_so_clearly() -> None:
    assert "No normalization found\n  the model ran, and nothing in it normalizes activations\n" in text(empty())
    assert "the model was not run" in text(replace(empty(), inputs="none"))
    assert "dataflow was lost" in text(replace(empty(), breaks=faulty().breaks))
    assert "No normalization found" in reports.render(empty(), "html")


@pytest.mark.parametrize("name", ["text", "html"])
def test_silence_never_looks_like_a_pass(name: str) -> None:
    report = replace(empty(), passed=(), not_checked=faulty().not_checked)
    page = reports.render(report, name, width=200)
    assert "no rule could be judged" in page
    assert all(each.why in page for each in report.not_checked)


@pytest.mark.parametrize("name", ["text", "html"])
def test_a_map_shows_no_verdicts(name: str) -> None:
    page = reports.render(replace(decoder(), rules_run=False, passed=(), not_checked=()), name)
    assert "113 norms" in re.sub("<[^>]*>+", " ", page).replace("  ", " ")
    assert not re.search("no findings|passed|Passed|not checked", page)


def test_the_rung_of_the_inputs_and_every_assumption_is_disclosed() -> None:
    page = text(decoder())
    assert "inputs inferred from the model · weights random (structure counts, magnitudes do not)" in page
    assert all(f"- {note}" in page for note in decoder().notes)


def test_a_finding_has_its_evidence_effect_fix_and_where_to_read_on() -> None:
    page = text(faulty())
    head = "E NUM003 half-precision-statistics  model.layers.{3-11}.input_layernorm ×9           basis: measured\n"
    body = """\
  squares overflow in float16: rows come out as zero
  largest input: 412 · square: inf · zero rows: 37 of 1024
  effect  with statistics in float32: 37 zero rows → 0 zero rows
  fix     compute the mean square in float32 and cast back
  why     normwise explain NUM003
"""
    assert head + body in page


def test_evidence_breaks_between_facts_and_lists_of_paths_are_collapsed() -> None:
    evidence = {f"measured_number_{i}": 1.5 for i in range(7)} | {"gains": [f"h.{i}.norm.weight" for i in range(40)]}
    page = text(replace(encoder(), findings=(replace(encoder().findings[0], evidence=evidence),)), width=80, full=True)
    lines = [line.strip() for line in page.splitlines() if "measured number" in line]
    assert len(lines) == 3
    assert all(line.startswith("measured") and line.endswith("1.5") for line in lines[:2])
    assert "gains: h.{0-39}.norm.weight" in page


def test_evidence_of_a_finding_takes_two_lines_and_says_how_much_is_left_out() -> None:
    evidence = {f"measured_number_{i}": 1.5 for i in range(7)}
    page = text(replace(encoder(), findings=(replace(encoder().findings[0], evidence=evidence),)), width=80)
    lines = [line.strip() for line in page.splitlines() if "measured number" in line]
    assert len(lines) == 2
    assert lines[1].endswith(" · +2 more")
    assert sum(line.count("1.5") for line in lines) == 5


def test_a_metric_is_the_name_of_its_value_and_the_floor_stands_beside_it() -> None:
    evidence = {"metric": "rows that are exactly zero", "value": 35, "floor": 2, "rows": 640}
    report = replace(encoder(), findings=(replace(encoder().findings[0], evidence=evidence),))
    assert "rows that are exactly zero: 35 (floor 2) · rows: 640" in text(report)
    assert "恰好全零的行: 35 (下限 2) · 行数: 640" in text(report, lang="zh")


def test_a_note_of_a_norm_speaks_the_language_of_the_report() -> None:
    norm = replace(encoder().norms[0], note=both("weight norm", "权重归一化"))
    report = replace(encoder(), norms=(norm,))
    for name in ("text", "markdown", "html"):
        english, chinese = (reports.render(report, name, lang=lang) for lang in ("en", "zh"))
        assert ("weight norm" in english, "权重归一化" in chinese) == (True, True)
        assert "weight norm" not in chinese


def test_a_repair_names_what_it_moved() -> None:
    repair = {
        "change": both("eps 1e-5", "把 eps 改为 1e-5"),
        "metric": "elements that are not finite",
        "before": 3,
        "after": 0,
    }
    report = replace(encoder(), findings=(replace(encoder().findings[0], counterfactual=repair),))
    assert "effect  with eps 1e-5: elements that are not finite 3 → 0" in text(report)
    assert "若把 eps 改为 1e-5: 非有限的元素 3 → 0" in text(report, lang="zh")


def test_a_reason_is_given_once_with_the_rules_it_holds_for() -> None:
    why = both("needs the optimizer: pass optimizer=...", "需要优化器：传入 optimizer=...")
    skipped = tuple(NotChecked(code=code, name="x", why=why) for code in ("PAR001", "PAR002", "PAR003", "PLC005"))
    report = replace(decoder(), not_checked=(*skipped, NotChecked(code="AXS004", name="y", why="one process")))
    assert (
        "Not checked  5\n  needs the optimizer: pass optimizer=...  PAR001-003 PLC005\n  one process  AXS004"
        in text(report)
    )
    assert report.to_html().count("needs the optimizer") == 1
    assert "  需要优化器：传入 optimizer=...  PAR001-003 PLC005\n" in text(report, lang="zh")


def test_the_list_of_reasons_is_short_unless_asked_for_all() -> None:
    skipped = tuple(NotChecked(code=f"PAR0{i}1", name="x", why=f"reason {i}, " + "很长" * 60) for i in range(10, 40))
    report = replace(decoder(), not_checked=skipped)
    shown = text(report, lang="zh").split("未检查  30\n")[1].splitlines()
    assert len(shown) == 9
    assert shown[-1] == "  另有 22 项 (--full)"
    assert all(reason.why in text(report, full=True, width=400) for reason in skipped)


def test_what_a_target_or_a_fact_says_in_two_languages_is_shown_in_the_one_asked_for() -> None:
    report = replace(
        faulty(),
        notes=(both("inputs generated", "输入是生成的"),),
        breaks=(replace(faulty().breaks[0], what=both("numpy", "经过了 numpy")),),
    )
    for page in (text(report, lang="zh"), report.to_html(lang="zh"), report.to_markdown(lang="zh")):
        assert "输入是生成的" in page
        assert "经过了 numpy" in page
        assert "inputs generated" not in page


def test_nan_in_the_profile_is_seen() -> None:
    assert re.search(r"residual  ▄!!  1 → 0", text(hostile()))


def test_the_placement_of_each_stack_is_in_words() -> None:
    page = text(faulty())
    assert "stack 0  pre-norm  x + F(N(x)) · 12 blocks · 24 sublayers · final norm: yes" in page
    assert "stack 1  mixed: none ×4, pre ×2 · 4 blocks · 6 sublayers · starts with a norm" in page
    assert "ends with its own" in text(encoder())


def test_the_words_around_the_data_are_chinese_where_asked_and_the_data_are_not() -> None:
    page = text(faulty(), lang="zh")
    assert "2 个错误 · 3 个警告" in page
    assert "发现的问题" in page
    assert "model.layers.{0-11}" in page


def test_every_phrase_has_its_chinese() -> None:
    sources = [each.read_text("utf-8") for each in PART_FILES.iterdir() if each.name.endswith((".py", ".jinja"))]
    said = {phrase for source in sources for phrase in re.findall(r"\bsay\(\s*\"([^\"]+)\"", source)}
    assert len(said) > 20
    assert said <= set(ZH)
    assert all(words("zh")(phrase) != phrase for phrase in ZH if phrase not in ("eps",))


# JSON


@every_sample
def test_json_is_strict_and_valid_by_the_schema(sample: str) -> None:
    document = json.loads(SAMPLES[sample]().to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    jsonschema.Draft202012Validator(SCHEMA).validate(document if sample != "hostile" else {**document, "weights": "x"})


@pytest.mark.parametrize("change", [{"schema": 2}, {"inputs": "guessed"}, {"norms": [{}]}, {"profile": None}])
def test_the_schema_refuses_what_is_no_report(change: dict[str, object]) -> None:
    document = {**json.loads(empty().to_json()), **change}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(document)


def test_a_norm_is_one_flat_row() -> None:
    row = json.loads(decoder().to_json())["norms"][0]
    expected = {
        "path": "model.layers.0.input_layernorm", "kind": "rms", "axes": [-1], "eps": 1e-06, "eps_inside": True,
        "biased": True, "stats_dtype": "float32", "weight": "vector", "weight_offset": 0, "bias": False,
        "cast": "before_weight", "gated": False, "groups": None, "placement": "pre", "stack": 0, "layer": 0, "calls": 1,
        "native": False, "evidence": "verified", "source": "modeling.py:57", "note": None,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    assert isinstance(row["weight_offset"], int)


def test_a_norm_that_is_not_understood_is_of_kind_other_and_says_why() -> None:
    (row,) = [row for row in json.loads(faulty().to_json())["norms"] if row["path"] == "vision.0.norm"]
    assert (row["kind"], row["eps"], row["axes"], row["evidence"]) == ("other", None, None, "unknown")
    assert row["note"] == "a root of a sum over time"


def test_json_has_every_key_of_the_schema_in_the_design() -> None:
    document = json.loads(faulty().to_json())
    assert set(document) >= {
        "schema", "target", "inputs", "versions", "cost", "placement", "norms", "not_executed", "breaks", "profile",
        "findings", "passed", "not_checked",
    }  # fmt: skip
    assert document["placement"]["stacks"][1]["mixture"] == {"none": 4, "pre": 2}
    assert document["findings"][1]["paths"][0] == "model.layers.3.input_layernorm"
    assert document["findings"][0]["paths"] == ["vision.0.norm"]


def test_numbers_that_json_lacks_are_strings() -> None:
    document = json.loads(hostile().to_json())
    assert [row["residual_rms"] for row in document["profile"]] == [1.0, "nan", 0.0]
    assert document["profile"][1]["branch_rms"] == "inf"
    assert document["findings"][0]["counterfactual"]["after"] == "-inf"


def test_evidence_of_any_type_becomes_plain() -> None:
    import torch

    evidence = {"tensor": torch.tensor([1.0, float("nan")]), "scalar": torch.tensor(3), "dtype": torch.float16,
                "kind": StackKind.PRE, "set": {2, 1}, "none": None, 7: (1, 2)}  # fmt: skip
    finding = replace(encoder().findings[0], evidence=evidence)
    found = json.loads(replace(empty(), findings=(finding,)).to_json())["findings"][0]["evidence"]
    assert found == {
        "tensor": [1.0, "nan"], "scalar": 3, "dtype": "torch.float16", "kind": "pre", "set": [1, 2], "none": None,
        "7": [1, 2],
    }  # fmt: skip


def test_json_holds_the_names_exactly() -> None:
    assert json.loads(hostile().to_json())["target"] == HOSTILE


def test_json_tells_what_is_kept_quiet_and_what_kept_nothing_quiet() -> None:
    document = json.loads(quiet().to_json())
    assert [
        (each["finding"]["code"], each["by"], each["where"], each["reason"]) for each in document["suppressed"]
    ] == [
        ("NUM003", "configuration", "pyproject.toml:12", "the vision part is frozen"),
        ("PLC001", "ignore", "model.norm", "trained without"),
        ("PAR001", "baseline", "normwise-baseline.json", "known before"),
    ]
    assert document["unused"] == [
        {
            "code": "PLC002", "pattern": "vision.*", "by": "configuration", "where": "pyproject.toml:14",
            "reason": "once needed",
        }
    ]  # fmt: skip


# what is kept quiet


def test_the_text_counts_what_is_kept_quiet_and_names_every_reason() -> None:
    page = text(quiet(), width=140)
    assert "1 error · 3 passed · 3 not checked · 3 suppressed · " in page
    assert """\
Suppressed  3  found, and kept quiet on request
  NUM003 half-precision-statistics  model.layers.{3-11}.input_layernorm: the vision part is frozen (configuration \
pyproject.toml:12)
  PLC001 missing-final-norm  model: trained without (nw.ignore model.norm)
""" in page  # fmt: skip
    assert "unused suppression: PLC002 vision.*, configuration pyproject.toml:14\n" in page
    zh = text(quiet(), width=140, lang="zh")
    assert "3 条已抑制" in zh
    assert "未用到的抑制: PLC002 vision.*, 配置文件 pyproject.toml:14" in zh


@pytest.mark.parametrize("name", ["html", "markdown"])
def test_a_page_shows_what_is_kept_quiet_and_what_kept_nothing_quiet(name: str) -> None:
    said = words_in(reports.render(quiet(), name)) if name == "html" else quiet().to_markdown()
    for each in (
        "3 suppressed",
        "trained without",
        "nw.ignore model.norm",
        "Unused suppressions",
        "vision.*",
        "once needed",
    ):
        assert each in " ".join(said.split())
    bare = words_in(faulty().to_html()) if name == "html" else faulty().to_markdown()
    assert not re.search("(?i)suppress", bare)


def test_what_is_kept_quiet_is_no_finding() -> None:
    assert str(quiet().worst()) == "error"
    assert "suppressed" not in text(faulty())


# HTML


@every_sample
@pytest.mark.parametrize("full", [False, True])
def test_the_page_nests_and_has_known_elements_only(sample: str, full: bool) -> None:
    page = Page(reports.render(SAMPLES[sample](), "html", full=full))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "link", "iframe", "object", "embed", "form", "base", "a", "foreignobject"}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_hostile_text_creates_no_element() -> None:
    harmless = replace(
        hostile(), target="t", notes=("n",), weights="w", versions={"v": "1"}, not_executed=("x",),
        findings=tuple(replace(f, message="m", fix="f") for f in hostile().findings),
    )  # fmt: skip
    attacked = [tag for tag, _ in Page(hostile().to_html()).elements]
    assert attacked == [tag for tag, _ in Page(harmless.to_html()).elements]


def test_the_page_forbids_every_source_and_loads_nothing() -> None:
    page = faulty().to_html()
    (policy,) = [a["content"] for _, a in Page(page).elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert not re.search(r"url\(|@import|src=|href=", page)
    inside_tags = "".join(re.findall(r"<[^>]*>", page))
    assert set(re.findall(r"https?://[^\"'<\s]+", inside_tags)) <= {"http://www.w3.org/2000/svg"}


@every_sample
def test_the_page_is_small(sample: str) -> None:
    assert len(SAMPLES[sample]().to_html().encode()) < 300_000


def test_the_page_of_a_model_with_hundreds_of_layers_is_small() -> None:
    assert len(decoder(400).to_html().encode()) < 300_000


def test_the_page_stays_small_where_nothing_repeats() -> None:
    report = decoder(28)
    many = tuple(replace(norm, path=f"n{i}x{j}y.norm") for i in range(40) for j, norm in enumerate(report.norms))
    page = replace(report, norms=many).to_html()
    assert len(page.encode()) < 300_000
    assert f"+{len(many) - 300} in the JSON report" in page


def test_the_page_works_in_the_dark_and_on_a_phone() -> None:
    page = faulty().to_html()
    assert "prefers-color-scheme: dark" in page
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page


def test_every_style_is_confined_to_the_report_so_that_a_notebook_keeps_its_own() -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", faulty().to_html(), flags=re.DOTALL)
    selectors = [part.strip() for group in re.findall(r"([^{}]+)\{", style) for part in group.split(",")]
    assert len(selectors) > 40
    assert [s for s in selectors if not s.startswith((".nw", "@media", "body:has(> .nw)"))] == []


def test_findings_are_pinned_to_the_depth_where_they_are() -> None:
    page = faulty().to_html()
    assert "NUM003 ×9</text>" in page
    assert "PLC001</text>" not in page  # the whole model
    assert "PAR001" in page
    assert not re.search(r"PAR001[^<]*</text>", page)  # every layer


def test_a_repair_is_drawn_where_it_is_a_number() -> None:
    def pictures(before: object, after: object) -> int:
        repair = {"change": "x", "before": before, "after": after}
        return (
            replace(empty(), findings=(replace(encoder().findings[0], counterfactual=repair),)).to_html().count("<svg")
        )

    assert pictures(0.4, 0.1) == 1
    assert pictures(float("inf"), 1) == 1
    assert pictures("37 zero rows", "0 zero rows") == 0
    assert pictures(True, False) == 0


def test_the_page_of_a_rule_is_in_the_report_once_in_its_language() -> None:
    report = replace(encoder(), findings=encoder().findings * 3)
    page = words_in(report.to_html())
    assert page.count("float16 ends at 65504") == 1
    assert "rsqrt(inf)" in page
    assert "为什么重要" in words_in(report.to_html(lang="zh"))


def test_the_page_says_by_which_numbers_the_rules_judged() -> None:
    report = replace(decoder(), tolerances={"NUM001": {"spike": 400.0, "constants": (0.0, 0.1)}})
    assert "spike 400 · constants 0, 0.1" in words_in(report.to_html())
    assert json.loads(report.to_json())["tolerances"] == {"NUM001": {"spike": 400.0, "constants": [0.0, 0.1]}}


def test_every_measure_of_depth_has_its_panel_and_no_other() -> None:
    assert "share of eps under the root" not in decoder().to_html()
    rows = tuple(
        replace(row, eps_share=0.2, grad_median=1e-5, branch_gain=0.1, block_influence=0.02, query_grad=1e-6)
        for row in decoder().profile
    )
    page = replace(decoder(), profile=rows).to_html()
    for name in (
        "residual stream, RMS",
        "branch / stream",
        "branch gain v",
        "block influence, 1 - cos",
        "gradient, RMS",
        "median token",
        "gradient of the query weights, RMS",
        "share of eps under the root",
    ):
        assert f">{name}</text>" in page
        assert f">{name}</text>" not in replace(decoder(), profile=()).to_html()


@pytest.mark.parametrize(
    ("lang", "said"), [("en", "predicted from theory at initialisation"), ("zh", "理论在初始化时的预测")]
)
def test_what_theory_expects_is_dashed_beside_what_was_measured(lang: str, said: str) -> None:
    assert said not in reports.render(decoder(), "html", lang=lang)
    for field in ("predicted_rms", "predicted_grad", "predicted_influence"):
        rows = tuple(replace(row, block_influence=0.02, **{field: 0.01}) for row in decoder().profile)
        page = reports.render(replace(decoder(), profile=rows), "html", lang=lang)
        assert page.count(said) == 1
        assert page.count('stroke-dasharray="5 4"') == 1


def test_a_measure_of_each_block_is_one_line() -> None:
    """Block influence stands at the last sublayer of a block, the gradient of queries at attention only."""
    profile = decoder().profile
    lines = reports.render(decoder(), "html").count("<polyline")
    for field in ("block_influence", "query_grad"):
        rows = tuple(replace(row, **{field: 0.1 if row.sublayer % 2 else None}) for row in profile)
        assert reports.render(replace(decoder(), profile=rows), "html").count("<polyline") == lines + 1
    # what is missing of a stream was not measured: its line is interrupted
    rows = tuple(replace(row, residual_rms=None if row.sublayer == 10 else row.residual_rms) for row in profile)
    assert reports.render(replace(decoder(), profile=rows), "html").count("<polyline") > lines


def test_few_of_many_stacks_are_drawn() -> None:
    stack = encoder().placement.stacks[0]
    many = replace(encoder(), placement=replace(encoder().placement, stacks=(stack,) * 50))
    assert len(many.to_html()) < 300_000


def test_a_finding_at_every_place_is_pinned_nowhere() -> None:
    paths = ["m.0", "m.0", "m.1"]
    assert _depth.first("m", paths) is None
    assert _depth.first("", paths) is None
    assert _depth.first("m.1.norm", paths) == 2
    assert _depth.first("m.10", paths) is None


def test_the_page_says_the_language_it_is_in() -> None:
    assert '<html lang="zh-CN">' in reports.render(faulty(), "html", lang="zh")
    assert '<html lang="en">' in faulty().to_html()


def test_a_profile_without_numbers_draws_no_chart() -> None:
    bare = ProfileRow(stack=0, sublayer=0, path="a", residual_rms=None, branch_rms=None, grad_rms=None)
    assert "Profile by depth" not in replace(encoder(), profile=(bare,)).to_html()
    assert "residual" not in text(replace(encoder(), profile=(bare,)))


def test_one_sublayer_draws_no_chart() -> None:
    stack = encoder().placement.stacks[0]
    one = replace(stack, members=stack.members[:1])
    row = replace(encoder().profile[0], stack=0, sublayer=0)
    report = replace(encoder(), placement=replace(encoder().placement, stacks=(one,)), profile=(row,))
    assert "Profile by depth" in encoder().to_html()
    assert "Profile by depth" not in report.to_html()


def test_a_page_names_the_file_of_the_rule_in_its_language() -> None:
    report = replace(faulty(), findings=(replace(faulty().findings[2], docs="docs/rules/PLC001.md"),))
    assert "docs/rules/PLC001.zh-CN.md" in reports.render(report, "html", lang="zh")
    assert "docs/rules/PLC001.md" in report.to_html()


# the pages of rules in a report


def test_a_code_that_no_rule_has_has_no_page() -> None:
    assert (_pages.page_of("ABC999", "en"), _pages.title_of("ABC999", "zh")) == ("", "")
