from __future__ import annotations

from typing import Any, cast

import pytest

from normwise.errors import NotKnown
from normwise.studies import Outcome, Row, Rows, batch_size

FALLS, STEADY, FORGOTTEN, FASTER = (claim.judge for claim in batch_size.CLAIMS)
ALL = ("convolution", "dense")


def row(network: str, norm: str, batch: int, accuracy: float, seed: int = 0, **metrics: Any) -> Row:
    params = {"network": network, "norm": norm, "batch": batch, "seed": seed}
    return Row(params=params, metrics={"accuracy": accuracy, "training_loss": 0.1, **metrics})


def rows(*, behind: tuple[str, ...] = (), group: float = 0.95, none: float = 0.8, forgotten: float = 0.95) -> Rows:
    return Rows(
        row(
            network,
            norm,
            batch,
            {"none": none, "group": group if batch == 2 else 0.95}.get(
                norm, 0.7 if norm == "batch" and network in behind and batch == 2 else 0.95
            ),
            seed,
            **({"accuracy_in_training_mode": [forgotten] * 5, "accuracy_sorted": forgotten} if norm == "batch" else {}),
        )
        for seed in (0, 1)
        for network in ALL
        for norm in ("batch", "group", "layer", "none")
        for batch in (2, 32)
    )


@pytest.mark.parametrize(
    ("behind", "outcome"), [(ALL, Outcome.CONFIRMED), (("dense",), Outcome.DEPENDS), ((), Outcome.REFUTED)]
)
def test_batch_norm_falls_behind_where_its_small_batch_is_worse(behind: tuple[str, ...], outcome: Outcome) -> None:
    assert FALLS(rows(behind=behind)).outcome is outcome


def test_a_gap_within_two_standard_errors_is_none() -> None:
    # 95 % and 93 % of 597: two standard errors are 2.7 %
    close = Rows(
        row(network, norm, batch, 0.93 if (norm, batch) == ("batch", 2) else 0.95)
        for network in ALL
        for norm in ("batch", "group", "layer")
        for batch in (2, 32)
    )
    assert FALLS(close).outcome is Outcome.REFUTED


def test_a_gap_that_one_seed_contradicts_is_none() -> None:
    mixed = [row("dense", "batch", 2, 0.96, seed=2), *(each for each in rows(behind=("dense",)))]
    assert FALLS(Rows(mixed)).outcome is Outcome.REFUTED


@pytest.mark.parametrize(("group", "outcome"), [(0.95, Outcome.CONFIRMED), (0.7, Outcome.REFUTED)])
def test_group_norm_is_steady_unless_its_small_batch_is_worse(group: float, outcome: Outcome) -> None:
    assert STEADY(rows(group=group)).outcome is outcome


@pytest.mark.parametrize(("forgotten", "outcome"), [(0.6, Outcome.CONFIRMED), (0.95, Outcome.REFUTED)])
def test_training_mode_costs_what_was_measured(forgotten: float, outcome: Outcome) -> None:
    assert FORGOTTEN(rows(forgotten=forgotten)).outcome is outcome


@pytest.mark.parametrize(("none", "outcome"), [(0.8, Outcome.CONFIRMED), (0.95, Outcome.REFUTED)])
def test_a_norm_is_faster_where_its_net_is_ahead(none: float, outcome: Outcome) -> None:
    assert FASTER(rows(none=none)).outcome is outcome


@pytest.mark.parametrize("claim", batch_size.CLAIMS)
def test_without_trials_nothing_is_concluded(claim: Any) -> None:
    with pytest.raises(NotKnown):
        claim.judge(Rows([]))


def test_the_quick_trials_are_among_the_full_ones_and_serve_every_judge() -> None:
    quick, full = batch_size.trials(True), batch_size.trials(False)
    assert all(trial in full for trial in quick)
    assert len({str(trial) for trial in full}) == len(full)
    assert sum(map(batch_size.seconds, quick)) < 300


@pytest.mark.parametrize(("network", "norm"), [("convolution", "group"), ("dense", "batch")])
def test_a_trial_says_the_same_twice(network: str, norm: str) -> None:
    params = {"network": network, "norm": norm, "batch": 128, "epochs": 1, "seed": 3}
    found = batch_size.measure(params)
    assert found == batch_size.measure(params)
    assert found != batch_size.measure({**params, "seed": 4})
    assert 0.1 < found["accuracy"] <= 1


def test_figures_show_every_cell() -> None:
    table, convolution, dense, training_mode = (cast("Any", make(rows())) for make in batch_size.FIGURES)
    assert len(table.rows) == 2 * (4 + 3)
    assert [line.name for line in convolution.lines] == ["batch", "group", "layer", "none"]
    assert dense.lines[0].x == (2, 32)
    assert training_mode.lines[0].x == (2, 4, 8, 32, 597)
