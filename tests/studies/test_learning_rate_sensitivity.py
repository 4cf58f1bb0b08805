"""The judges of learning-rate-sensitivity on made-up rows, and one tiny trial."""

from __future__ import annotations

import math

import pytest

from normwise.errors import NotKnown
from normwise.studies import learning_rate_sensitivity as study
from normwise.studies._study import Outcome, Row, Rows

POST, QK = (claim.judge for claim in study.CLAIMS)
START = 5.0


def rows(losses: dict[str, list[list[float]]]) -> Rows:
    """Return rows from the losses of each arrangement, seed by seed, at the rates 0.001, 0.01, ..."""
    return Rows(
        Row(
            params={"arrangement": name, "rate": 10.0 ** (place - 3), "seed": seed},
            metrics={"validation": loss, "start": START},
        )
        for name, seeds in losses.items()
        for seed, each in enumerate(seeds)
        for place, loss in enumerate(each)
    )


def test_sensitivity_is_the_mean_above_the_best_and_divergence_counts_as_the_start() -> None:
    some = rows({"post": [[2.0, 3.0, math.nan], [2.0, 9.0, 2.0]]})
    assert study._sensitivities(some, "post") == [pytest.approx((0 + 1 + 3) / 3), pytest.approx(3 / 3)]


def test_a_seed_without_all_rates_is_left_out() -> None:
    some = rows({"post": [[2.0, 3.0], [2.0]]})
    assert study._sensitivities(some, "post") == [pytest.approx(0.5)]
    with pytest.raises(NotKnown, match="not every rate of pre"):
        study._sensitivities(rows({"pre": [[2.0]], "post": [[2.0, 3.0]]}), "pre")


@pytest.mark.parametrize(
    ("post", "pre", "sandwich", "outcome"),
    [
        ([[2, 5], [2, 4.9]], [[2, 3]], [[2, 3]], Outcome.CONFIRMED),
        ([[2, 3], [2, 5]], [[2, 4]], [[2, 4]], Outcome.REFUTED),
        ([[2, 2.5]], [[2, 4]], [[2, 4]], Outcome.REFUTED),
        ([[2, 4.05]], [[2, 4]], [[2, 4]], Outcome.REFUTED),
        ([[2, 4.05], [2, 4.06]], [[2, 4], [2, 4.01]], [[2, 4]], Outcome.CONFIRMED),
        ([[2, 4]], [[2, 3]], [[2, 5]], Outcome.DEPENDS),
    ],
)
def test_only_what_the_seeds_keep_apart_is_concluded(
    post: list[list[float]], pre: list[list[float]], sandwich: list[list[float]], outcome: Outcome
) -> None:
    assert POST(rows({"post": post, "pre": pre, "sandwich": sandwich, "deep-norm": pre})).outcome is outcome


def test_qk_norm_is_compared_with_plain_pre_norm() -> None:
    assert QK(rows({"pre": [[2, 4]], "pre + QK norm": [[2, 3]]})).outcome is Outcome.CONFIRMED
    assert "the opposite" in QK(rows({"pre": [[2, 3]], "pre + QK norm": [[2, 4]]})).says


def test_the_quick_set_is_part_of_the_full_one() -> None:
    assert all(trial in study.trials(quick=False) for trial in study.trials(quick=True))


def test_a_trial_with_qk_norm_is_another_model() -> None:
    tiny = {"rate": 1e-3, "layers": 1, "steps": 2, "batch": 2, "warm_up": 1, "seed": 0}
    plain, normed = (study.measure({**tiny, "arrangement": name}) for name in ("pre", "pre + QK norm"))
    assert plain == study.measure({**tiny, "arrangement": "pre"})
    assert plain["validation"] != normed["validation"]
    assert 5 < plain["start"] < 6  # ln 256 = 5.55
