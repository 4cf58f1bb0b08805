"""``normwise convert``: what it writes and prints, and how it exits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normwise as nw
from normwise.cli import main
from normwise.targets.hf_build import quiet
from tests.conversions.folders import generated, hashes, saved

SHAPE = ("--inputs", "2x7:long")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("gpt2", tmp_path_factory.mktemp("command") / "model")


@pytest.fixture(scope="module")
def manifest(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("command") / "out"
    assert main(["convert", "rms-norm", f"hf:{source}", "-o", str(out), *SHAPE]) == 0
    return out


def failed(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert main(["convert", *arguments]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.out == ""
    return said.err


def test_a_folder_is_converted_proved_and_told(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = hashes(source), tmp_path / "out"
    assert main(["convert", "rms-norm", f"hf:{source}", "-o", str(out), *SHAPE]) == 0
    said = capsys.readouterr().out
    assert "transformer.h.{0,1}.ln_1" in said
    assert [line.split()[:2] for line in said.splitlines() if " passed " in line] == [
        [gate, "passed"] for gate in ("structure", "twin", "weights", "dtype", "reload")
    ]
    assert f"wrote {out}, format manifest" in said
    assert hashes(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert generated(nw.load(out)) is not None


def test_a_plan_is_printed_and_nothing_is_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "plan", "rms-norm", f"hf:{source}", *SHAPE]) == 0
    assert "LayerNorm -> RMSNorm" in capsys.readouterr().out
    assert main(["convert", "plan", "rms-norm", f"hf:{source}", *SHAPE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["conversion"] == "rms-norm"
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_every_conversion_that_changes_something_is_planned(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "plan", f"hf:{source}", *SHAPE, "--json"]) == 0
    names = [plan["conversion"] for plan in json.loads(capsys.readouterr().out)]
    assert {"rms-norm", "fold-affine"} <= set(names)
    assert "fold-batch-norm" not in names


def test_options_reach_the_conversion(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["convert", "plan", "rms-norm", f"hf:{source}", *SHAPE, "--json"]
    assert main([*command, "--fold-bias", "--consent", "hidden-states", "--option", "untie=true"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert (options["fold_bias"], options["untie"], options["consent"]) == (True, True, ["hidden-states"])


def test_the_same_function_verifies_and_another_does_not(
    source: Path, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "verify", f"hf:{source}", f"hf:{manifest}", *SHAPE]) == 0
    assert capsys.readouterr().out.startswith("the same: in float64 the outputs differ by ")
    assert main(["convert", "verify", f"hf:{source}", f"hf:{manifest}", *SHAPE, "--lang", "zh"]) == 0
    assert capsys.readouterr().out.startswith("相同：float64 下输出之差为")
    other = saved("gpt2", tmp_path / "other")
    from safetensors.torch import load_file, save_file

    tensors = load_file(other / "model.safetensors")
    tensors["transformer.ln_f.bias"] = tensors["transformer.ln_f.bias"] + torch.full((16,), 1e-4)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert main(["convert", "verify", f"hf:{source}", f"hf:{other}", *SHAPE]) == 1
    assert capsys.readouterr().out.startswith("NOT the same")


def test_what_was_converted_before_is_left_alone(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "rms-norm", f"hf:{manifest}", "-o", str(tmp_path / "out")]) == 0
    assert "was converted by rms-norm already: nothing was done" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_what_another_conversion_wrote_is_refused(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = failed(capsys, 1, "fold-affine", f"hf:{manifest}", "-o", str(tmp_path / "out"))
    assert "was written by rms-norm already; convert the original" in said


def test_without_verification_the_report_says_so(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["convert", "rms-norm", f"hf:{source}", "-o", str(out), "--no-verify", *SHAPE]) == 0
    assert "not verified" in capsys.readouterr().out
    assert json.loads((out / "normwise_report.json").read_text())["verified"] is False


def test_a_refusal_exits_with_1_and_every_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved("llama", tmp_path / "in")
    said = failed(capsys, 1, "rms-norm", f"hf:{source}", "-o", str(tmp_path / "out"), *SHAPE)
    assert said.startswith("normwise: refused, for 1 reason")
    assert main(["convert", "rms-norm", f"hf:{source}", "-o", str(tmp_path / "out"), "--json", *SHAPE]) == 1
    assert len(json.loads(capsys.readouterr().out)["refused"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_format_that_cannot_hold_it_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("rms-norm", f"hf:{source}", "-o", str(tmp_path / "out"), "--format", "stock", *SHAPE)
    assert "the formats manifest and code hold it" in failed(capsys, 1, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rms-norm", "{source}"), "Missing option '-o OUT'"),
        (("rms-norm",), "Give NAME TARGET, or plan [NAME] TARGET, or verify A B"),
        (("verify", "a"), "Give NAME TARGET, or plan [NAME] TARGET, or verify A B"),
        (("rms-nrm", "{source}", "-o", "{out}"), "did you mean 'rms-norm'?"),
        (("rms-norm", "hf:{full}/none", "-o", "{out}"), "there is no"),
        (("rms-norm", "{source}", "-o", "{inside}"), "lies inside the source"),
        (("rms-norm", "{source}", "-o", "{full}"), "is not empty"),
        (("rms-norm", "{source}", "-o", "{out}", "--option", "frob=1"), "has no option 'frob'"),
        (("rms-norm", "{source}", "-o", "{out}", "--option", "frob"), "not of the form key=value"),
        (("rms-norm", "{source}", "-o", "{out}", "--option", "weightless=no"), "it takes true or false"),
        (("verify", "{source}", "demo:healthy-resnet"), "does not take the inputs of"),
        (("rms-norm", "{source}", "-o", "{out}", "--format", "onnx"), "no format is called 'onnx'"),
        (("rms-norm", "{source}", "-o", "{out}", "--consent", "all"), "nothing to consent to is called 'all'"),
    ],
)
def test_a_wrong_call_exits_with_2_and_one_message(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("mine")
    places = {"source": f"hf:{source}", "out": tmp_path / "out", "inside": source / "x", "full": full}
    given = [argument.format(**places) for argument in arguments]
    said = failed(capsys, 2, *given, *SHAPE)
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert (full / "precious").read_text() == "mine"


def test_a_folder_without_weights_has_nothing_to_convert(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_bytes((source / "config.json").read_bytes())
    said = failed(capsys, 2, "rms-norm", f"hf:{tmp_path / 'in'}", "-o", str(tmp_path / "out"))
    assert "there are no weights here to convert" in said


def test_a_model_too_large_for_memory_is_proved_on_its_twin_and_streamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normwise.conversions.saving.running.free_memory", lambda: 1000)
    monkeypatch.setattr("normwise.targets.folder._LARGEST_RANDOM", 1000)
    source, out = saved("gpt_neox", tmp_path / "in"), tmp_path / "out"
    assert main(["convert", "rms-norm", f"hf:{source}", "-o", str(out), "--json", *SHAPE]) == 0
    report = json.loads(capsys.readouterr().out)
    passed = {gate["name"]: gate["passed"] for gate in report["proof"]["gates"]}
    assert passed == {"structure": True, "twin": True, "weights": None, "dtype": None, "reload": None}
    assert not report["verified"]
    assert main(["convert", "verify", f"hf:{source}", f"hf:{out}", *SHAPE]) == 0


def test_models_of_other_outputs_are_not_the_same(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers as tf

    config = tf.GPT2Config.from_pretrained(source)
    for name, change in (("wide", {"vocab_size": 99}), ("shallow", {"n_layer": 1})):
        with quiet():
            tf.GPT2LMHeadModel(tf.GPT2Config(**{**config.to_dict(), **change})).save_pretrained(tmp_path / name)
    assert main(["convert", "verify", f"hf:{source}", f"hf:{tmp_path / 'wide'}", *SHAPE, "--json"]) == 1
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["gap"] == "inf"
    said = failed(capsys, 1, "verify", f"hf:{source}", f"hf:{tmp_path / 'shallow'}", *SHAPE)
    assert f"hf:{source} alone returns cache.layers[1].keys" in said


def test_a_class_that_transformers_lacks_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Path(shutil.copytree(source, tmp_path / "in"))
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    said = failed(capsys, 2, "rms-norm", f"hf:{copied}", "-o", str(tmp_path / "out"), *SHAPE)
    assert "names the class NoSuchModel, which is no model of transformers" in said
    (copied / "config.json").write_text(json.dumps({**config, "n_positions": 48}))
    said = failed(capsys, 2, "rms-norm", f"hf:{copied}", "-o", str(tmp_path / "out"), *SHAPE)
    assert "transformer.wpe.weight is stored as (32, 16), and config.json makes it (48, 16)" in said


def test_a_model_without_numbers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\ndef build():\n    with torch.device('meta'):\n"
        "        return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), torch.randn(3, 4)\n"
    )
    said = failed(capsys, 1, "rms-norm", f"{tmp_path / 'mine.py'}:build", "-o", str(tmp_path / "out"))
    assert "holds no numbers to save: load its weights first" in said
    assert not (tmp_path / "out").exists()


def test_what_is_told_is_told_once_and_in_the_language_asked_for(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert = ["convert", "fold-affine", f"hf:{source}", *SHAPE]
    assert main([*convert, "-o", str(tmp_path / "out"), "--lang", "zh"]) == 0
    said = capsys.readouterr().out
    assert next(line.split()[:2] for line in said.splitlines() if " 通过 " in line) == ["structure", "通过"]
    assert f"已写入 {tmp_path / 'out'}，格式 stock" in said
    assert said.count("what hooks see behind these norms") == 1
    assert main(["convert", "plan", "fold-batch-norm", f"hf:{source}", *SHAPE, "--lang", "zh"]) == 1


def test_nothing_to_convert_is_said_in_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved("llama", tmp_path / "in")
    assert main(["convert", "plan", "rms-norm", f"hf:{source}", *SHAPE]) == 1
    assert "the model has no norm of this kind" in capsys.readouterr().out


def test_a_model_of_a_python_file_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def build():\n    torch.manual_seed(0)\n"
        "    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))\n"
        "    nn.init.normal_(model[1].weight)\n    nn.init.normal_(model[1].bias)\n"
        "    return model, torch.randn(3, 4)\n"
    )
    out = tmp_path / "out"
    assert main(["convert", "rms-norm", f"{tmp_path / 'mine.py'}:build", "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"]
    assert (out / "normwise.json").is_file()
    again = tmp_path / "again"
    assert main(["convert", "rms-norm", f"{tmp_path / 'mine.py'}:build", "-o", str(again), "--no-verify"]) == 0
    said = capsys.readouterr().out
    assert f"open it with normwise.load({str(again)!r}, model)" in said
    assert "reload     what was written was not loaded again" in said
    assert "nothing was saved" not in (again / "report.md").read_text()


def test_no_name_of_a_module_is_a_command_to_a_ci_runner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\ndef build():\n    model = nn.Sequential(nn.Linear(4, 8))\n"
        "    model.add_module('##[error]x', nn.LayerNorm(8))\n    model.add_module('::error::y', nn.Linear(8, 2))\n"
        "    return model, torch.randn(3, 4)\n"
    )
    target = f"{tmp_path / 'mine.py'}:build"
    for how in ([], ["--json"]):
        assert main(["convert", "plan", "rms-norm", target, *how]) == 0
        said = capsys.readouterr().out
        assert "error]x" in said
        assert re.findall(r"^\s*::\w|##\w*\[", said, flags=re.MULTILINE) == []


LARGE = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44,
    "num_attention_heads": 64, "vocab_size": 50432, "intermediate_size": 24576, "rotary_pct": 0.25,
    "tie_word_embeddings": False,
}  # fmt: skip
MEASURED = """
import re, sys
from pathlib import Path
from normwise.cli import main
assert main(["convert", "plan", "rms-norm", sys.argv[1], "--json"]) == 0
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1], file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_a_model_of_20_billion_parameters_is_planned_in_a_gigabyte(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    arguments = [sys.executable, "-c", MEASURED, f"hf:{tmp_path}"]
    found = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert len(json.loads(found.stdout)["changes"]) == 89
    assert int(found.stderr.splitlines()[-1]) < 1_000_000
