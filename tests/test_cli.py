"""The command line: what it passes on, what it prints, how it exits. What it calls is faked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from normwise import checkup, rendering, targets
from normwise.checkup import Configuration, reports, rules
from normwise.checkup.finding import Severity
from normwise.cli import commands, main
from normwise.errors import ConversionRefused, NotKnown, TargetError, TraceError


@dataclass
class Judged:
    """What the command line asks of a report."""

    severity: Severity | None
    inputs: str
    target: str = "it"
    call: str = ""
    checkpoint_only: bool = False

    def worst(self) -> Severity | None:
        return self.severity


class Fakes:
    """Stands in for everything the command line calls, and remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.worst: Severity | None = None
        self.inputs = "given"
        self.failure: BaseException | None = None
        self.report: Any = None
        self.during: Callable[[], None] = lambda: None

    def load(self, text: str, **options: Any) -> str:
        self.calls.append(("load", (text, options)))
        return f"loaded {text}"

    def check(self, target: Any, **options: Any) -> Any:
        self.calls.append(("check", (target, options)))
        self.during()
        if self.failure is not None:
            raise self.failure
        return Judged(self.worst, self.inputs)

    def map(self, target: Any) -> Any:
        self.calls.append(("map", (target, {})))
        return Judged(None, self.inputs)

    def render(self, report: Any, format: str, **options: Any) -> str:
        self.calls.append(("render", (format, options)))
        self.report = report
        return f"a report as {format}"

    def save(self, report: Any, path: Path, **options: Any) -> Path:
        self.calls.append(("save", (path, options)))
        return path

    def of(self, name: str) -> list[Any]:
        return [details for each, details in self.calls if each == name]


def rule(code: str, name: str, page: str, chinese: str) -> tuple[str, ModuleType]:
    part = ModuleType(f"normwise.checkup.rules.{name}", page)
    part.__file__ = f"rules/{name}.py"
    vars(part).update(CODE=code, SEVERITY=Severity.WARNING, ZH=chinese)
    return name.replace("_", "-"), part


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes()
    pages = [
        rule("PLC001", "missing_final_norm", "A stack without a last norm.\n\n## What it finds\nThat.", "缺归一化。"),
        rule("NUM001", "vanishing_eps", "An eps that vanishes.\n\n## What it finds\nThis.", "消失的 ε。"),
    ]
    monkeypatch.setattr(targets, "load", fakes.load, raising=False)
    monkeypatch.setattr(checkup, "check", fakes.check, raising=False)
    monkeypatch.setattr(checkup, "map", fakes.map, raising=False)
    monkeypatch.setattr(reports, "render", fakes.render, raising=False)
    monkeypatch.setattr(reports, "save", fakes.save, raising=False)
    monkeypatch.setattr(reports, "names", lambda: ("html", "json", "text"), raising=False)
    suffixes = {".html": "html", ".json": "json", ".txt": "text"}
    monkeypatch.setattr(reports, "suffixes", lambda: suffixes, raising=False)
    monkeypatch.setattr(rules, "all_rules", lambda: dict(pages), raising=False)
    monkeypatch.setattr(rendering, "clean", lambda text: text.replace("\x1b", "?"), raising=False)
    return fakes


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one message of a command that could not run."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("normwise: ")
    assert "Traceback" not in err
    assert err.count("normwise: ") == 1
    return err.removeprefix("normwise: ").strip()


# What is passed on


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["hf:bert", "--select", "PLC", "--ignore", "PLC002", "--lang", "zh"], "normwise check hf:bert"),
        (["my model.py:build", "--inputs", "2x8:long"], "normwise check 'my model.py:build' --inputs 2x8:long"),
        (["m.py:f", "--dtype", "float16", "--effort", "full"], "normwise check m.py:f --dtype float16 --effort full"),
        ([], "normwise check"),
    ],
)
def test_a_report_knows_the_line_that_makes_it_again(fakes: Fakes, arguments: list[str], line: str) -> None:
    assert main(["check", *arguments]) == 0
    assert fakes.report.call == line


def test_check_passes_its_options_on(fakes: Fakes) -> None:
    options = ["--inputs", "1x8", "--dtype", "bfloat16", "--device", "cpu", "--effort", "read"]
    assert (
        main(["check", "hf:bert", *options, "--select", "PLC,NUM001", "--select", "dead-weight", "--ignore", "PLC002"])
        == 0
    )
    assert fakes.of("load") == [("hf:bert", {"inputs": "1x8", "dtype": "bfloat16", "device": "cpu"})]
    passed = {"select": ("PLC", "NUM001", "dead-weight"), "ignore": ("PLC002",), "effort": "read"}
    assert fakes.of("check") == [("loaded hf:bert", {**passed, "configuration": Configuration()})]


def test_check_without_options_leaves_the_choice_to_the_library(fakes: Fakes) -> None:
    assert main(["check", "hf:bert"]) == 0
    assert fakes.of("load") == [("hf:bert", {"inputs": None, "dtype": None, "device": None})]
    passed = {"select": None, "ignore": None, "effort": "normal", "configuration": Configuration()}
    assert fakes.of("check") == [("loaded hf:bert", passed)]
    assert fakes.of("render") == [("text", {"lang": "en", "full": False})]


def test_check_without_target_takes_the_demo_and_says_so(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    assert fakes.of("load")[0][0] == ""
    assert "built-in demo" in capsys.readouterr().err


def test_map_judges_nothing_and_never_fails_for_findings(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["map", "hf:bert", "--full"]) == 0
    assert [name for name, _ in fakes.calls] == ["load", "map", "render"]
    assert capsys.readouterr().out == "a report as text\n"


# Exit codes


def test_a_model_that_was_not_run_is_not_clean(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.inputs = "none"
    assert main(["check", "model.py:build"]) == 2
    assert main(["map", "model.py:build"]) == 2
    assert "the model was not run" in capsys.readouterr().err
    fakes.worst = Severity.ERROR
    assert main(["check", "model.py:build"]) == 1


@pytest.mark.parametrize(
    ("worst", "fail_on", "code"),
    [
        (None, "info", 0),
        ("error", None, 1),
        ("warning", None, 0),
        ("warning", "warning", 1),
        ("error", "warning", 1),
        ("info", "warning", 0),
        ("info", "info", 1),
        ("error", "never", 0),
    ],
)
def test_the_exit_code_follows_the_worst_finding(
    fakes: Fakes, worst: str | None, fail_on: str | None, code: int
) -> None:
    fakes.worst = Severity(worst) if worst else None
    assert main(["check", "hf:bert", *(["--fail-on", fail_on] if fail_on else [])]) == code


# Output


def test_files_come_beside_the_table_and_after_it(
    fakes: Fakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, data = tmp_path / "a.html", tmp_path / "b.json"
    assert main(["check", "hf:bert", "-o", str(html), "-o", str(data), "--lang", "zh"]) == 0
    assert [name for name, _ in fakes.calls] == ["load", "check", "render", "save", "save"]
    assert fakes.of("save") == [(path, {"lang": "zh", "full": False}) for path in (html, data)]
    out, err = capsys.readouterr()
    assert out == "a report as text\n"
    assert err.splitlines() == [f"wrote {html}", f"wrote {data}"]


def test_format_chooses_what_is_printed(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "hf:bert", "--format", "json"]) == 0
    assert capsys.readouterr().out == "a report as json\n"


def test_what_the_target_prints_stays_out_of_the_report(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.during = lambda: print("loading my weights")
    assert main(["check", "m.py:build", "--format", "json"]) == 0
    assert capsys.readouterr() == ("a report as json\n", "loading my weights\n")


def test_warnings_of_the_target_are_not_shown(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.during = lambda: warnings.warn("deprecated in torch 9", FutureWarning, stacklevel=1)
    assert main(["check", "m.py:build"]) == 0
    assert capsys.readouterr().err == ""


def test_an_unknown_format_is_refused_before_anything_is_loaded(
    fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no format is called 'pdf': choose from html, json, text" in failed(capsys, "check", "x", "--format", "pdf")
    assert fakes.calls == []


@pytest.mark.parametrize("name", ["model.py", "weights.safetensors", "report", "report.html.gz"])
def test_a_file_that_is_no_report_is_refused_before_anything_is_loaded(
    fakes: Fakes, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    path.write_text("precious")
    assert "names no report format: let it end in .html, .json, .txt" in failed(capsys, "check", "x", "-o", str(path))
    assert fakes.calls == []
    assert path.read_text() == "precious"


def test_a_missing_folder_is_refused_before_anything_is_loaded(
    fakes: Fakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" / "a.html"
    assert f"create {path.parent} first" in failed(capsys, "check", "x", "-o", str(path))
    assert fakes.calls == []
    assert not path.parent.exists()


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.html").mkdir()
    assert "is a directory" in failed(capsys, "check", "x", "-o", str(tmp_path / "a.html"))


def test_a_write_that_fails_still_shows_the_report_and_exits_2(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_disk(report: Any, path: Path, **options: Any) -> Path:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(reports, "save", full_disk)
    assert main(["check", "x", "-o", str(tmp_path / "a.html")]) == 2
    out, err = capsys.readouterr()
    assert out == "a report as text\n"
    assert err == f"normwise: {tmp_path / 'a.html'}: No space left on device\n"


# Failures


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (TargetError("no such file: m.py"), "no such file: m.py"),
        (TraceError("the model raised in h.0"), "the model raised in h.0"),
        (NotKnown("needs a graph"), "needs a graph"),
        (ConversionRefused(["shared", "tied"]), "shared; tied"),
        (ValueError("unknown rule 'XYZ'"), "unknown rule 'XYZ'"),
        (TypeError("inputs must be a tuple"), "inputs must be a tuple"),
        (PermissionError(13, "Permission denied", "a.html"), "a.html: Permission denied"),
        (OSError("the disk is gone"), "the disk is gone"),
        (SystemExit(0), "the code of the target ended the program with exit status 0: remove its call of exit()"),
    ],
)
def test_a_failure_is_one_message(
    fakes: Fakes, capsys: pytest.CaptureFixture[str], failure: BaseException, message: str
) -> None:
    fakes.failure = failure
    assert failed(capsys, "check", "x") == message


def test_an_interrupt_concludes_nothing(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.failure = KeyboardInterrupt()
    assert main(["check", "x"]) == 2
    assert capsys.readouterr().err.strip() == "normwise: interrupted, nothing was concluded"


def test_what_ends_early_is_no_interrupt(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.failure = EOFError("marshal data too short")
    assert main(["check", "x"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("normwise: something ended before it was read whole (EOFError: marshal data too short)")


@pytest.mark.parametrize("failure", [KeyError("axes"), AssertionError(), ValueError(), RecursionError("too deep")])
def test_what_nobody_expected_is_called_a_bug(
    fakes: Fakes, capsys: pytest.CaptureFixture[str], failure: Exception
) -> None:
    fakes.failure = failure
    message = failed(capsys, "check", "x")
    assert message.startswith(f"this is a bug in normwise ({type(failure).__name__}")
    assert "run again with --debug" in message


def test_debug_shows_the_traceback_and_still_exits_2(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.failure = TargetError("no such file: m.py")
    assert main(["check", "x", "--debug"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last)")
    assert err.endswith("normwise: no such file: m.py\n")


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_messages_are_cleaned_of_control_characters(
    fakes: Fakes, capsys: pytest.CaptureFixture[str], debug: list[str]
) -> None:
    fakes.failure = TargetError("module \x1b]0;owned\x07 raised")
    assert main(["check", "x", *debug]) == 2
    err = capsys.readouterr().err
    assert "module ?]0;owned" in err
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--frobnicate"], "No such option '--frobnicate'"),
        (["frob"], "No such command 'frob'"),
        (["map"], "Missing argument 'TARGET'"),
        (["explain"], "Missing argument 'CODE|NAME'"),
        (["check", "a", "b"], "Got unexpected extra argument"),
        (["check", "a", "--fail-on", "sometimes"], "'sometimes' is not one of"),
        (["check", "a", "--dtype", "int8"], "'int8' is not one of"),
        (["check", "a", "--effort"], "requires an argument"),
    ],
)
def test_a_wrong_command_line_is_one_message_with_the_next_step(
    fakes: Fakes, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    said = failed(capsys, *arguments)
    assert message in said
    assert " --help`)" in said
    assert fakes.calls == []


# Rules


def test_rules_are_a_table_in_the_order_of_their_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "NUM001  vanishing-eps       warning  An eps that vanishes.",
        "PLC001  missing-final-norm  warning  A stack without a last norm.",
    ]


def test_rules_and_pages_are_chinese_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "--lang", "zh"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "NUM001  vanishing-eps       warning  消失的 ε。",
        "PLC001  missing-final-norm  warning  缺归一化。",
    ]
    assert main(["explain", "PLC001", "--lang", "zh"]) == 0
    assert capsys.readouterr().out.startswith("PLC001 missing-final-norm (warning)\n\n缺归一化。\n")


def test_rules_speak_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {
        "code": "NUM001",
        "name": "vanishing-eps",
        "severity": "warning",
        "title": "An eps that vanishes.",
    }


@pytest.mark.parametrize("word", ["PLC001", "plc001", "missing-final-norm", "missing_final_norm"])
def test_explain_takes_codes_and_names_and_shows_page_and_source(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main(["explain", word]) == 0
    out = capsys.readouterr().out
    assert out.startswith("PLC001 missing-final-norm (warning)\n\nA stack without a last norm.\n\n## What it finds")
    assert out.endswith("source: rules/missing_final_norm.py\n")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("PLC01", "did you mean 'PLC001'?"),
        ("vanishing-epsilon", "did you mean 'vanishing-eps'?"),
        ("?", "`normwise rules`"),
    ],
)
def test_explain_helps_with_a_word_it_does_not_know(capsys: pytest.CaptureFixture[str], word: str, hint: str) -> None:
    message = failed(capsys, "explain", word)
    assert f"no rule is called {word!r}" in message
    assert hint in message


# The program


def test_no_argument_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_commands_are_listed_in_the_order_of_use() -> None:
    assert list(commands.commands) == ["check", "map", "rules", "explain", "convert", "study", "bench"]


def test_help_takes_less_than_a_second() -> None:
    # The budget is 0.3 s; the bound is loose, and the best of three, because other tests share the cores.
    def once() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "normwise", "--help"], check=True, capture_output=True)
        return time.perf_counter() - start

    assert min(once() for _ in range(3)) < 1.0


def test_python_m_normwise_is_the_command_line() -> None:
    result = subprocess.run([sys.executable, "-m", "normwise", "frob"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("normwise: No such command 'frob'")


def test_a_reader_that_leaves_early_is_no_failure() -> None:
    code = "import sys; from normwise.cli._output import say; say('x' * 10**6); say('y'); sys.exit(1)"
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_terminal_without_the_character_shows_its_escape() -> None:
    code = "from normwise.cli import _output as o; o.never_fail_to_encode(); o.say('eps \\u03b5')"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=False)
    assert result.stdout.split() == [b"eps", b"\\u03b5"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_a_full_standard_output_is_one_clear_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "normwise", "rules"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "normwise: standard output cannot be written (No space left on device): send it elsewhere\n"


def test_a_closed_standard_output_is_no_error() -> None:
    stored = Path(__file__).parents[1] / "docs/studies/data/frozen-gains.jsonl"
    command = f'exec "{sys.executable}" -m normwise study show "{stored}" >&-'
    assert subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True).stderr == ""
