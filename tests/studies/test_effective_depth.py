"""Effective depth: what is measured of a stack, and judges on made-up rows."""

from __future__ import annotations

import math

import pytest
import torch

from normwise.errors import NotKnown
from normwise.rendering.plots import Chart
from normwise.studies import Outcome, Row, Rows, Table, effective_depth
from normwise.studies._corpus import corpus
from normwise.studies._depth import costs_of_dropping, influence, path_angle
from normwise.studies._model import language_model
from normwise.studies._training import validation_loss

FALLING = [0.5, 0.3, 0.2, 0.1, 0.05, 0.01]
FLAT = [0.2] * 6
BACK_HEAVY = FALLING[::-1]


def rows(placement="pre", *, turns=FALLING, costs=FALLING, start=FALLING, theory=FALLING, validation=2.5, seeds=3):
    """Return made-up models of six layers."""
    made = []
    for seed in range(seeds):
        shape = 1 + 0.01 * seed
        metrics = {
            "influence_start": start,
            "influence_theory": theory,
            "influence_end": [each * shape for each in turns],
            "cost": [each * shape for each in costs],
            "angle_start": 2.0,
            "angle_theory": 2.1,
            "angle_end": 1.5,
            "validation": validation,
            "unigram": 3.1,
        }
        made.append(Row(params={"placement": placement, "steps": 600, "seed": seed}, metrics=metrics))
    return Rows(made)


def judged(index: int, given: Rows) -> Outcome:
    return effective_depth.CLAIMS[index].judge(given).outcome


def test_deep_layers_do_little_by_both_measures_by_one_or_by_none():
    assert judged(0, rows()) is Outcome.CONFIRMED
    assert judged(0, rows(costs=FLAT)) is Outcome.DEPENDS
    assert judged(0, rows(turns=FLAT, costs=FLAT)) is Outcome.REFUTED


def test_no_third_of_post_norm_does_little_or_one_does():
    assert judged(1, rows("post", turns=FLAT, costs=FLAT)) is Outcome.CONFIRMED
    assert judged(1, rows("post", turns=FLAT, costs=BACK_HEAVY)) is Outcome.DEPENDS
    assert judged(1, rows("post", turns=BACK_HEAVY, costs=BACK_HEAVY)) is Outcome.REFUTED


def test_nothing_is_concluded_of_a_model_that_did_not_learn():
    assert judged(0, rows(validation=3.05)) is Outcome.OPEN
    assert judged(1, rows("post", turns=FLAT, costs=FLAT, validation=3.2)) is Outcome.OPEN
    assert judged(1, rows("post", turns=FLAT, costs=FLAT, validation=math.nan)) is Outcome.OPEN


def test_scaling_wins_loses_or_stays_within_the_spread():
    def against(turns, costs, seeds=3):
        return Rows([*rows(seeds=seeds), *rows("layernorm-scaling", turns=turns, costs=costs, seeds=seeds)])

    assert judged(2, against(FLAT, FLAT)) is Outcome.CONFIRMED
    assert judged(2, against([0.0] * 6, FLAT)) is Outcome.DEPENDS
    assert judged(2, against([0.0] * 6, [0.0] * 6)) is Outcome.REFUTED
    assert judged(2, against(FALLING, FALLING)) is Outcome.OPEN
    assert judged(2, against(FLAT, FLAT, seeds=1)) is Outcome.OPEN


def test_theory_is_held_to_its_error():
    close, far = [1.1 * each for each in FALLING], [2 * each for each in FALLING]
    assert judged(3, rows(theory=close)) is Outcome.CONFIRMED
    assert judged(3, rows(theory=far)) is Outcome.REFUTED
    assert judged(3, Rows([*rows(theory=close), *rows("post", theory=far)])) is Outcome.DEPENDS


@pytest.mark.parametrize("claim", effective_depth.CLAIMS)
def test_says_what_is_missing(claim):
    with pytest.raises(NotKnown):
        claim.judge(Rows([]))


def test_a_full_set_is_judged_without_the_quick_one_beside_it():
    quick = Rows(Row(params={**row.params, "steps": 150}, metrics=row.metrics) for row in rows(turns=FLAT, costs=FLAT))
    assert judged(0, Rows([*quick, *rows()])) is Outcome.CONFIRMED


def test_figures_show_the_theory_beside_the_measurement():
    both = Rows([*rows(), *rows("post", turns=FLAT)])
    turns, shares, *charts = (figure(both) for figure in effective_depth.FIGURES)
    assert isinstance(turns, Table)
    assert isinstance(shares, Table)
    assert [row[0] for row in turns.rows] == [row[0] for row in shares.rows] == ["pre", "post"]
    for thirds in (shares.rows[0][1:4], shares.rows[0][4:]):
        assert sum(value for value in thirds if isinstance(value, float)) == pytest.approx(1.0)
    assert all(isinstance(chart, Chart) for chart in charts)
    start = charts[0]
    assert isinstance(start, Chart)
    assert [line.like for line in start.lines if line.theory] == ["pre", "post"]


def test_influence_of_a_layer_that_does_nothing_is_0_and_dropping_it_costs_nothing():
    torch.manual_seed(0)
    model = language_model("pre", 2)
    with torch.no_grad():
        for name, parameter in model.stack.layers[1].named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                parameter.zero_()
    first, second = influence(model, torch.randint(256, (2, 16)))
    assert first > 0.01
    assert second == pytest.approx(0.0, abs=1e-7)
    assert path_angle([1.0, 1 - 0.5**0.5]) == pytest.approx(0.5 + 0.25)
    before, layers = validation_loss(model, corpus()), list(model.stack.layers)
    costs = costs_of_dropping(model, corpus(), length=64)
    assert costs[1] == pytest.approx(0.0, abs=1e-6)
    assert abs(costs[0]) > 1e-4
    assert list(model.stack.layers) == layers
    assert validation_loss(model, corpus()) == before


def test_a_trial_repeats_to_the_bit_and_starts_where_theory_says():
    params = {"placement": "pre", "steps": 1, "layers": 1, "seed": 0}
    found = effective_depth.measure(params)
    assert found == effective_depth.measure(params)
    assert len(found["cost"]) == len(found["influence_end"]) == 1
    assert found["influence_start"][0] == pytest.approx(found["influence_theory"][0], rel=0.1)
