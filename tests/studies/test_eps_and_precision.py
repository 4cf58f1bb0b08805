from __future__ import annotations

from math import nan
from typing import Any, cast

import pytest

from normwise.errors import NotKnown
from normwise.studies import Outcome, Row, Rows
from normwise.studies import eps_and_precision as study

PLACE, TOO_SMALL, SINGLE, ONE_PASS, GAIN, DOCS = (claim.judge for claim in study.CLAIMS)
MEASURED = Rows(
    Row(params={**params, "seed": 0}, metrics=study.measure({**params, "seed": 0})) for params in study.trials(True)
)


def made(**changed: Any) -> Rows:
    return Rows(Row(params=row.params, metrics={**row.metrics, **changed}) for row in MEASURED)


@pytest.mark.parametrize(
    ("sigma", "inside", "outside"), [(1e-2, 0.953, 0.999), (1e-3, 0.3015, 0.990), (1e-5, 0.00316, 0.5)]
)
def test_the_place_of_eps_gives_the_rms_of_the_formula(sigma: float, inside: float, outside: float) -> None:
    of = MEASURED.where(part="sigma", sigma=sigma)
    assert of.mean("inside") == pytest.approx(sigma / (sigma**2 + 1e-5) ** 0.5, rel=1e-5) == pytest.approx(inside, 1e-3)
    assert of.mean("outside") == pytest.approx(sigma / (sigma + 1e-5), rel=1e-5) == pytest.approx(outside, 1e-3)


def test_the_jacobian_reaches_its_bound() -> None:
    for eps in (1e-5, 1e-6, 1e-8):
        assert MEASURED.where(part="eps", eps=eps).mean("jacobian") == pytest.approx(eps**-0.5, rel=1e-9)


@pytest.mark.parametrize(
    ("judge", "changed", "outcome"),
    [
        (PLACE, {"inside": 1.0, "outside": 1.0}, Outcome.CONFIRMED),
        (PLACE, {"inside": 0.5, "outside": 1.0}, Outcome.REFUTED),
        (PLACE, {}, Outcome.DEPENDS),
        (TOO_SMALL, {"naive_float32": nan, "naive_float16": nan}, Outcome.CONFIRMED),
        (TOO_SMALL, {"naive_float32": 0.0, "naive_float16": 0.0}, Outcome.REFUTED),
        (TOO_SMALL, {}, Outcome.DEPENDS),
        (SINGLE, {}, Outcome.CONFIRMED),
        (SINGLE, {"finite_squares": 1}, Outcome.REFUTED),
        (ONE_PASS, {"one_pass": 1e-7}, Outcome.CONFIRMED),
        (ONE_PASS, {"one_pass": 0.5}, Outcome.REFUTED),
        (ONE_PASS, {}, Outcome.DEPENDS),
        (GAIN, {}, Outcome.REFUTED),
        (GAIN, {"differing": 0.0}, Outcome.CONFIRMED),
        (DOCS, {"torch": 2**-7}, Outcome.CONFIRMED),
        (DOCS, {"torch": 2**-23}, Outcome.REFUTED),
        (DOCS, {"torch": 1e-5}, Outcome.OPEN),
    ],
)
def test_judges_follow_the_rows(judge: Any, changed: dict[str, Any], outcome: Outcome) -> None:
    assert judge(made(**changed)).outcome is outcome


@pytest.mark.parametrize("claim", study.CLAIMS)
def test_without_trials_nothing_is_concluded(claim: Any) -> None:
    with pytest.raises(NotKnown):
        claim.judge(Rows([]))


def test_a_gain_before_and_after_the_cast_differs_in_more_than_a_tenth_of_outputs_by_two_units_at_most() -> None:
    for dtype in ("float16", "bfloat16"):
        of = MEASURED.where(part="cast", dtype=dtype)
        assert of.mean("differing") > 0.1
        assert 1 <= of.mean("units") <= 2


def test_a_trial_says_the_same_twice_and_another_seed_something_else() -> None:
    params = {"part": "ratio", "ratio": 100.0, "seed": 0}
    assert study.measure(params) == study.measure(params) != study.measure({**params, "seed": 1})


def test_figures_have_theory_beside_the_measurement() -> None:
    table, sigma, ratio = (cast("Any", make(MEASURED)) for make in study.FIGURES)
    assert [row[0] for row in table.rows] == [1e-5, 1e-6, 1e-8]
    assert sum(line.theory for line in sigma.lines) == 2
    measured, theory = ratio.lines[:2]
    # below it, the rounding of x^2 itself; within a factor of 4 where the cancellation rules
    assert all(1 / 4 < m / t < 4 for m, t in zip(measured.y[3:], theory.y[3:], strict=True))
