"""Frozen gains: the closed form, rounding, and judges on made-up rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.studies import Outcome, Row, Rows, frozen_gains
from normwise.studies._storage import adam_bound, nearest, stochastic, stored_training

STORAGES = (("nearest", False), ("nearest", True), ("master", False), ("stochastic", False))


def rows(*, frozen=1.0, offset=0.0, master=0.0, rounded=0.0, losses=(2.6, 2.5), decayed=(0.55, 1.0), seeds=3):
    """Return made-up rows: shares that never moved, losses of plain and offset gains, mean gains with decay."""
    shares = dict(zip(STORAGES, (frozen, offset, master, rounded), strict=True))
    made = []
    for seed in range(seeds):
        for (storage, has_offset), share in shares.items():
            for rate in (1e-3, 3e-3):
                kept = share if rate == 1e-3 or (storage, has_offset) != STORAGES[0] else min(share, 0.4)
                metrics = {"never_moved": kept, "moved_at_once": 0.5, "mean_gain": 1.0, "distance": 0.0}
                loss = losses[1] if has_offset else losses[0]
                metrics |= {"largest_update": 1.2, "validation": loss + 0.01 * seed}
                made.append(Row(params=_params(storage, has_offset, rate, 0.0, seed), metrics=metrics))
        for has_offset, gain in zip((False, True), decayed, strict=True):
            params = _params("master", has_offset, 3e-3, 1.0, seed)
            made.append(Row(params=params, metrics={**made[0].metrics, "mean_gain": gain, "never_moved": 0.0}))
    return Rows(made)


def _params(storage, offset, rate, decay, seed):
    return {"storage": storage, "offset": offset, "rate": rate, "decay": decay, "seed": seed}


def judged(index: int, given: Rows) -> Outcome:
    return frozen_gains.CLAIMS[index].judge(given).outcome


def test_freezing_depends_on_the_rate_and_is_refuted_by_a_gain_that_moved_below_the_bound():
    assert judged(0, rows()) is Outcome.DEPENDS
    assert judged(0, rows(frozen=0.99)) is Outcome.REFUTED
    low = Rows(row for row in rows() if row.params["rate"] == 1e-3)
    assert judged(0, low) is Outcome.CONFIRMED


def test_the_offset_frees_or_not():
    assert judged(1, rows()) is Outcome.CONFIRMED
    assert judged(1, rows(offset=0.5)) is Outcome.REFUTED


def test_either_cure_may_fail():
    assert judged(2, rows()) is Outcome.CONFIRMED
    assert judged(2, rows(rounded=0.5)) is Outcome.DEPENDS
    assert judged(2, rows(rounded=0.5, master=0.5)) is Outcome.REFUTED


def test_a_difference_in_loss_counts_only_beyond_the_spread_over_seeds():
    assert judged(3, rows()) is Outcome.CONFIRMED
    assert judged(3, rows(losses=(2.5, 2.6))) is Outcome.REFUTED
    assert judged(3, rows(losses=(2.51, 2.5))) is Outcome.OPEN
    assert judged(3, rows(seeds=1)) is Outcome.OPEN


def test_decay_pulls_plain_gains_down_and_offset_gains_to_one():
    assert judged(4, rows()) is Outcome.CONFIRMED
    assert judged(4, rows(decayed=(0.95, 1.0))) is Outcome.REFUTED
    assert judged(4, rows(decayed=(0.55, 0.6))) is Outcome.REFUTED


@pytest.mark.parametrize("claim", frozen_gains.CLAIMS)
def test_says_what_is_missing(claim):
    with pytest.raises(NotKnown):
        claim.judge(Rows([]))


def test_figures_show_the_theory_beside_the_measurement():
    table, chart = frozen_gains._table(rows()), frozen_gains._chart(rows())
    assert len(table.rows) == len(STORAGES) * 2 + 2
    theory = chart.lines[-1]
    assert theory.theory
    assert theory.like == chart.lines[0].name
    assert [y for x, y in zip(theory.x, theory.y, strict=True) if x <= 1e-3] == [1.0]


def test_the_bound_is_reached_by_the_worst_gradients_and_by_no_others():
    first, second, steps = 0.9, 0.98, 400
    bound = adam_bound(first, second)
    # Cauchy and Schwarz are equal where gradients are in proportion to (a/b)^k, k steps ago.
    worst = torch.tensor([(first / second) ** (steps - t) for t in range(1, steps + 1)], dtype=torch.float64)
    assert _update(worst, first, second) == pytest.approx(bound, rel=1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        gradients = torch.randn(steps, generator=generator, dtype=torch.float64).exp()
        assert _update(gradients, first, second) < bound


def _update(gradients, first, second):
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=(first, second), eps=0.0)
    before = 0.0
    for gradient in gradients:
        before = weight.item()
        weight.grad = gradient
        optimizer.step()
    return abs(weight.item() - before)


@pytest.mark.parametrize(("rate", "moves"), [(1e-3, (False, False)), (3e-3, (False, True)), (6e-3, (True, True))])
def test_a_bfloat16_gain_of_torch_moves_as_the_closed_form_says(rate, moves):
    gain = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([gain], lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    gain.grad = torch.tensor([-1.0, 1.0], dtype=torch.bfloat16)  # up, down
    optimizer.step()
    assert tuple((gain != 1).tolist()) == moves


def test_stochastic_rounding_is_right_in_the_mean_and_goes_to_neighbours_only():
    x = torch.full((40_000,), 1.0 + 0.3 * 2**-7)
    found = stochastic(x, torch.Generator().manual_seed(0))
    assert set(found.tolist()) == {1.0, 1.0 + 2**-7}
    assert float((found - 1).mean()) == pytest.approx(0.3 * 2**-7, rel=0.03)  # 4 deviations
    exact = torch.tensor([1.0, -0.375, 0.0])
    assert torch.equal(stochastic(exact, torch.Generator().manual_seed(0)), exact)


@pytest.mark.parametrize(("storage", "moved"), [("nearest", False), ("master", True)])
def test_what_is_rounded_away_is_kept_by_a_master(storage, moved):
    gain = nn.Parameter(torch.ones(3))
    steps = stored_training([gain], [gain], storage=storage, rate=1e-3, betas=(0.9, 0.98), decay=0.0, seed=0)
    for _ in range(10):
        gain.grad = torch.ones(3)
        next(steps)
    assert bool((gain != 1).all()) is moved
    assert torch.equal(nearest(gain.detach()), gain.detach())


def test_a_trial_repeats_to_the_bit():
    params = {"storage": "stochastic", "offset": True, "rate": 3e-3, "decay": 0.0, "seed": 0, "steps": 2}
    found = frozen_gains.measure(params)
    assert found == frozen_gains.measure(params)
    assert found["moved_at_once"] == 1.0
    assert math.isfinite(found["validation"])
    assert found != frozen_gains.measure({**params, "seed": 1})


def test_the_quick_set_is_part_of_the_full_one_and_cheap():
    quick, full = frozen_gains.trials(True), frozen_gains.trials(False)
    assert all(trial in full for trial in quick)
    assert sum(map(frozen_gains.seconds, quick)) < 180
