"""The examples run as they stand and show what they say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def run_example(name: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        assert list(tmp_path.iterdir()) == []
        return capsys.readouterr().out

    return run_example


def test_every_example_has_a_test_here() -> None:
    here = Path(__file__).read_text()
    assert {path.name for path in EXAMPLES.glob("*.py") if f'run("{path.name}"' not in here} == set()


def test_a_model_with_hand_written_norms_is_checked_with_its_optimizer(run) -> None:
    lines = run("check_your_model.py").splitlines()
    assert [line.split() for line in lines if line.endswith("verified")] == [
        *([str(i), "rms", "eps", "1e-06", "pre", "verified"] for i in range(1, 5)),
        ["5", "layer", "eps", "1e-05", "final", "verified"],
    ]
    assert [line.split()[:2] for line in lines if line.startswith("PAR001")] == [["PAR001", "warning:"]]
    skipped = [line for line in lines if " not checked: " in line]
    assert all(": needs " in line for line in skipped if line.startswith("CKP"))
    assert not any(line.startswith("PAR001") for line in skipped)


def test_the_missing_final_norm_is_found_and_gone_with_the_fix(run) -> None:
    written, finding, fix, fixed = run("find_missing_final_norm.py").splitlines()
    assert written == "as written: pre-norm, 4 blocks, final norm: False"
    assert finding.split()[:2] == ["PLC001", "head"]
    assert fix.startswith("  fix: ")
    assert fixed == "with norm=nn.LayerNorm(64): pre-norm, 4 blocks, final norm: True"


def test_norms_of_one_name_are_told_apart_by_their_figures(run) -> None:
    figures = {line.split()[0]: line.split()[1:] for line in run("norms_of_one_name.py").splitlines()}
    trained, in_llama = (float(each) for each in figures["weight_offset"])
    assert trained > 9 * in_llama  # a gain of 1.0 read as 0.1
    inside, outside = (float(each) for each in figures["eps_inside"])
    assert inside == pytest.approx(1e-3 / (1e-6 + 1e-5) ** 0.5, rel=0.02)
    assert outside == pytest.approx(1e-3 / (1e-3 + 1e-5), rel=0.01)
    assert float(figures["biased"][0]) == pytest.approx(0.75**0.5, abs=1e-3)
    assert figures["out_dtype"] == ["float32", "bfloat16"]
    assert figures["stats_dtype"] == ["0.00", "1.00"]


def test_every_model_that_goes_wrong_gets_the_cause_it_was_given(run) -> None:
    first = dict(line.split(": ")[:2] for line in run("find_the_cause.py").splitlines())
    assert {name: said.split()[0] for name, said in first.items()} == {
        "silent_zeros": "NUM001",
        "nan_gradient": "NUM004",
        "overflowing_stream": "NUM009",
        "deep_post_norm": "PLC005",
        "post_norm_checkpoint": "CKP001",
        "growing_stream": "PLC001",
    }


def test_two_processes_normalize_as_one(run) -> None:
    apart = {line.partition(":")[0]: float(line.split()[-2]) for line in run("sync_batch_norm.py").splitlines()}
    assert set(apart) == {"outputs", "input gradients", "running variance"}
    assert max(apart.values()) <= 1e-12


def test_the_architectures_are_told_apart(run) -> None:
    pytest.importorskip("transformers")
    rows = [line.split() for line in run("map_transformers.py").splitlines()]
    assert [(row[0], row[1], row[6]) for row in rows] == [
        ("bert", "post", "no"),
        ("llama", "pre", "yes"),
        ("olmo2", "res_post", "yes"),
        ("gemma2", "sandwich", "yes"),
    ]


def test_the_architectures_can_be_chosen(run) -> None:
    pytest.importorskip("transformers")
    assert run("map_transformers.py", "gpt2").split()[:2] == ["gpt2", "pre"]
