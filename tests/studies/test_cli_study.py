"""``normwise study``: what it passes on, what it prints, how it exits. The runs are faked, but for one."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normwise import studies
from normwise.cli import main
from normwise.errors import StudyError
from normwise.studies import Row, Rows, _runner, reports
from normwise.studies._evidence import Evidence, Unrun
from tests.studies import toy

EVIDENCE = Evidence(
    study="toy", part=toy, rows=Rows([Row(params={"at": 0, "seed": 0}, metrics={"value": 1.0})]), data={}
)


class Fake:
    """Stands in for the runner, and remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []
        self.evidence = EVIDENCE
        self.failure: BaseException | None = None

    def run(self, name: str, *, advance: Any, told: Any, **options: Any) -> Evidence:
        return self._called("run", name, told, options)

    def resume(self, path: Path, *, advance: Any, told: Any, **options: Any) -> Evidence:
        return self._called("resume", path, told, options)

    def show(self, path: Path) -> Evidence:
        return self._called("show", path, lambda line: None, {})

    def _called(self, how: str, what: Any, told: Any, options: dict[str, Any]) -> Evidence:
        self.calls.append((how, what, options))
        told("4 trials, about 1 minute")
        if self.failure is not None:
            raise self.failure
        return self.evidence


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    for name in ("run", "resume", "show"):
        monkeypatch.setattr(_runner, name, getattr(fake, name))
    return fake


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(studies, "_STUDIES", {"toy": toy})
    monkeypatch.chdir(tmp_path)


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one message of a command that could not run."""
    assert main(["study", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("normwise: ") == 1
    assert "bug in normwise" not in err
    return err.partition("normwise: ")[2].strip()


# -- what is passed on -----------------------------------------------------------------------------


def test_without_options_the_choice_is_the_librarys(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "toy"]) == 0
    assert fake.calls == [("run", "toy", {})]
    out, err = capsys.readouterr()
    assert "normwise study toy" in out
    assert err == "4 trials, about 1 minute\n"


def test_options_are_passed_on(fake: Fake) -> None:
    how = ["--engine", "dask://h:1", "--workers", "3", "--retries", "2", "--time-limit", "60", "--memory-limit", "2GB"]
    asked = ["--quick", "--seeds", "2", "--ledger", "a.sqlite"]
    passed = {"engine": "dask://h:1", "workers": 3, "retries": 2, "time_limit": 60.0, "memory_limit": 2 * 10**9}
    assert main(["study", "toy", *asked, *how]) == 0
    assert main(["study", "resume", "a.sqlite", *how]) == 0
    assert main(["study", "show", "a.sqlite"]) == 0
    assert fake.calls == [
        ("run", "toy", {"quick": True, "seeds": 2, "ledger": Path("a.sqlite"), **passed}),
        ("resume", Path("a.sqlite"), passed),
        ("show", Path("a.sqlite"), {}),
    ]


def test_no_retries_are_no_retries(fake: Fake) -> None:
    assert main(["study", "toy", "--retries", "0"]) == 0
    assert fake.calls == [("run", "toy", {"retries": 0})]


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("1.5GiB", 3 * 2**29), ("512 mb", 512 * 10**6), ("100kb", 10**5)]
)
def test_amounts_of_memory_have_their_units(fake: Fake, text: str, size: int) -> None:
    assert main(["study", "toy", "--memory-limit", text]) == 0
    assert fake.calls[0][2] == {"memory_limit": size}


# -- what is printed and written -------------------------------------------------------------------


def test_the_list_has_titles_and_costs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "seconds", lambda params: 60.0)
    assert main(["study"]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["study", "quick:", "trials", "CPU-minutes", "full:", "trials", "CPU-minutes"]
    assert row.split(maxsplit=5)[:5] == ["toy", "2", "2.1", "8", "8.4"]  # with 3 s for each process
    assert row.endswith((toy.__doc__ or "").strip())


def test_the_list_speaks_json_and_chinese(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "ZH", "没有开销的研究")
    monkeypatch.setattr(toy, "seconds", lambda params: 60.0)
    assert main(["study", "--lang", "zh", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    costs = {"quick": {"trials": 2, "cpu_minutes": 2.1}, "full": {"trials": 8, "cpu_minutes": 8.4}}
    assert row == {"name": "toy", "title": "没有开销的研究", **costs}


@pytest.mark.parametrize("format", ["json", "html", "csv", "jsonl"])
def test_formats_are_printed_and_files_are_written(
    format: str, fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"a.{format}"
    assert main(["study", "toy", "--format", format, "-o", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == path.read_text().strip() == reports.render(EVIDENCE, format).strip()
    assert err.splitlines()[-1] == f"wrote {path}"


def test_trials_without_a_result_are_told_after_the_table_with_the_line_that_runs_them(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = (Unrun(params={"at": 1, "seed": 0}, attempts=2, error="killed by SIGKILL\ntrace"), Unrun(params={"at": 2}))
    fake.evidence = replace(EVIDENCE, unrun=lost, ledger=Path("my studies/toy.sqlite"))
    assert main(["study", "toy"]) == 2
    out, err = capsys.readouterr()
    assert "normwise study toy" in out
    (message,) = err.splitlines()[1:]
    assert message == (
        "normwise: 2 of 3 trials have no result, 1 of them after an error; the first (at 1, seed 0): killed by "
        "SIGKILL; run them with: normwise study resume 'my studies/toy.sqlite'"
    )


def test_the_line_that_runs_them_can_be_pasted_whatever_the_ledger_is_called(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.evidence = replace(EVIDENCE, unrun=(Unrun(params={"at": 1}),), ledger=Path("-my 层's.sqlite"))
    assert main(["study", "toy"]) == 2
    line = capsys.readouterr().err.rpartition("run them with: normwise ")[2]
    assert main(shlex.split(line)) == 2
    assert fake.calls[1] == ("resume", Path("-my 层's.sqlite"), {})


def test_colour_is_for_a_terminal_at_standard_output_not_for_one_at_standard_error(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["study", "toy", "--retries", "0"])
    assert "\x1b" not in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_named_with_what_to_do(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fake.evidence = replace(EVIDENCE, ledger=Path("my toy.sqlite"))
    monkeypatch.setattr("normwise.studies.reports.replace", full)
    assert main(["study", "toy", "-o", "a.html"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        "normwise: a.html cannot be written (No space left on device); "
        "write it elsewhere: normwise study show 'my toy.sqlite' -o FILE"
    ]


# -- what is refused, before anything runs ---------------------------------------------------------

BAD = [
    (["toi"], "no study is called 'toi': did you mean 'toy'?"),
    (["?"], "no study is called '?': choose from toy"),
    (["toy", "--seeds", "0"], "0 is not in the range x>=1"),
    (["toy", "--seeds", "two"], "'two' is not a valid integer"),
    (["toy", "--workers", "0"], "0 is not in the range"),
    (["toy", "--retries", "-1"], "-1 is not in the range"),
    (["toy", "--time-limit", "0"], "0.0 is not in the range"),
    (["toy", "--memory-limit", "2"], "'2' is no amount of memory: give one such as 2GB"),
    (["toy", "--memory-limit", "0GB"], "'0GB' is no amount of memory"),
    (["toy", "--memory-limit", "9" * 400 + "GB"], "is no amount of memory"),
    (["toy", "--seeds", "1001"], "a study takes 1000 seeds at most, given 1001"),
    (["toy", "--ledger", "a.jsonl", "-o", "a.jsonl"], "a.jsonl names a report, not a ledger: let it end in .sqlite"),
    (["toy", "--format", ""], "no format is called ''"),
    (["toy", "--format", "pdf"], "no format is called 'pdf': choose from csv, html"),
    (["--format", "csv"], "no format of the list is called 'csv': choose from text, json"),
    (["toy", "-o", "a.pdf"], "a.pdf names no report format: let it end in"),
    (["toy", "-o", "nowhere/a.html"], "create nowhere first"),
    (["toy", "--engine", "loca"], "no engine is called 'loca': did you mean local?"),
    (["toy", "--engine", "slurm://gpu"], "slurm://gpu is no form of Slurm"),
    (["resume"], "Give NAME, or resume LEDGER, or show LEDGER."),
    (["toy", "toy"], "Give NAME, or resume LEDGER, or show LEDGER."),
    (["resume", "none.sqlite"], "none.sqlite: there is no such ledger"),
    (["show", "none.sqlite"], "none.sqlite: there is no such ledger"),
    (["resume", "none.sqlite", "--seeds", "2"], "--seeds cannot be changed by resume"),
    (["show", "none.sqlite", "--workers", "2"], "--workers has no meaning with show"),
    (["--quick"], "--quick needs the NAME of a study"),
    (["-o", "a.html"], "-o needs the NAME of a study"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_runner, "execute", None)  # no trial can be run
    assert message in failed(capsys, *arguments)


@pytest.mark.parametrize(
    ("package", "arguments", "line"),
    [
        ("distributed", ["--engine", "dask://localhost:1"], "pip install 'normwise[dask]'"),
        ("submitit", ["--engine", "slurm"], "pip install 'normwise[slurm]'"),
        ("pyarrow", ["-o", "a.parquet"], "pip install 'normwise[parquet]'"),
    ],
)
def test_a_missing_package_is_said_before_anything_runs(
    package: str, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_runner, "execute", None)
    monkeypatch.setitem(sys.modules, package, None)
    assert failed(capsys, "toy", *arguments).endswith(line)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (StudyError("a.sqlite: the disk is full; make room and resume"), "a.sqlite: the disk is full"),
        (KeyboardInterrupt(), "interrupted, nothing was concluded"),
    ],
)
def test_what_stops_a_run_is_one_message(
    failure: BaseException, message: str, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.failure = failure
    assert message in failed(capsys, "toy")


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_runs(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written to: choose another" in failed(capsys, "toy", "-o", str(tmp_path / "a.html"))
    assert fake.calls == []


# -- the whole way ---------------------------------------------------------------------------------


def test_a_study_is_run_shown_and_resumed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert main(["study", "toy", "--quick", "-o", "a.jsonl"]) == 0
    first = capsys.readouterr()
    assert "2 trials" in first.err.splitlines()[0]
    ledger = Path("normwise-studies", "toy.sqlite")
    assert str(ledger) in first.out
    for arguments in (["show", str(ledger)], ["resume", str(ledger)], ["show", "a.jsonl"]):
        assert main(["study", *arguments]) == 0
        assert "normwise study toy" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["study", "--help"]])
def test_help_needs_no_torch_and_takes_less_than_a_second(arguments: list[str]) -> None:
    # The budget is 0.3 s; the bound is loose, and on the processor's time, because other tests share the cores.
    code = (
        "import sys; from normwise.cli import main; code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    before = os.times()
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.0
