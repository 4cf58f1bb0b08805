from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from normwise import studies
from normwise.errors import StudyError
from normwise.studies import Evidence, Outcome, Rows, reports
from normwise.studies._exported import read_jsonl
from normwise.studies._trials import Trial
from normwise.studies.reports import _view
from tests.studies.made_up import DIGEST, evidence

CHINESE = re.compile(r"[\u4e00-\u9fff]")
every_format = pytest.mark.parametrize("name", reports.names())
both_languages = pytest.mark.parametrize("lang", ["en", "zh"])


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is as wide as the terminal; pytest-xdist's processes have one of 80 columns."""
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Evidence:
    made = evidence()
    monkeypatch.setitem(studies._STUDIES, "made-up", made.part)
    return made


def same(a: Any, b: Any) -> bool:
    """Equal, also where both are NaN."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


# all formats


def test_the_formats_are_those_that_are_promised() -> None:
    assert set(reports.names()) == {"csv", "html", "json", "jsonl", "markdown", "text"}
    promised = {".html", ".json", ".csv", ".jsonl", ".parquet", ".txt", ".md"}
    assert promised <= set(reports.suffixes())


@every_format
@both_languages
def test_every_format_shows_what_no_trial_ran(name: str, lang: str) -> None:
    empty = evidence(rows=Rows(()), unrun=(), ledger=None, data={})
    assert reports.render(empty, name, lang=lang).endswith("\n")


@every_format
def test_the_same_evidence_gives_the_same_text(name: str) -> None:
    assert reports.render(evidence(), name) == reports.render(evidence(), name)


@pytest.mark.parametrize("name", ["text", "html", "json", "markdown"])
def test_every_verdict_is_told_and_one_that_is_not_concluded_says_why(name: str) -> None:
    page = reports.render(evidence(), name)
    for outcome in Outcome:
        assert outcome in page
    assert "no trial with rate 7.0 has been run" in page
    assert "1.225" in page  # the figure of a judge: (1.1 + 1.35) / 2, both kinds


@pytest.mark.parametrize("name", ["text", "html", "json", "jsonl", "csv", "markdown"])
def test_a_trial_without_a_result_is_listed_with_its_error(name: str) -> None:
    page = reports.render(evidence(), name)
    assert "time limit of 3 s" in page
    assert page.count("5.0") >= 2


@every_format
def test_what_a_trial_said_is_no_command_to_a_ci_runner(name: str) -> None:
    made = evidence()
    hostile = "::error::x ##[error]y ##vso[z]"
    unrun = tuple(replace(each, error=hostile, params={"::error": hostile, **each.params}) for each in made.unrun)
    page = reports.render(replace(made, unrun=unrun), name)
    assert "error" in page
    assert re.findall(r"^\s*::\w|##\w*\[", page, flags=re.MULTILINE) == []


@pytest.mark.parametrize("name", ["text", "html", "markdown"])
def test_the_conditions_are_all_there_also_where_they_differed(name: str) -> None:
    page = reports.render(evidence(), name)
    said = ("2.14.1; 2.13.0", "Z80", DIGEST, "normwise-studies/made-up.sqlite", "made-up, version 3", "0, 1",
            "6 CPU-minutes", "12 of 14 trials", "normwise study made-up")  # fmt: skip
    for each in said:
        assert each in page
    assert "noise" not in page


@pytest.mark.parametrize(("changes", "command"), [
    ({}, "normwise study made-up"),
    ({"quick": True, "seeds": 1}, "normwise study made-up --quick"),
    ({"seeds": 5}, "normwise study made-up --seeds 5"),
])  # fmt: skip
def test_the_command_measures_the_same_again(changes: dict[str, Any], command: str) -> None:
    assert _view.command(evidence(**changes)) == command


@pytest.mark.parametrize("name", ["text", "html", "markdown", "json"])
def test_a_chinese_page_is_chinese(name: str) -> None:
    page = reports.render(evidence(), name, lang="zh")
    page = json.dumps(json.loads(page), ensure_ascii=False) if name == "json" else page
    for word in ("Post 没问题。", "各学习率的损失", "没有运行过 rate 7.0 的试验", "损失随学习率的变化", "编造的损失"):
        assert word in page
    for word in ("Loss", "fine", "measured", "made up", "placement"):
        assert word not in page
    assert not CHINESE.search(reports.render(evidence(), name))


def test_unknown_formats_and_languages_are_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text format is called 'pdf': choose from csv, html"):
        reports.render(evidence(), "pdf")
    with pytest.raises(ValueError, match="'parquet': it is a file only, save it"):
        reports.render(evidence(), "parquet")
    with pytest.raises(ValueError, match="no words in 'fr': choose from en, zh"):
        reports.render(evidence(), "html", lang="fr")
    with pytest.raises(ValueError, match=r"names no format of a study: let it end in .*\.parquet"):
        reports.save(evidence(), tmp_path / "x.pdf")


@pytest.mark.parametrize("suffix", [each for each in reports.suffixes() if each != ".parquet"])
def test_a_file_is_what_its_suffix_says(tmp_path: Path, suffix: str) -> None:
    path = reports.save(evidence(), tmp_path / f"out{suffix.upper()}", lang="zh")
    options = {"color": False, "width": 120}
    assert path.read_text("utf-8") == reports.render(evidence(), reports.suffixes()[suffix], lang="zh", **options)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_file_that_cannot_be_made_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        reports.save(evidence(), path)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"out.csv": "old"}


def test_evidence_shows_itself(tmp_path: Path) -> None:
    made = evidence()
    assert str(made).startswith("normwise study made-up   1 confirmed · 1 refuted · 1 depends on · 1 not concluded\n")
    assert made.to_html() == made._repr_html_() == reports.render(made, "html")
    made.save(tmp_path / "x.json")
    assert (tmp_path / "x.json").read_text() == made.to_json()


# text


@pytest.mark.parametrize("width", [40, 80, 140])
@both_languages
def test_no_line_is_wider_than_the_terminal_and_no_number_is_broken(width: int, lang: str) -> None:
    page = reports.render(evidence(), "text", width=width, color=False, lang=lang)
    assert max(map(cell_len, page.splitlines())) <= width
    assert re.search(r"^  post +0\.0001 +1\.135$", page, re.MULTILINE)
    assert re.search(r"^  post +0\.01 +inf$", page, re.MULTILINE)


def test_charts_are_lines_of_blocks_with_their_ends() -> None:
    page = reports.render(evidence(), "text", width=100, color=False)
    assert re.search(
        r"^  pre, measured +▁▂█  1\.13 → 2\.12  \(1e-4 … 0\.01\)$|^  pre, measured +\S+  1\.1\d → 2\.1\d", page, re.M
    )
    assert re.search(r"^  told +\S+  1 → 2  \(theory, ", page, re.MULTILINE)
    assert re.search(r"^  post +\S+!  1\.1\d → inf", page, re.MULTILINE)


def test_outcomes_are_coloured_on_a_terminal_only() -> None:
    colored = reports.render(evidence(), "text", color=True)
    for code, word in (("1;32", "confirmed"), ("1;31", "refuted"), ("1;33", "depends on")):
        assert f"\x1b[{code}m{word}  \x1b[0m" in colored
    assert "\x1b" not in reports.render(evidence(), "text", color=False)


# HTML


LOADING = ("src", "href", "srcset", "xlink:href", "action")


class Page(HTMLParser):
    """Tags that are closed in order, and what a page would load."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [
            f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "xlink:href", "action")
        ]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@both_languages
def test_the_page_is_well_formed_and_loads_nothing(lang: str) -> None:
    text = reports.render(evidence(), "html", lang=lang)
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert not {"script", "link", "img", "iframe", "i", "b1"} & set(page.tags)
    assert not re.search(r"url\(|@import", text)
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert page.tags.count("svg") == 1


def test_what_a_study_or_an_error_says_is_text() -> None:
    text = reports.render(evidence(), "html")
    for said in (
        "Both &lt;i&gt;are",
        "&lt;kill&gt;",
        "Z80 &lt;fast&gt;",
        "12 blocks | &lt;b&gt;",
        "<code>a &lt; b</code>",
    ):
        assert said in text


def test_every_figure_has_its_note_and_its_conditions() -> None:
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", reports.render(evidence(), "html"), re.DOTALL)
    assert len(captions) == 2
    for caption, note in zip(captions, ("12 blocks", "100 steps of Adam"), strict=True):
        assert note in caption
        assert "2 seeds · torch 2.14.1; 2.13.0 · 1 thread · Z80 &lt;fast&gt; · standard-library ab12ab12ab12" in caption


def test_claims_are_marked_by_their_outcome() -> None:
    text = reports.render(evidence(), "html")
    assert re.findall(r'nw-claim nw-(\w+)">\n<p><span class="nw-outcome">([\w ]+)<', text) == [
        ("good", "confirmed"), ("error", "refuted"), ("warning", "depends on"), ("plain", "not concluded"),
    ]  # fmt: skip


# rows for other programs


def test_csv_has_a_row_a_trial_with_scalars_as_columns_and_lists_as_json() -> None:
    rows = list(csv.DictReader(io.StringIO(reports.render(evidence(), "csv"))))
    assert len(rows) == 14
    assert list(rows[0])[:7] == ["study", "version", "kind", "rate", "seed", "tags", "state"]
    post = next(row for row in rows if row["kind"] == "post" and row["rate"] == "0.01" and row["seed"] == "1")
    assert (post["loss"], post["steps"], post["metric_rate"], post["state"]) == ("inf", "100", "0.005", "done")
    assert json.loads(post["curve"]) == ["inf", "nan", "-inf"]
    assert (post["trial_cpu_seconds"], post["condition_torch"], post["data_standard_library"]) == (
        "30.0",
        "2.13.0",
        DIGEST,
    )
    failed, left = rows[-2:]
    assert (failed["state"], failed["loss"], failed["error"]) == ("failed", "", "time limit of 3 s <kill>")
    assert (left["state"], left["trial_attempts"]) == ("open", "0")


def test_parquet_has_the_cells_of_the_csv_file_with_lists_as_lists(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(reports.save(evidence(), tmp_path / "x.parquet"))
    rows = list(csv.DictReader(io.StringIO(reports.render(evidence(), "csv"))))
    assert table.column_names == list(rows[0])
    assert str(table.schema.field("curve").type) == "list<element: double>"
    for theirs, ours in zip(table.to_pylist(), rows, strict=True):
        for name, value in theirs.items():
            if isinstance(value, list):
                assert same([float(x) if name == "curve" else x for x in json.loads(ours[name])], value)
            else:
                assert ours[name] == ("" if value is None else str(value)), name


def test_parquet_takes_columns_of_mixed_types(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = zip(["a", 1, None, [1, "b"]], [1, 2.5, None, 3], strict=True)
    rows = [studies.Row(params={"mixed": mixed, "number": number}, metrics={}) for mixed, number in columns]
    table = parquet.read_table(reports.save(evidence(rows=Rows(rows), unrun=()), tmp_path / "x.parquet"))
    assert table["mixed"].to_pylist() == ["a", "1", None, "[1, 'b']"]
    assert table["number"].to_pylist() == [1.0, 2.5, None, 3.0]


def test_parquet_without_its_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(StudyError, match=re.escape("pip install 'normwise[parquet]'")):
        reports.save(evidence(), tmp_path / "x.parquet")
    assert list(tmp_path.iterdir()) == []


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_json_is_strict_and_complete() -> None:
    made = strict(reports.render(evidence(), "json"))
    assert (made["schema"], made["study"], made["version"], made["finished"]) == (1, "made-up", 3, False)
    assert [each["outcome"] for each in made["verdicts"]] == list(Outcome)
    assert [each["kind"] for each in made["figures"]] == ["table", "chart"]
    assert made["figures"][1]["lines"][2]["y"][2] == "inf"
    assert (len(made["trials"]), len(made["unrun"])) == (12, 2)


# JSON lines, there and back


def test_what_was_written_as_json_lines_is_shown_again(tmp_path: Path, registered: Evidence) -> None:
    path = tmp_path / "x.jsonl"
    registered.save(path)
    for line in path.read_text().splitlines():
        strict(line)
    back = studies.show(path)
    assert (back.study, back.quick, back.seeds, back.data) == ("made-up", False, 2, registered.data)
    assert len(back.rows) == 12
    for ours, theirs in zip(registered.rows, back.rows, strict=True):
        for name in ours.__slots__:
            assert same(getattr(ours, name), getattr(theirs, name)), name
    assert back.unrun == registered.unrun
    assert back.verdicts == registered.verdicts
    assert reports.render(back, "csv") == reports.render(registered, "csv")


def test_a_record_read_back_has_the_key_of_its_trial(tmp_path: Path) -> None:
    made = evidence()
    made.save(tmp_path / "x.jsonl")
    _, records = read_jsonl(tmp_path / "x.jsonl")
    assert records[0].key == Trial("made-up", 3, made.rows[0].params).key


HEAD = '{"schema": 1, "study": "made-up", "version": 3, "data": {}, "quick": false, "seeds": 1}\n'


@pytest.mark.parametrize(("content", "why"), [
    (b"", "line 1: no export of a study (it is empty)"),
    (b"\xff\xfe\x00", "it is no text"),
    (b"a,b\n", "line 1: no export of a study (no JSON"),
    (b"[1]\n", "no object"),
    (b'{"schema": 2}\n', "its schema is 2, not 1"),
    (b'{"schema": 1}\n', "its study is None"),
    (HEAD.encode() + b'{"state": "done"}\n', "line 2: no export of a study (its params is None"),
    (HEAD.encode() + b'{"state": "done", "params": {"seed": 0}, "metrics": {"a": "text"}}\n', "is 'text'"),
    (HEAD.encode() + b'{"state": "done", "params": {"seed": 0}, "metrics": {"a": [[1]]}}\n', "is [[1]]"),
    (HEAD.encode() + b'{"state": "done", "params": {"seed": 0}, "metrics": [1]}\n', "its metrics is [1]"),
    (HEAD.encode() + b'{"state": "done", "params": {"seed": []}}\n', "its params have no seed"),
    (HEAD.encode() + b'{"state": "done", "params": {"seed": 0, "a": {}}}\n', "of the params, is {}"),
    (HEAD.replace('"made-up"', "[]").encode(), "its study is []"),
    (HEAD.encode() + b'{"metrics": ' + b"[" * 100_000, "line 2: no export of a study (no JSON: maximum recursion"),
    (HEAD.encode() + b"{", "line 2: no export of a study (no JSON"),
])  # fmt: skip
def test_a_file_that_is_no_export_is_refused_with_its_line(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(StudyError, match=re.escape(why)):
        read_jsonl(path)


def test_rows_that_a_study_does_not_write_break_no_report(tmp_path: Path, registered: Evidence) -> None:
    path = tmp_path / "x.JSONL"
    row = {
        "state": "done",
        "params": {"seed": 0, "kind": "\x1b[31m<b>", "rate": 1e-3, "=1+1": "=1+1"},
        "metrics": {"loss": [1]},
    }
    path.write_text(HEAD + json.dumps(row) + "\n\n")
    made = studies.show(path)
    assert [each.outcome for each in made.verdicts] == [Outcome.OPEN] * len(made.verdicts)
    assert "the rows are not those of the study (TypeError: float() argument" in made.verdicts[0].says
    for name in reports.names():
        for lang in ("en", "zh"):
            page = reports.render(made, name, lang=lang)
            assert "\x1b" not in page
            assert "[31m<b>" not in page or name != "html"
            assert ",=1+1" not in page


def test_a_figure_that_cannot_be_made_says_why() -> None:
    def broken(rows: Rows) -> Any:
        raise KeyError("loss")

    made = evidence()
    made.part.__dict__["FIGURES"] = (broken,)
    (figure,) = made.figures
    assert figure.title == "broken"
    assert "(KeyError: 'loss')" in reports.render(made, "text", width=100)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"gone\.jsonl: it cannot be read"):
        read_jsonl(tmp_path / "gone.jsonl")
