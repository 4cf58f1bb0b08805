"""The study of 2^(-l/2): its judges on made-up rows, a small trial, and the factors of theory."""

from __future__ import annotations

from typing import Any

import pytest

from normwise.errors import NotKnown
from normwise.studies import sqrt_vs_sum as study
from normwise.studies._study import Claim, Outcome, Row, Rows

LAYER, ADD, NORM, INPUT, DIVISOR = study.CLAIMS
HALF = 2**-0.5


def row(of: str = "full", *, seed: int = 0, **metrics: Any) -> Row:
    usual = {"token_factor": HALF, "norm_factor": HALF, "adds": 48, "branch": 1.0, "input_share": 2.0**-24}
    usual |= {"norm": [2.0**-12, 1.0], "token": [2.0**-12, 1.0], "first_share": [0.02, 0.02]}
    return Row(params={"of": of, "seed": seed}, metrics=usual | metrics)


def summed(placement: str, size: float, *, depth: int = 24, seed: int = 0) -> Row:
    params = {"of": "sum", "placement": placement, "init": "xavier", "depth": depth, "seed": seed}
    return Row(params=params, metrics={"adds": 2 * depth, "size": size, "told_size": 7.0, "error": 0.05})


def outcome(claim: Claim, *rows: Row) -> Outcome:
    return claim.judge(Rows(rows)).outcome


def test_decay_by_layer_depends_on_what_is_looked_at() -> None:
    none: dict[str, Any] = {"token_factor": 1.0, "norm_factor": 1.01}
    assert outcome(LAYER, row()) is Outcome.CONFIRMED
    assert outcome(LAYER, row(**none)) is Outcome.REFUTED
    found = LAYER.judge(Rows([row(norm_factor=1.0), row("small", **none)]))
    assert found.outcome is Outcome.DEPENDS
    assert "near it, 0.71, for attention + ReLU MLP (median token); 1.00 … 1.01 in 3 others" in found.says


@pytest.mark.parametrize(
    ("factor", "expected"),
    [([0.5, 0.52], Outcome.CONFIRMED), ([0.74, 0.7], Outcome.REFUTED), ([0.5, 0.74], Outcome.OPEN)],
)
def test_decay_by_add(factor: list[float], expected: Outcome) -> None:
    rows = [row(token_factor=each, seed=seed) for seed, each in enumerate(factor)]
    assert outcome(ADD, *rows, row("relu", token_factor=1.0)) is expected


@pytest.mark.parametrize(
    ("first", "expected"),
    [([2.0**-12, 2.0**-10], Outcome.CONFIRMED), ([3.0, 0.5], Outcome.REFUTED), ([2.0**-12, 1.0], Outcome.OPEN)],
)
def test_the_norm_of_a_layer(first: list[float], expected: Outcome) -> None:
    assert outcome(NORM, *(row(norm=[each, 1.0], seed=seed) for seed, each in enumerate(first))) is expected


def test_the_coefficient_of_what_enters() -> None:
    assert outcome(INPUT, row()) is Outcome.CONFIRMED
    assert outcome(INPUT, row(input_share=0.9)) is Outcome.REFUTED
    assert outcome(INPUT, row(), row("relu", input_share=0.01)) is Outcome.DEPENDS


def test_the_divisor() -> None:
    assert outcome(DIVISOR, summed("sandwich", 7.1)) is Outcome.CONFIRMED
    assert outcome(DIVISOR, summed("pre", 4.9)) is Outcome.REFUTED
    assert outcome(DIVISOR, summed("sandwich", 7.1), summed("pre", 4.9)) is Outcome.DEPENDS
    # 4 %: within two deviations of one net's root (2.5 %), not of the mean of nine
    assert outcome(DIVISOR, summed("pre", 7.28)) is Outcome.CONFIRMED
    assert outcome(DIVISOR, *(summed("pre", 7.28, seed=seed) for seed in range(9))) is Outcome.REFUTED


@pytest.mark.parametrize("claim", study.CLAIMS)
def test_missing_trials_are_no_verdict(claim: Claim) -> None:
    with pytest.raises(NotKnown):
        claim.judge(Rows([row("other")]))


TINY = {"placement": "post", "mlp": "relu", "depth": 4, "width": 64, "embeddings": "unit", "of": "relu", "seed": 0}


def test_a_trial_is_deterministic() -> None:
    params = TINY | {"init": "fan-in", "kinds": ["mlp"]}
    first = study.measure(params)
    assert first == study.measure(params)
    assert first != study.measure(params | {"seed": 1})
    assert first["adds"] == 4
    assert first["layers"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("mlp", "factor"), [("relu", 1.0), ("gelu", 1.0216**0.5), ("swiglu", 1.2799**0.5)])
def test_theory_of_an_mlp_is_the_closed_form(mlp: str, factor: float) -> None:
    """((1 + chi) / (1 + v))^(1/2) with the constants of unit inputs."""
    told = study.measure(TINY | {"init": "fan-in", "kinds": ["mlp"], "mlp": mlp, "width": 96})
    assert told["told_norm_factor"] == pytest.approx(factor, rel=0.01)
    assert told["told_token_factor"] == pytest.approx(factor, rel=0.01)
    assert told["norm_factor"] == pytest.approx(factor, rel=0.08)


def test_the_quick_set_is_part_of_the_full_one() -> None:
    assert all(each in study.trials(quick=False) for each in study.trials(quick=True))
    assert sum(map(study.seconds, study.trials(quick=True))) < 180
