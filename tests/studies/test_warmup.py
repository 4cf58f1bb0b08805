"""The judges of warmup on made-up rows, and one tiny trial."""

from __future__ import annotations

import math

import pytest

from normwise.errors import NotKnown
from normwise.studies import warmup
from normwise.studies._study import Outcome, Row, Rows

UNIGRAM, LEARNED, STUCK = 3.08, 2.4, 3.09
POST, PRE, OTHERS, CAUSE = (claim.judge for claim in warmup.CLAIMS)


def rows(*trials: tuple[str, int, float, float, tuple[float, ...]]) -> Rows:
    """Return rows of (placement, warm-up, rate, gain, validation loss of each seed)."""
    return Rows(
        Row(
            params={"placement": placement, "warm_up": warm_up, "rate": rate, "gain": gain, "seed": seed},
            metrics={"validation": loss, "unigram": UNIGRAM, "token_cosine": 0.9 if gain == 1 else 0.1},
        )
        for placement, warm_up, rate, gain, losses in trials
        for seed, loss in enumerate(losses)
    )


COLD, WARM = ("post", 0, 1e-3, 1.0, (STUCK,) * 3), ("post", 100, 1e-3, 1.0, (LEARNED,) * 3)


def test_post_norm_that_is_stuck_without_and_learns_with_warm_up_confirms() -> None:
    found = POST(rows(COLD, WARM))
    assert found.outcome is Outcome.CONFIRMED
    assert "3.09" in found.says
    assert "2.4" in found.says


@pytest.mark.parametrize(
    ("cold", "warm", "outcome"),
    [
        ((LEARNED,) * 3, (LEARNED,) * 3, Outcome.REFUTED),
        ((STUCK,) * 3, (STUCK,) * 3, Outcome.REFUTED),
        ((STUCK, STUCK, LEARNED), (LEARNED,) * 3, Outcome.DEPENDS),
        ((STUCK,) * 3, (LEARNED, STUCK, LEARNED), Outcome.DEPENDS),
        ((STUCK,) * 3, (math.nan, LEARNED, LEARNED), Outcome.DEPENDS),
    ],
)
def test_other_endings_do_not(cold: tuple[float, ...], warm: tuple[float, ...], outcome: Outcome) -> None:
    assert POST(rows(("post", 0, 1e-3, 1.0, cold), ("post", 100, 1e-3, 1.0, warm))).outcome is outcome


def test_a_rate_at_which_warm_up_is_not_needed_is_the_condition() -> None:
    low = [("post", 0, 3e-4, 1.0, (LEARNED,)), ("post", 100, 3e-4, 1.0, (LEARNED,))]
    high = [("post", 0, 3e-3, 1.0, (STUCK,)), ("post", 100, 3e-3, 1.0, (STUCK,))]
    found = POST(rows(COLD, WARM, *low, *high))
    assert found.outcome is Outcome.DEPENDS
    assert "at 3e-4 it learns without; " in found.says.replace("0.0003", "3e-4") + "; "
    assert "warm-up does not help" in found.says


def test_pre_norm_is_refuted_where_it_is_stuck_at_the_rate_of_the_claim_and_depends_elsewhere() -> None:
    assert PRE(rows(("pre", 0, 1e-3, 1.0, (LEARNED,)))).outcome is Outcome.CONFIRMED
    assert PRE(rows(("pre", 0, 1e-3, 1.0, (STUCK,)))).outcome is Outcome.REFUTED
    high = ("pre", 0, 3e-3, 1.0, (STUCK,))
    assert PRE(rows(("pre", 0, 1e-3, 1.0, (LEARNED,)), high)).outcome is Outcome.DEPENDS


def test_both_deep_norm_and_sandwich_are_needed() -> None:
    deep, sandwich = ("deep-norm", 0, 1e-3, 1.0, (LEARNED,)), ("sandwich", 0, 1e-3, 1.0, (LEARNED,))
    assert OTHERS(rows(deep, sandwich)).outcome is Outcome.CONFIRMED
    with pytest.raises(NotKnown, match="sandwich"):
        OTHERS(rows(deep))


def test_small_branches_that_learn_refute_the_placement_as_the_cause() -> None:
    found = CAUSE(rows(COLD, ("post", 0, 1e-3, 0.3, (LEARNED,) * 3), ("post", 0, 1e-3, 0.7, (STUCK,) * 3)))
    assert found.outcome is Outcome.REFUTED
    assert "up to gain 0.3" in found.says
    assert CAUSE(rows(COLD, ("post", 0, 1e-3, 0.3, (STUCK,)))).outcome is Outcome.CONFIRMED
    assert (
        CAUSE(rows(("post", 0, 1e-3, 1.0, (LEARNED,)), ("post", 0, 1e-3, 0.3, (LEARNED,)))).outcome is Outcome.DEPENDS
    )
    with pytest.raises(NotKnown, match="small branches"):
        CAUSE(rows(COLD))


def test_the_quick_set_is_part_of_the_full_one_and_trials_are_not_repeated() -> None:
    full = warmup.trials(quick=False)
    assert len(full) == 4 * 3 * 2 + 4  # placements, rates, warm-ups; gains
    assert all(full.count(trial) == 1 for trial in full)
    assert all(trial in full for trial in warmup.trials(quick=True))


def test_a_trial_is_deterministic_and_smaller_branches_keep_tokens_apart() -> None:
    tiny = {"placement": "post", "warm_up": 1, "rate": 1e-3, "layers": 8, "steps": 2, "batch": 2, "seed": 0}
    whole, small = warmup.measure({**tiny, "gain": 1.0}), warmup.measure({**tiny, "gain": 0.1})
    assert whole == warmup.measure({**tiny, "gain": 1.0})
    assert whole["steps"] == [2]
    assert 0 < small["token_cosine"] < 0.3 < 0.6 < whole["token_cosine"] <= 1
    assert whole["unigram"] == pytest.approx(3.1, abs=0.2)
