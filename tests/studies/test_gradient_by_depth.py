"""The study of gradients by depth: its judges on made-up rows, and a small trial."""

from __future__ import annotations

from typing import Any

import pytest

from normwise.errors import NotKnown
from normwise.studies import gradient_by_depth as study
from normwise.studies._study import Claim, Outcome, Row, Rows

PRE, POST, FLAT, PRODUCT, COLLAPSE, SMALL = study.CLAIMS


def row(placement: str, depth: int = 24, init: str = "xavier", *, seed: int = 0, **metrics: Any) -> Row:
    small = init == "gpt-2"
    params = {"placement": placement, "init": init, "depth": depth, "seed": seed, "mlp": "gelu" if small else "relu"}
    usual = {"down_first": 2.0, "down_last": 1.0, "first_to_last": 2.0, "q_last": 4.0, "error": 0.1, "rho_last": 0.9}
    usual |= {"product": [1.0, 1.1, 0.9], "query_share": 1e-5, "after_first_norm": 1.0}
    return Row(params=params | {"embeddings": "unit"} | metrics.pop("params", {}), metrics=usual | metrics)


def outcome(claim: Claim, *rows: Row) -> Outcome:
    return claim.judge(Rows(rows)).outcome


def last(placement: str, power: float, init: str = "xavier", seed: int = 0) -> list[Row]:
    return [row(placement, depth, init, seed=seed, down_last=depth**power) for depth in (6, 24, 96)]


@pytest.mark.parametrize(("claim", "placement", "own", "other"), [(PRE, "pre", -0.5, 0.0), (POST, "post", 0.0, -0.5)])
def test_theorem_1(claim: Claim, placement: str, own: float, other: float) -> None:
    assert outcome(claim, *last(placement, own + 0.1)) is Outcome.CONFIRMED
    assert outcome(claim, *last(placement, other - 0.1)) is Outcome.REFUTED
    assert outcome(claim, *last(placement, own), *last(placement, other, "normal")) is Outcome.DEPENDS
    assert outcome(claim, *last(placement, own), *last(placement, other, seed=1)) is Outcome.OPEN


def test_one_depth_is_no_exponent() -> None:
    with pytest.raises(NotKnown, match="one depth"):
        PRE.judge(Rows([row("pre")]))


@pytest.mark.parametrize(
    ("claim", "placement", "kept", "broken"),
    [
        (FLAT, "pre", {"down_first": 1.9}, {"down_first": 4.0}),
        (PRODUCT, "pre", {"product": [1.0, 1.1, 1.0]}, {"product": [1.0, 1.5, 1.0]}),
        (COLLAPSE, "post", {"query_share": 1e-4}, {"query_share": 0.01}),
    ],
)
def test_a_claim_is_confirmed_refuted_or_depends(
    claim: Claim, placement: str, kept: dict[str, Any], broken: dict[str, Any]
) -> None:
    assert outcome(claim, row(placement, **kept)) is Outcome.CONFIRMED
    assert outcome(claim, row(placement, **broken)) is Outcome.REFUTED
    assert outcome(claim, row(placement, **kept), row(placement, init="normal", **broken)) is Outcome.DEPENDS


def test_a_small_start() -> None:
    def pair(embeddings: str, post: float) -> list[Row]:
        params = {"embeddings": embeddings}
        return [
            row("pre", 12, "gpt-2", first_to_last=2.0, params=params),
            row("post", 12, "gpt-2", first_to_last=post, params=params),
        ]

    assert outcome(SMALL, *pair("unit", 2.1), *pair("gpt-2", 36.0)) is Outcome.DEPENDS
    assert outcome(SMALL, *pair("unit", 2.1), *pair("gpt-2", 2.2)) is Outcome.CONFIRMED
    assert outcome(SMALL, *pair("unit", 9.0), *pair("gpt-2", 36.0)) is Outcome.REFUTED


@pytest.mark.parametrize("claim", study.CLAIMS)
def test_missing_trials_are_no_verdict(claim: Claim) -> None:
    with pytest.raises(NotKnown):
        claim.judge(Rows([row("deep-norm")]))


def test_a_trial_is_deterministic_and_knows_the_first_norm() -> None:
    params = {
        "placement": "post",
        "init": "gpt-2",
        "mlp": "gelu",
        "depth": 2,
        "width": 32,
        "embeddings": "gpt-2",
        "seed": 0,
    }
    first = study.measure(params)
    assert first == study.measure(params)
    assert first != study.measure(params | {"seed": 1})
    # a norm of a stream of q_0 = 8e-4 and eps 1e-5 multiplies what comes back by (8e-4 + 1e-5)^(-1/2) = 35
    assert first["first_to_last"] == pytest.approx(35, rel=0.15)
    assert first["after_first_norm"] == pytest.approx(1, rel=0.1)
    assert all(len(value) <= 60 for value in first.values() if isinstance(value, list))


def test_the_quick_set_is_part_of_the_full_one() -> None:
    assert all(each in study.trials(quick=False) for each in study.trials(quick=True))
    assert sum(map(study.seconds, study.trials(quick=True))) < 180
