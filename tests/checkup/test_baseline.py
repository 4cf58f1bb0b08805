"""Baselines: what was known stays quiet, what is new fails; and files that are no baseline."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normwise.checkup import Finding, Report, baseline
from normwise.checkup.baseline import Baseline, Known, read
from normwise.checkup.suppression import quieted
from normwise.cli import main

MODEL = """
import torch
from torch import nn

def build(*names):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    for name in names:
        model.add_module(name, nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    return {"model": model, "inputs": torch.randn(4, 8), "optimizer": optimizer}

def clean():
    return {**build(), "optimizer": torch.optim.SGD(build()["model"].parameters())}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


CHECK = ["check", "model.py:build", "--select", "PAR001", "--fail-on", "warning"]


def test_known_findings_are_quiet_and_new_ones_fail(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(CHECK) == 1
    assert main([*CHECK, "--baseline", "known.json", "--write-baseline"]) == 0
    assert capsys.readouterr().err == "wrote known.json\n"
    assert main([*CHECK, "--baseline", "known.json", "--format", "json", "--isolated"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == []
    assert [each["where"] for each in report["suppressed"]] == ["known.json"]
    text = (folder / "model.py").read_text()
    (folder / "model.py").write_text(text.replace("def build(*names):", "def build(*names):\n    names = ['new']"))
    before = (folder / "known.json").read_bytes()
    # the norm that was known is still the first place: the finding is the known one, at one more place
    assert main([*CHECK, "--baseline", "known.json"]) == 0
    (folder / "model.py").write_text(text.replace("nn.LayerNorm(8), ", "").replace("(*names):", "(*n, names=['new']):"))
    assert main([*CHECK, "--baseline", "known.json"]) == 1
    assert (folder / "known.json").read_bytes() == before


def test_a_finding_that_is_gone_is_named_and_written_away(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHECK, "--baseline", "known.json", "--write-baseline"]) == 0
    text = (folder / "model.py").read_text()
    (folder / "model.py").write_text(text.replace("weight_decay=0.1", "weight_decay=0"))
    capsys.readouterr()
    assert main([*CHECK, "--baseline", "known.json", "--format", "json"]) == 0
    (unused,) = json.loads(capsys.readouterr().out)["unused"]
    assert (unused["code"], unused["by"], unused["where"]) == ("PAR001", "baseline", "known.json")
    assert main([*CHECK, "--baseline", "known.json", "--write-baseline"]) == 0
    assert read("known.json").known == frozenset()


def test_one_file_serves_several_targets_and_the_configuration_names_it(folder: Path) -> None:
    (folder / "pyproject.toml").write_text('[tool.normwise]\nbaseline = "known.json"\nselect = ["PAR001"]')
    assert main(["check", "demo:faulty-decoder", "--write-baseline", "--effort", "read"]) == 0
    before = read("known.json").known
    assert main(["check", "model.py:build", "--write-baseline"]) == 0
    assert {known.target for known in read("known.json").known} >= {"model.py:build"}
    assert before <= read("known.json").known
    assert main(["check", "model.py:build", "--fail-on", "info"]) == 0
    assert main(["check", "model.py:build", "--fail-on", "info", "--isolated", "--select", "PAR001"]) == 1


def test_what_is_ignored_does_not_change_what_is_known(folder: Path) -> None:
    text = (folder / "model.py").read_text().replace("(*names):", "(*n, names=['new']):")
    (folder / "model.py").write_text(text)
    assert main([*CHECK, "--baseline", "known.json", "--write-baseline"]) == 0
    entry = '[[tool.normwise.per-module-ignores]]\nmodules = ["1"]\nrules = ["PAR001"]\nreason = "r"'
    (folder / "pyproject.toml").write_text(entry)
    assert main([*CHECK, "--baseline", "known.json"]) == 0
    assert main([*CHECK, "--baseline", "other.json", "--write-baseline"]) == 0
    assert [each.fingerprint for each in read("other.json").known] == [e.fingerprint for e in read("known.json").known]


@pytest.mark.parametrize("arguments", [["--write-baseline"], ["--config", "a.toml", "--isolated"]])
def test_options_that_need_or_exclude_each_other(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nowhere.py:f", *arguments]) == 2
    assert re.fullmatch(
        r"normwise: [^\n]*(give --baseline FILE|leave one of them out)[^\n]*\n", capsys.readouterr().err
    )


ENTRY = {"target": "t", "code": "PAR001", "path": "a", "fingerprint": "f"}
BAD = {
    "report": (b'{"schema": 1, "target": "x", "findings": []}', "", "is no baseline of normwise"),
    "list": (b"[]", "", "is no baseline of normwise"),
    "broken": (b'{\n"kind": "normwise-baseline",\n', ":3", "is broken JSON"),
    "empty": (b"", ":1", "is broken JSON"),
    "schema": (b'{"kind": "normwise-baseline", "schema": 2, "findings": []}', "", "of schema 2, this version reads 1"),
    "no schema": (b'{"kind": "normwise-baseline"}', "", "of schema None"),
    "no findings": (b'{"kind": "normwise-baseline", "schema": 1}', "", "has no list of findings"),
    "an entry": (
        json.dumps({"kind": "normwise-baseline", "schema": 1, "findings": [ENTRY, {**ENTRY, "path": 1}]}).encode(),
        "",
        "its finding 2 lacks one of target, code, path, fingerprint",
    ),
    "no text": (b"\xff\xfe\x00 \xd8", "", "is no text"),
    "pickle": (b"\x80\x04\x95", "", "is no text"),
    "nested": (b"[" * 1_000_000, "", "is no baseline of normwise"),
    "number": (b"1" * 100_000, "", "is no baseline of normwise"),
    "model": (b"import torch\n", ":1", "is broken JSON"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("write", [[], ["--write-baseline"]], ids=["read", "write"])
def test_a_file_that_is_no_baseline_is_refused_and_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, write: list[str]
) -> None:
    content, line, said = BAD[name]
    (folder / "known.json").write_bytes(content)
    assert main(["check", "nowhere.py:f", "--baseline", "known.json", *write]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"normwise: known\.json{line}: [^\n]*{re.escape(said)}[^\n]*\n", err)
    assert (folder / "known.json").read_bytes() == content


@pytest.mark.parametrize(
    ("path", "write", "said"),
    [
        ("known.json", [], "known.json: there is no such file: write it first with --baseline known.json --write-b"),
        ("nowhere/known.json", ["--write-baseline"], "nowhere/known.json: there is no such file"),
        (".", [], "cannot be read (Is a directory)"),
        (".", ["--write-baseline"], "cannot be read (Is a directory)"),
    ],
)
def test_a_file_that_is_not_there(
    folder: Path, capsys: pytest.CaptureFixture[str], path: str, write: list[str], said: str
) -> None:
    assert main(["check", "nowhere.py:f", "--baseline", path, *write]) == 2
    assert said in capsys.readouterr().err
    assert [each.name for each in folder.iterdir()] == ["model.py"]


def test_the_file_is_one_finding_a_line_in_order(tmp_path: Path) -> None:
    known = {Known("t", "PAR001", "b", "1"), Known("t", "NUM001", "a\x1b", "2"), Known("a\n", "PAR001", "", "3")}
    Baseline(path=tmp_path / "known.json", known=frozenset(known)).write()
    assert (tmp_path / "known.json").read_text() == (
        "{\n"
        '  "kind": "normwise-baseline",\n'
        '  "schema": 1,\n'
        '  "findings": [\n'
        '    {"target": "a\\n", "code": "PAR001", "path": "", "fingerprint": "3"},\n'
        '    {"target": "t", "code": "NUM001", "path": "a\\u001b", "fingerprint": "2"},\n'
        '    {"target": "t", "code": "PAR001", "path": "b", "fingerprint": "1"}\n'
        "  ]\n"
        "}\n"
    )


TEXTS = st.text(max_size=5)
FINDINGS = st.lists(
    st.builds(
        lambda code, path: Finding(message="", fix="", code=code, path=path, paths=(path,)),
        st.sampled_from(["PAR001", "NUM001", "AXS004"]),
        TEXTS,
    ),
    max_size=5,
)


@given(st.lists(st.tuples(TEXTS, FINDINGS), max_size=3), FINDINGS)
def test_what_is_written_is_read_and_only_what_is_new_counts(
    tmp_path_factory: pytest.TempPathFactory, targets: list[tuple[str, list[Finding]]], new: list[Finding]
) -> None:
    path = tmp_path_factory.mktemp("b") / "known.json"
    known = read(path, missing=True)
    reports = {target: Report(target=target, findings=tuple(findings)) for target, findings in targets}
    for report in reports.values():
        known = known.updated(report)
    known.write()
    assert baseline.read(path) == known
    for target, report in reports.items():
        old = {f.fingerprint for f in report.findings}
        again = quieted(
            Report(target=target, findings=(*report.findings, *new)), baseline.read(path).suppressions(target)
        )
        assert [f for f in new if f.fingerprint not in old] == list(again.findings)
        assert again.unused == ()


def test_findings_of_rules_that_did_not_judge_stay() -> None:
    both = Report(target="t", findings=(found("PAR001"), found("NUM001")))
    known = Baseline(path=Path("x")).updated(both)
    assert known.updated(Report(target="t", passed=("NUM001",))).known == {
        each for each in known.known if each.code == "PAR001"
    }
    assert known.updated(Report(target="other", passed=("NUM001",))) == known


def found(code: str) -> Finding:
    return Finding(message="", fix="", code=code, path="a", paths=("a",))
