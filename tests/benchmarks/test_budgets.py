"""``bench/budgets.py``: which ratio is held to which limit, and what is said of each."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from normwise import benchmarks
from normwise.benchmarks import ADD_CLONE, BACKWARD, BOTH, CLONE, COMPILED, FORWARD, OURS, TORCH, TRANSFORMERS
from tests.benchmarks.test_outputs import result, row


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the script."""
    monkeypatch.setattr(sys, "argv", ["budgets.py", "--quick", "--threads", "1"])
    return runpy.run_path(str(Path(__file__).parents[2] / "bench" / "budgets.py"))


def lines(budgets: dict[str, Any], *rows: Any, name: str = "norms") -> list[str]:
    return [str(promise) for promise in budgets["promised"](result(*rows, name=name))]


RMS = (
    row(CLONE, 1.0, copies=1.0),
    row(OURS, 1.25, copies=1.25),
    row(OURS, 2.6, what=BACKWARD, copies=2.6),
    row(OURS, 4.0, what=BOTH, saved=1.004),
    row(TORCH, 24.0, what=BOTH),
    row(COMPILED, None, what=BOTH, why="no compiler"),
)


def test_each_line_has_its_figure_its_limit_and_the_verdict(budgets: dict[str, Any]) -> None:
    assert [line.split()[:4] for line in lines(budgets, *RMS)] == [
        ["ok", "1.25", "<=", "1.3"],
        ["OVER", "2.6", "<=", "2.5"],
        ["ok", "1", "<=", "1.01"],
        ["ok", "6", ">=", "5"],
        ["OVER", "not", "measured", ">="],
    ]


def test_a_norm_with_a_residual_is_held_to_the_add_and_a_copy(budgets: dict[str, Any]) -> None:
    rows = [row(each, ms, layer="AddLayerNorm") for each, ms in ((CLONE, 1.0), (ADD_CLONE, 2.0), (OURS, 3.0))]
    (forward, kept) = lines(budgets, *rows)
    assert forward.startswith("OVER")
    assert "1.5   <= 1.3  AddLayerNorm [4, 8] float32, 1 thread: forward over torch.add and clone" in forward
    assert "not measured  <= 1.01" in kept


def test_layer_norm_may_not_be_slower_than_torchs(budgets: dict[str, Any]) -> None:
    rows = [row(OURS, 2.0, layer="LayerNorm", what=BOTH), row(TORCH, 1.9, layer="LayerNorm", what=BOTH)]
    assert "OVER          0.95     >= 1" in lines(budgets, *rows)[-1]


def test_only_float32_in_the_usual_layout_is_promised_of_batch_norm(budgets: dict[str, Any]) -> None:
    def pair(**more: Any) -> list[Any]:
        return [row(OURS, 1.0, layer="BatchNorm2d", **more), row(TORCH, 3.5, layer="BatchNorm2d", **more)]

    rows = [*pair(), *pair(layout="channels_last"), *pair(dtype="bfloat16")]
    (line,) = lines(budgets, *rows, name="batch-norm")
    assert line.startswith("ok             3.5     >= 3  BatchNorm2d")


def test_small_calls_are_held_to_the_function_of_torch(budgets: dict[str, Any]) -> None:
    rows = [
        row(each, ms, what=what)
        for what in (FORWARD, BOTH)
        for each, ms in ((OURS, 1.9), ("normwise.functional", 1.2 if what == FORWARD else 1.4), ("F.layer_norm", 1.0))
    ]
    assert [line.split()[0] for line in lines(budgets, *rows, name="small")] == ["ok", "OVER"]


@pytest.mark.parametrize(("ours", "code"), [(1.0, 0), (100.0, 1)])
def test_the_exit_code_says_whether_all_is_kept(
    budgets: dict[str, Any],
    ours: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    norms = [
        row(OURS, ours, layer="LayerNorm", copies=ours),
        row(OURS, ours, layer="LayerNorm", what=BACKWARD, copies=ours),
        row(OURS, ours, layer="LayerNorm", what=BOTH, saved=1.0),
        row(TORCH, 5.0, layer="LayerNorm", what=BOTH),
    ]
    steps = [row(each, ms, layer="Llama", peak_bytes=10**8) for each, ms in ((OURS, 800.0), (TRANSFORMERS, 1000.0))]
    asked: list[tuple[str, dict[str, Any]]] = []

    def run(name: str, **options: Any) -> Any:
        first = name not in [each for each, _ in asked]
        asked.append((name, options))
        if not first:
            return result(name=name)
        rows = {"norms": norms, "llama": steps}.get(name, [row(CLONE, 1.0, layer="GroupNorm", dtype="bfloat16")])
        return result(*rows, name=name if name != "small" else "batch-norm")

    monkeypatch.setattr(benchmarks, "run", run)
    assert budgets["main"](apart=lambda work: work()) == code
    out = capsys.readouterr().out
    assert (
        "Llama [4, 8] float32, 1 thread: a training step takes 1000 ms as it is, 800 ms with our norms (1.25x)" in out
    )
    assert out.splitlines()[-1] == ("4 of 4 kept" if code == 0 else "1 of 4 kept")
    assert asked[0][0] == "norms"
    assert {**asked[0][1], "shapes": None, "dtypes": None} == {
        "threads": (1,),
        "quick": True,
        "shapes": None,
        "dtypes": None,
    }
    assert len(asked[0][1]["shapes"]) == len(asked[0][1]["dtypes"]) == 1


def test_each_part_is_measured_in_a_process_of_its_own(budgets: dict[str, Any]) -> None:
    assert budgets["in_a_process"](lambda: [f"from {os.getpid()}"]) != [f"from {os.getpid()}"]
