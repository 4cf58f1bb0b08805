from __future__ import annotations

from math import sqrt
from typing import Any, cast

import pytest

from normwise.errors import NotKnown
from normwise.studies import Outcome, Row, Rows
from normwise.studies import batch_norm_in_sequence_models as study

PADDING, ONE, LEAKS, ALONE, GAP, WORSE = (claim.judge for claim in study.CLAIMS)


def training(norm: str, **changed: Any) -> Row:
    found: dict[str, Any] = {
        "training_loss": 2.4,
        "evaluation": 2.4,
        "with_batch": [2.4] * 4,
        "with_batch_of_1": 2.4,
        "with_batch_of_16": 2.4,
        "sorted": 2.4,
        "leak": [0.0] * 4,
        "leak_in_evaluation": 0.0,
    }
    return Row(params={"part": "training", "norm": norm, "seed": 0}, metrics={**found, **changed})


def padding(*, slope: float = 1.0, masked: float = 1e-7) -> Rows:
    return Rows(
        Row(
            params={"part": "padding", "padded": share, "seed": 0},
            metrics={"mean": 1 - slope * share, "masked_change": masked, "masked_running_change": 0.0},
        )
        for share in (0.0, 0.25, 0.5, 0.75)
    )


def few(refused: int) -> list[Row]:
    return [
        Row(params={"part": "few", "values": n, "seed": 0}, metrics={"refused": r, "deviation": 1.4, "magnitude": 1.0})
        for n, r in ((1, refused), (2, 0))
    ]


@pytest.mark.parametrize(
    ("slope", "masked", "outcome"),
    [(1.0, 1e-7, Outcome.DEPENDS), (1.0, 0.3, Outcome.CONFIRMED), (0.0, 1e-7, Outcome.REFUTED)],
)
def test_padding_is_judged_by_both_statistics(slope: float, masked: float, outcome: Outcome) -> None:
    assert PADDING(padding(slope=slope, masked=masked)).outcome is outcome


@pytest.mark.parametrize(
    ("refused", "loss", "outcome"),
    [(1, 2.6, Outcome.CONFIRMED), (1, 2.41, Outcome.DEPENDS), (0, 2.6, Outcome.REFUTED)],
)
def test_a_batch_of_one_fails_where_a_value_is_refused_and_a_sequence_costs(
    refused: int, loss: float, outcome: Outcome
) -> None:
    assert ONE(Rows([*few(refused), training("batch", with_batch_of_1=loss)])).outcome is outcome


@pytest.mark.parametrize(
    ("leak", "evaluation", "outcome"),
    [(0.1, 0.0, Outcome.DEPENDS), (0.1, 0.1, Outcome.CONFIRMED), (0.0, 0.0, Outcome.REFUTED)],
)
def test_the_future_is_seen_where_earlier_logits_move(leak: float, evaluation: float, outcome: Outcome) -> None:
    assert LEAKS(Rows([training("batch", leak=[leak] * 4, leak_in_evaluation=evaluation)])).outcome is outcome


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [({}, Outcome.CONFIRMED), ({"leak": [0, 0, 0, 1e-9]}, Outcome.REFUTED), ({"sorted": 2.5}, Outcome.REFUTED)],
)
def test_layer_norm_is_alone_unless_anything_moves(changed: dict[str, Any], outcome: Outcome) -> None:
    assert ALONE(Rows([training("layer", **changed)])).outcome is outcome


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({"evaluation": 2.5}, Outcome.CONFIRMED),
        ({"sorted": 2.5}, Outcome.DEPENDS),
        ({"sorted": 2.44}, Outcome.REFUTED),
    ],
)
def test_the_gap_is_judged_beyond_noise(changed: dict[str, Any], outcome: Outcome) -> None:
    assert GAP(Rows([training("batch", **changed)])).outcome is outcome


@pytest.mark.parametrize(("loss", "outcome"), [(2.5, Outcome.CONFIRMED), (2.3, Outcome.REFUTED), (2.44, Outcome.OPEN)])
def test_the_better_norm_is_named_beyond_noise(loss: float, outcome: Outcome) -> None:
    assert WORSE(Rows([training("batch", evaluation=loss), training("layer")])).outcome is outcome


@pytest.mark.parametrize("claim", study.CLAIMS)
def test_without_trials_nothing_is_concluded(claim: Any) -> None:
    with pytest.raises(NotKnown):
        claim.judge(Rows([]))


def test_padding_moves_the_statistics_as_in_the_formula_and_a_mask_keeps_them() -> None:
    found = study.measure({"part": "padding", "padded": 0.5, "seed": 0})
    # x = 1 + z / 2: half of it zeros leaves a variance of 1/2 * 1/4 + 1/4 * 1, 1.5 times 1/4
    assert found["mean"] == pytest.approx(0.5, abs=1e-6)
    assert found["variance"] == pytest.approx(1.5, rel=0.05)
    assert found["masked_change"] < 1e-5


@pytest.mark.parametrize("n", [2, 8, 128])
def test_a_variance_of_n_values_deviates_as_in_the_formula(n: int) -> None:
    found = study.measure({"part": "few", "values": n, "seed": 1})
    # of 4096 draws of chi-square / (n - 1), kurtosis 3 + 12 / (n - 1): three standard errors of a deviation
    error = 3 * sqrt((2 + 12 / (n - 1)) / (4 * 4096))
    assert found["deviation"] == pytest.approx(sqrt(2 / (n - 1)), rel=error)


def test_one_value_a_channel_is_refused() -> None:
    assert study.measure({"part": "few", "values": 1, "seed": 0})["refused"] == 1


def test_batch_norm_sees_the_future_and_layer_norm_does_not() -> None:
    batch, layer = (
        study.measure({"part": "training", "norm": norm, "steps": 2, "seed": 0}) for norm in ("batch", "layer")
    )
    assert min(batch["leak"]) > 0 == batch["leak_in_evaluation"]
    assert max(layer["leak"]) == 0
    assert batch == study.measure({"part": "training", "norm": "batch", "steps": 2, "seed": 0})


def test_figures_have_theory_beside_the_measurement() -> None:
    found = Rows([*padding(), *few(1), training("batch"), training("layer")])
    for row in found:
        row.metrics.setdefault("variance", 1.0)  # pyright: ignore[reportAttributeAccessIssue]
    table, leaks, losses, padded, uncertain = (cast("Any", make(found)) for make in study.FIGURES)
    assert [row[0] for row in table.rows] == [row[0] for row in leaks.rows] == ["batch", "layer"]
    assert len(losses.lines) == 4
    assert next(line.y for line in padded.lines if line.theory) == (1.0, 0.75, 0.5, 0.25)
    assert [line.y for line in uncertain.lines if line.theory] == [(sqrt(2),)]
