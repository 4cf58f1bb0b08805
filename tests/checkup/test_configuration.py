"""[tool.normwise]: what is read, what is refused and on which line, and where it is looked for."""

from __future__ import annotations

import re
import resource
import time
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import normwise as nw
from normwise.checkup import Configuration
from normwise.checkup.configuration import PerModuleIgnore, nearest, read
from normwise.checkup.suppression import Suppression
from normwise.cli import main
from normwise.errors import ConfigurationError
from normwise.testing import assert_clean

FULL = """
[tool.normwise]
select = ["PLC", "num001"]
ignore = ["missing-final-norm"]
fail-on = "warning"
baseline = "known.json"

[[tool.normwise.per-module-ignores]]
modules = ["*.q_norm", "visual.blocks.*.norm1"]
rules = ["AXS004"]
reason = "  our attention masks the padding itself  "
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "pyproject.toml"


def test_every_key_is_read(file: Path) -> None:
    file.write_text(FULL)
    ignored = PerModuleIgnore(
        modules=("*.q_norm", "visual.blocks.*.norm1"),
        rules=("AXS004",),
        reason="our attention masks the padding itself",
        where="pyproject.toml:8",
    )
    assert read(file) == Configuration(
        select=("PLC", "num001"),
        ignore=("missing-final-norm",),
        fail_on="warning",
        baseline=file.parent / "known.json",
        per_module_ignores=(ignored,),
        file=file,
        where="pyproject.toml:2",
    )


def test_an_empty_table_changes_nothing(file: Path) -> None:
    file.write_text("[tool.normwise]")
    assert replace(read(file), file=None, where=None) == Configuration()


ENTRY = '[[tool.normwise.per-module-ignores]]\nmodules = ["a"]\nrules = ["PLC001"]\nreason = "b"\n'

# text of the file, line that is named, what is said
BAD = {
    "unknown key": ('[tool.normwise]\nselct = ["PLC"]', 2, "no key 'selct' here: did you mean 'select'?"),
    "underscore": ("[tool.normwise]\n\nfail_on = 'error'", 3, "did you mean 'fail-on'?"),
    "strange key": ("[tool.normwise]\nqqq = 1", 2, "known are select, ignore, fail-on, baseline, per-module-ignores"),
    "unknown code": ('[tool.normwise]\nselect = [\n  "PLC001",\n  "PLC0001",\n]', 4, "did you mean 'PLC001'?"),
    "unknown name": ('[tool.normwise]\nignore = ["mising-final-norm"]', 2, "did you mean 'missing-final-norm'?"),
    "unknown family": ('[tool.normwise]\nignore = ["XYZ"]', 2, "no rule is called 'XYZ'"),
    "empty rule": ('[tool.normwise]\nignore = [""]', 2, "ignore holds an empty string"),
    "string for array": ('[tool.normwise]\nselect = "PLC"', 2, "select must be an array of strings"),
    "number in array": ('[tool.normwise]\nselect = ["PLC", 1]', 2, "must hold strings only, got an integer"),
    "threshold": ('[tool.normwise]\nfail-on = "errors"', 2, "must be one of error, warning, info, never, got 'errors'"),
    "boolean threshold": ("[tool.normwise]\nfail-on = true", 2, "fail-on must be a string, got a boolean"),
    "baseline": ("[tool.normwise]\nbaseline = 1.5", 2, "baseline must be a string, got a number"),
    "date": ("[tool.normwise]\nbaseline = 2026-01-01", 2, "baseline must be a string, got a date"),
    "empty baseline": ('[tool.normwise]\nbaseline = " "', 2, "baseline is empty"),
    "table of ignores": (
        '[tool.normwise.per-module-ignores]\n"*.q_norm" = ["AXS004"]', 1, "write [[tool.normwise.per-module-ignores]]"
    ),
    "array of strings": (
        '[tool.normwise]\nper-module-ignores = ["a"]', 2, "must be an array of tables, got an array"
    ),
    "no reason": (
        ENTRY + '\n[[tool.normwise.per-module-ignores]]\nmodules = ["a"]\nrules = ["PLC001"]', 6, "needs 'reason'"
    ),
    "empty reason": (ENTRY.replace('"b"', '""'), 4, "needs 'reason': why what they find is right there"),
    "blank reason": (ENTRY.replace('"b"', '" "'), 4, "reason is empty"),
    "reason of another type": (ENTRY.replace('"b"', '["b"]'), 4, "reason must be a string, got an array"),
    "no modules": (ENTRY.replace('["a"]', "[]"), 2, "needs 'modules'"),
    "no rules": (ENTRY.replace('rules = ["PLC001"]\n', ""), 1, "needs 'rules'"),
    "unknown rule of a module": (ENTRY.replace("PLC001", "PLC999"), 3, "no rule is called 'PLC999'"),
    "unknown key of a module": (ENTRY + 'codes = ["a"]', 5, "no key 'codes' here"),
    "no table": ("[tool]\nnormwise = 1", 2, "tool.normwise must be a table, got an integer"),
    "broken": ("[tool.normwise]\nselect = [\n  1\n  2\n]", 4, "no valid TOML"),
    "twice": ("[tool.normwise]\n[tool.normwise]", 2, "no valid TOML"),
    "cut short": ('[tool.normwise]\nselect = ["PLC"', 2, "no valid TOML"),
    "no value": ("[tool.normwise]\nselect =\n\n", 2, "no valid TOML"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_followed_is_refused_with_its_line(file: Path, name: str) -> None:
    text, line, said = BAD[name]
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        nearest()
    assert caught.value.where == f"pyproject.toml:{line}"
    assert said in caught.value.reason


@pytest.mark.parametrize("name", ["unknown code", "broken", "no reason", "string for array", "unknown key"])
def test_the_command_line_says_it_in_one_message(file: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    text, line, said = BAD[name]
    file.write_text(text)
    for arguments in (["check", "nowhere.py:f"], ["check", "nowhere.py:f", "--config", "pyproject.toml"]):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert re.fullmatch(rf"normwise: pyproject\.toml:{line}: [^\n]*{re.escape(said)}[^\n]*\n", err)
    assert main(["check", "nowhere.py:f", "--isolated"]) == 2
    assert "nowhere.py" in capsys.readouterr().err


HOSTILE = {
    "no utf-8": (b"[tool.normwise]\n\nx = '\xff'", ":3", "not UTF-8"),
    "utf-16": ("[tool.normwise]".encode("utf-16"), ":1", "not UTF-8"),
    "NUL": (b"[tool.normwise]\n\0", ":2", "no valid TOML"),
    "10 MB": (b"[tool.normwise]\n" + b"#" * 10_000_000, "", "larger than 256 KiB"),
    "nested arrays": (b"[tool.normwise]\nselect = " + b"[" * 100_000, "", "nested too deeply"),
    "nested tables": (b"[tool.normwise]\nselect = " + b"{a=" * 50_000, "", "nested too deeply"),
    "long key": (b"[tool.normwise]\n" + b"a." * 100_000 + b"a = 1", "", "key of more than 100 parts"),
    "escape": (b'[tool.normwise]\n"\\u001b[31m" = 1', ":2", "no key '\\x1b[31m' here"),
    "empty": (b"", "", "has no [tool.normwise] table"),
    "other table": (b"[tool.normwises]", "", "has no [tool.normwise] table"),
    "no tools": (b"tool = 1", "", "has no [tool.normwise] table"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_any_bytes_are_read_or_refused_in_no_time(file: Path, name: str) -> None:
    content, line, said = HOSTILE[name]
    file.write_bytes(content)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ConfigurationError) as caught:
        read("pyproject.toml")
    assert time.process_time() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024
    assert caught.value.where == f"pyproject.toml{line}"
    assert said in caught.value.reason


def test_a_folder_and_a_missing_file_are_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.mkdir()
    assert nearest() == Configuration()  # a folder of that name is no configuration
    for given_, said in (("pyproject.toml", "Is a directory"), ("other.toml", "No such file")):
        assert main(["check", "--config", given_]) == 2
        assert re.fullmatch(rf"normwise: {given_}: cannot be read \({said}[^\n]*\n", capsys.readouterr().err)


def test_a_whole_file_of_entries_is_read_in_no_time(file: Path) -> None:
    file.write_text(ENTRY * 2_800)
    started = time.process_time()
    ignored = read(file).per_module_ignores
    assert time.process_time() - started < 5  # about 1.1 s measured; a scan for each entry would take minutes
    assert ignored[-1].where == f"pyproject.toml:{4 * 2_799 + 1}"


# Where it is looked for


def test_the_nearest_file_with_the_table_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[tool.normwise]\nfail-on = 'info'")
    inner = file.parent / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[tool.ruff]  # normwise comes from above")
    monkeypatch.chdir(inner)
    assert nearest().fail_on == "info"
    (inner.parent / "pyproject.toml").write_text("[tool.normwise]\nfail-on = 'never'")
    assert nearest().fail_on == "never"
    assert nearest(file.parent).fail_on == "info"


def test_the_search_ends_at_the_root_of_a_repository(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[tool.normwise]\nfail-on = 'info'")
    inner = file.parent / "repository" / "src"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert nearest().fail_on == "info"
    (inner.parent / ".git").write_text("gitdir: elsewhere")  # a file in work trees
    assert nearest() == Configuration()


def test_a_broken_file_that_does_not_speak_of_normwise_is_nobodys_business(file: Path) -> None:
    file.write_bytes(b"[[[[ \xff")
    assert nearest() == Configuration()


# What it does


Decayed = tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]


class Net(nn.Module):
    """Two norms, one inside another module."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(8)
        self.inner = nn.Sequential(nn.LayerNorm(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_norm(x) + self.inner(x)


@pytest.fixture
def decayed() -> Decayed:
    model = Net()
    return model, torch.randn(4, 8), torch.optim.AdamW(model.parameters(), weight_decay=0.1)


@pytest.mark.parametrize(
    ("modules", "left", "quiet"),
    [
        ('["*"]', None, ("q_norm", "inner.0")),
        ('["q_norm", "*.0"]', None, ("q_norm", "inner.0")),
        ('["q*"]', ("inner.0",), ("q_norm",)),
        ('["inner"]', ("q_norm",), ("inner.0",)),
        ('["q"]', ("q_norm", "inner.0"), ()),
        ('["inner.[1-9]"]', ("q_norm", "inner.0"), ()),
    ],
)
def test_what_is_found_at_these_modules_is_quiet(
    file: Path,
    decayed: Decayed,
    modules: str,
    left: object,
    quiet: object,
) -> None:
    model, x, optimizer = decayed
    file.write_text(ENTRY.replace('["a"]', modules).replace("PLC001", "PAR001"))
    free = nw.check(model, x, optimizer=optimizer, select=["PAR001"])
    assert [f.paths for f in free.findings] == [("q_norm", "inner.0")]
    report = nw.check(model, x, optimizer=optimizer, select=["PAR001"], configuration=str(file))
    assert next((f.paths for f in report.findings), None) == left
    assert tuple(path for each in report.suppressed for path in each.finding.paths) == quiet
    assert {(s.by, s.where, s.reason) for s in report.suppressed} <= {("configuration", "pyproject.toml:1", "b")}
    assert {f.fingerprint for f in (*report.findings, *(s.finding for s in report.suppressed))} == {
        f.fingerprint for f in free.findings
    }
    assert len(report.unused) == (0 if quiet else 1)
    assert report.passed == ()


def test_python_reads_no_file_that_it_was_not_given(file: Path, decayed: Decayed) -> None:
    file.write_text("[tool.normwise]\nselect = ['PLC']")
    model, x, optimizer = decayed
    assert [f.code for f in nw.check(model, x, optimizer=optimizer, effort="read").findings] == ["PAR001"]
    report = nw.check(model, x, optimizer=optimizer, effort="read", configuration=read(file))
    assert {code[:3] for code in (*report.passed, *(n.code for n in report.not_checked))} == {"PLC"}
    report = nw.check(model, x, optimizer=optimizer, effort="read", configuration=read(file), select=["PAR001"])
    assert [f.code for f in report.findings] == ["PAR001"]


def test_assert_clean_follows_it(file: Path, decayed: Decayed) -> None:
    model, x, optimizer = decayed
    file.write_text("[tool.normwise]\nselect = ['PAR001']\nfail-on = 'warning'")
    with pytest.raises(
        AssertionError, match=r"normwise: 1 finding in Net\n  PAR001 decayed-norm-scale \(warning\) at q_"
    ):
        assert_clean(model, x, optimizer=optimizer)
    assert_clean(model, x, optimizer=optimizer, fail_on="error")
    assert_clean(model, x, optimizer=optimizer, configuration=False)
    assert_clean(model, x, optimizer=optimizer, ignore="PAR", select="PLC,PAR")
    with pytest.raises(ValueError, match="fail_on is one of error, warning, info, never, got 'errors'"):
        assert_clean(model, x, fail_on="errors")


# Patterns

PARTS = st.lists(st.sampled_from(["h", "0", "1", "12", "q_norm", "norm", "mlp"]), min_size=1, max_size=5)


@given(PARTS, PARTS, st.sampled_from(["", "#2"]))
def test_a_pattern_covers_what_it_matches_and_what_is_inside(module: list[str], inside: list[str], nth: str) -> None:
    covers = next(iter(ignoring(".".join(module)))).covers
    finding = nw.Finding(message="", fix="", code="PAR001")
    path = ".".join(module)
    assert covers(finding, path + nth)
    assert covers(finding, ".".join([*module, *inside]) + nth)
    assert not covers(finding, f"{path}x")
    assert not covers(finding, f"x.{path}")


@given(st.text("hn01.*?", max_size=8), st.lists(st.text("hn01", min_size=1, max_size=3), min_size=1, max_size=4))
def test_a_pattern_is_what_fnmatch_says_of_some_module_above(pattern: str, parts: list[str]) -> None:
    covers = next(iter(ignoring(pattern))).covers
    above = [".".join(parts[: n + 1]) for n in range(len(parts))]
    expected = any(fnmatchcase(module, pattern) for module in above)
    assert covers(nw.Finding(message="", fix="", code="PAR001"), ".".join(parts)) == expected


def test_a_pattern_of_many_stars_costs_no_time() -> None:
    covers = next(iter(ignoring("*a" * 40 + "*b"))).covers
    started = time.process_time()
    assert not covers(nw.Finding(message="", fix="", code="PAR001"), "a" * 20_000)
    assert time.process_time() - started < 2


def ignoring(pattern: str) -> list[Suppression]:
    return list(PerModuleIgnore(modules=(pattern,), rules=("PAR001",), reason="r").suppressions())
