"""``normwise bench`` and what the start page says of the kernels. The benchmark itself is faked here."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normwise import benchmarks, kernels
from normwise.benchmarks import Result
from normwise.cli import commands, main
from tests.benchmarks.test_outputs import result


class Fake:
    """Stands in for the run, and remembers how it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.result: Result = result()

    def run(self, name: str, *, advance: Any, **options: Any) -> Result:
        self.calls.append((name, options))
        advance("RMSNorm", 1, 2)
        return self.result


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setattr(benchmarks, "run", fake.run)
    return fake


def test_without_a_name_it_is_norms(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    usual = {"quick": False, "threads": (), "shapes": (), "dtypes": (), "device": "cpu", "eager": False}
    assert fake.calls == [("norms", usual)]
    out, err = capsys.readouterr()
    assert out.startswith("RMSNorm and LayerNorm, plain and with a residual")
    assert err == ""


def test_options_are_passed_on(fake: Fake) -> None:
    options = ["--quick", "--eager", "--threads", "1", "--threads", "2", "--shape", "4x8", "--dtype", "bfloat16"]
    assert main(["bench", "small", *options]) == 0
    (call,) = fake.calls
    wanted = {"quick": True, "eager": True, "threads": (1, 2), "shapes": ("4x8",), "dtypes": ("bfloat16",)}
    assert call == ("small", {**wanted, "device": "cpu"})


def test_json_is_printed_and_files_are_written(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, data = tmp_path / "a.svg", tmp_path / "b.json"
    assert main(["bench", "--format", "json", "-o", str(svg), "-o", str(data)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(data.read_text())
    assert svg.read_text().startswith("<svg")
    assert err.splitlines() == [f"wrote {svg}", f"wrote {data}"]


def test_an_interrupt_prints_what_is_there_writes_nothing_and_exits_2(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.result = replace(fake.result, finished=False)
    assert main(["bench", "-o", str(tmp_path / "a.json")]) == 2
    out, err = capsys.readouterr()
    assert "torch.nn" in out
    assert err == "normwise: interrupted, what was measured until then is above; nothing was written\n"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_before_the_first_figure_concludes_nothing(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.result = replace(fake.result, finished=False, rows=())
    assert main(["bench"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", "normwise: interrupted, nothing was concluded")


BAD = [
    (["norm"], "no benchmark is called 'norm': did you mean 'norms'?"),
    (["batchnorm"], "no benchmark is called 'batchnorm': did you mean 'batch-norm'?"),
    (["?"], "no benchmark is called '?': choose from norms, batch-norm, conversions, llama, small"),
    (["--threads", "two"], "'two' is not a valid integer"),
    (["--threads", "0"], "--threads takes 1 to"),
    (["--shape", "8"], "--shape takes ROWSxWIDTH such as 4096x1024 here, given '8'"),
    (["batch-norm", "--shape", "8x8"], "--shape takes NxCxHxW such as 32x64x56x56 here, given '8x8'"),
    (["--dtype", "int8"], "'int8' is not one of"),
    (["--device", "no-such"], "no device 'no-such' here"),
    (["--format", "pdf"], "no format is called 'pdf': choose from text, json, svg"),
    (["-o", "figures.html"], "figures.html names no report format: let it end in .json, .svg, .txt"),
    (["-o", "nowhere/figures.svg"], "create nowhere first"),
    (["norms", "small"], "Got unexpected extra argument"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("normwise: ")
    assert message in err
    assert err.count("normwise: ") == 1
    assert "bug in normwise" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_runs(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert main(["bench", "-o", str(tmp_path / "a.svg")]) == 2
    assert "cannot be written to: choose another" in capsys.readouterr().err
    assert fake.calls == []


def test_the_help_lists_every_benchmark_and_marks_the_default() -> None:
    text = inspect.cleandoc(commands.commands["bench"].help or "")
    listed = re.findall(r"^  (\S+) +\S.*$", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(benchmarks.names())
    assert re.search(rf"^  {benchmarks.DEFAULT} .*\(default\)$", text, flags=re.MULTILINE)


# -- which kernel runs here ------------------------------------------------------------------------

KERNELS = {"cpu": "no C++ compiler was found when it was installed", "triton": "no CUDA device", "eager": None}
SAID = (
    "kernels: eager runs here; cpu does not: no C++ compiler was found when it was installed; "
    "triton does not: no CUDA device"
)


@pytest.mark.parametrize("arguments", [[], ["--version"]], ids=["start page", "version"])
def test_the_start_page_and_the_version_say_which_kernel_runs_and_why_not_the_others(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "backends", lambda: KERNELS)
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].strip() == SAID
    assert err == ""


def test_the_version_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"normwise \d+\.\d+\.\d+\S*", capsys.readouterr().out.splitlines()[0])
