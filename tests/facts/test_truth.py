"""The placement of real architectures, as their modeling code has it (tests/data/architectures.json)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import normwise as nw

pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # what the modeling code says is not ours to mend

TRUTH: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "architectures.json").read_text(encoding="utf-8")
)
SHARE = 0.97  # of the rows must agree; issue 2
# One family for each kind of placement, run with every `make test`
EVERY_DAY = (
    "bert",
    "bloom",
    "cohere",
    "deepseek_v3",
    "exaone4",
    "gemma2",
    "gpt_neox",
    "minimax",
    "swin",
    "mt5",
    "resnet",
)


@cache
def _found(model_type: str) -> dict[str, Any]:
    """Return the map of one type in the shape of the truth, cut to as many stacks."""
    try:
        placement = nw.map(f"hf:{model_type}").placement
    except Exception as error:  # a type that does not load or run is a row that disagrees, listed with the others
        return {"error": f"{type(error).__name__}: {error}"}
    kept = placement.stacks[: len(TRUTH[model_type]["stacks"])] if model_type in TRUTH else placement.stacks
    return {
        "stacks": [
            {"kind": str(s.kind), "starts_with_norm": s.starts_with_norm, "final_norm": s.final_norm} for s in kept
        ],
        "qk_norm": placement.qk_norm,
        "inner_norm": placement.inner_norm,
    }


def test_the_truth_has_the_rows_that_the_figures_speak_of() -> None:
    assert len(TRUTH) >= 90
    for row in TRUTH.values():
        assert row["stacks"]
        assert all(set(stack) == {"kind", "starts_with_norm", "final_norm"} for stack in row["stacks"])


@pytest.mark.parametrize("model_type", EVERY_DAY)
def test_one_architecture_of_each_kind_is_placed_right(model_type: str) -> None:
    assert _found(model_type) == TRUTH[model_type]


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["every fourth", "all"])
def test_nearly_all_architectures_are_placed_right(step: int) -> None:
    rows = dict(sorted(TRUTH.items())[::step])
    wrong = {name: (_found(name), row) for name, row in rows.items() if _found(name) != row}
    listing = "\n".join(f"{name}\n  found    {found}\n  expected {row}" for name, (found, row) in wrong.items())
    agree = len(rows) - len(wrong)
    assert agree >= SHARE * len(rows), f"{agree} of {len(rows)} agree; these do not:\n{listing}"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(TRUTH))
def test_an_architecture_is_placed_right(model_type: str) -> None:
    assert _found(model_type) == TRUTH[model_type]
