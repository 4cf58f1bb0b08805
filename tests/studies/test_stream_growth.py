"""The study of the stream's size: its judges on made-up rows, a small trial, and the law against closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normwise.errors import NotKnown
from normwise.studies import stream_growth as study
from normwise.studies._initial import fresh, through, walk
from normwise.studies._study import Claim, Outcome, Row, Rows

ROOT, DOUBLE, HELD, ANY_WEIGHTS, TOLD = study.CLAIMS
TINY = {"placement": "pre", "init": "xavier", "mlp": "relu", "depth": 2, "width": 16, "embeddings": "unit", "seed": 0}


def row(
    placement: str = "pre", init: str = "xavier", *, embeddings: str = "unit", seed: int = 0, **metrics: Any
) -> Row:
    params = TINY | {"placement": placement, "init": init, "depth": 24, "embeddings": embeddings, "seed": seed}
    usual = {"q_first": 1.0, "q_last": 49.0, "growth": 49.0, "exponent": 0.5, "sum_v": 48.0, "told_error": [0.0, 0.02]}
    usual |= {"told_q": [1.0, 49.0], "q": [1.0, 49.0], "attention_add": 2.0, "mlp_add": 2.0, "layers": [0, 24]}
    return Row(params=params, metrics=usual | {"rho_last": 0.5} | metrics)


def outcome(claim: Claim, *rows: Row) -> Outcome:
    return claim.judge(Rows(rows)).outcome


@pytest.mark.parametrize(
    ("claim", "kept", "broken"),
    [
        (ROOT, row(), row(init="normal", exponent=0.1)),
        (DOUBLE, row(), row("post", attention_add=1.2, mlp_add=1.1)),
        (HELD, row(init="gpt-2", growth=1.1), row(init="gpt-2", embeddings="gpt-2", growth=3.0)),
        (ANY_WEIGHTS, row("sandwich"), row("sandwich", "normal", q_last=55.0)),
        (TOLD, row(), row(init="normal", q_last=45.0)),
    ],
)
def test_a_claim_is_confirmed_refuted_or_depends(claim: Claim, kept: Row, broken: Row) -> None:
    gpt_2 = row(init="gpt-2", embeddings="gpt-2", growth=1.0, exponent=0.5)
    others = (gpt_2,) if claim is HELD else ()
    assert outcome(claim, kept, *others) is Outcome.CONFIRMED
    assert outcome(claim, broken) is Outcome.REFUTED
    assert outcome(claim, kept, broken) is Outcome.DEPENDS


@pytest.mark.parametrize(
    ("claim", "rows"),
    [(ROOT, [row("post")]), (DOUBLE, [row(embeddings="gpt-2")]), (HELD, [row(init="gpt-2")]), (ANY_WEIGHTS, [row()])],
)
def test_missing_trials_are_no_verdict(claim: Claim, rows: list[Row]) -> None:
    with pytest.raises(NotKnown):
        claim.judge(Rows(rows))


def test_more_seeds_narrow_what_is_believed() -> None:
    far = [
        row(q_last=51.5, seed=seed) for seed in range(9)
    ]  # 5 % away: 2.6 deviations of one net, 7.7 of the mean of 9
    assert outcome(TOLD, far[0]) is Outcome.CONFIRMED
    assert outcome(TOLD, *far) is Outcome.REFUTED


def test_a_trial_is_deterministic_and_near_the_prediction() -> None:
    params = TINY | {"width": 32}
    first, again = study.measure(params), study.measure(params)
    assert first == again
    assert study.measure(params | {"seed": 1}) != first
    assert first["q"] == pytest.approx(first["told_q"], rel=0.35)
    assert first["layers"] == [0, 1, 2]
    assert all(len(value) <= 60 for value in first.values() if isinstance(value, list))


def test_branches_add_up() -> None:
    walked = through(TINY | {"placement": "sandwich", "width": 64}, backward=False)
    assert walked.branch == pytest.approx([1.0] * 4, rel=1e-3)  # a norm makes them 1
    assert walked.q[-1] == pytest.approx(walked.q[0] + 4, rel=0.3)
    assert walked.gradient == walked.down == walked.query == []


def test_a_walk_computes_what_the_stack_computes() -> None:
    torch.manual_seed(0)
    for placement in ("pre", "post", "deep-norm", "sandwich", "residual-multiplier"):
        stack = fresh(TINY | {"placement": placement}).double()
        x, head = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(7, 16, dtype=torch.float64)
        targets = torch.randint(7, (2, 5))
        walked = walk(stack, x, head, targets)
        entered = x.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy((stack(entered) @ head.T).flatten(0, 1), targets.flatten())
        (gradient,) = torch.autograd.grad(loss, entered)
        assert walked.gradient[0] == pytest.approx(float(gradient.pow(2).mean().sqrt()), rel=1e-9)
        if stack.final_norm is None:
            assert walked.q[-1] == pytest.approx(float(stack(x).detach().pow(2).mean()), rel=1e-9)


def test_the_quick_set_is_part_of_the_full_one() -> None:
    assert all(each in study.trials(quick=False) for each in study.trials(quick=True))
    assert sum(map(study.seconds, study.trials(quick=True))) < 180
