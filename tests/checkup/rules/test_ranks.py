"""Rules on distributed norms: by configuration, inputs of another rank, state dicts, and on two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import ranks
from tests.checkup.rules.judging import findings, severities, why_not

LIMIT = 120  # seconds for two processes on a busy machine; 10 alone
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def network(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 2))


@pytest.mark.parametrize("config", [{"world_size": 4}, {"distributed": {"num_processes": 4}}], ids=str)
def test_a_plain_batch_norm_with_few_values_on_several_processes_is_a_warning(config: Any) -> None:
    (found,) = findings("DST001", network(nn.BatchNorm1d(8)), X, config=config)
    assert found.severity == "warning"
    assert found.evidence["values_per_channel"] == 8
    assert found.counterfactual == {
        "change": "statistics over 4 processes",
        "metric": "relative_error_of_a_variance",
        "before": 0.5,
        "after": 0.25,
    }


def test_enough_values_one_process_frozen_and_synchronized_norms_are_sound() -> None:
    several = {"world_size": 4}
    assert findings("DST001", network(nn.BatchNorm1d(8)), X.repeat(2, 1), config=several) == []
    assert findings("DST001", network(nn.BatchNorm1d(8)), X, config={"world_size": 1}) == []
    assert findings("DST001", network(nn.SyncBatchNorm(8)), X, config=several) == []
    assert findings("DST001", network(nn.LayerNorm(8)), X, config=several) == []
    frozen = network(nn.BatchNorm1d(8))
    frozen[1].eval()
    assert findings("DST001", frozen, X, config=several) == []
    assert findings("DST001", network(nn.BatchNorm1d(8)).eval(), X, config=several) == []


def test_the_batch_of_a_loader_is_what_counts() -> None:
    loader = [(X.repeat(4, 1),), (X.repeat(4, 1),)]
    assert findings("DST001", network(nn.BatchNorm1d(8)), X, config={"world_size": 4}, loader=loader) == []


class Branching(nn.Module):
    """Calls its norm once for each row that is not zero."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 8), norm

    def forward(self, x: Tensor, items: Tensor) -> Tensor:
        x = self.up(x)
        for _ in range(int((items != 0).sum())):
            x = self.norm(x)
        return x


TWO, ONE = torch.tensor([1, 1]), torch.tensor([1, 0])


def test_a_synchronizing_norm_that_ranks_call_differently_often_is_an_error() -> None:
    (found,) = findings("DST004", Branching(nn.SyncBatchNorm(8)), X, TWO, inputs_other_rank=(X, ONE))
    assert (found.severity, found.path) == ("error", "norm")
    assert (found.evidence["value"], found.evidence["on_the_other_rank"]) == (2, 1)


def test_a_norm_that_waits_for_nobody_is_worth_knowing() -> None:
    assert severities("DST004", Branching(nn.BatchNorm1d(8)), X, TWO, inputs_other_rank=(X, ONE)) == ["info"]


def test_equal_calls_are_sound_and_other_inputs_are_needed() -> None:
    model = Branching(nn.SyncBatchNorm(8))
    assert findings("DST004", model, X, TWO, inputs_other_rank={"x": X + 1, "items": TWO}) == []
    assert "inputs_other_rank=" in why_not("DST004", model, X, TWO)
    assert "refused" in why_not("DST004", model, X, TWO, inputs_other_rank=(X[:, :2], ONE))


def states(model: nn.Module, **changed: Tensor) -> list[dict[str, Tensor]]:
    first = {k: t.clone() for k, t in model.state_dict().items()}
    return [first, {k: t + changed.get(k.replace(".", "_"), torch.zeros(())) for k, t in first.items()}]


def test_state_dicts_of_ranks_are_compared_without_processes() -> None:
    model = network(nn.LayerNorm(8))
    drifted = {"rank_states": states(model, **{"1_weight": torch.tensor(1e-3)})}
    assert severities("DST002", model, X, config=drifted) == ["error"]
    assert findings("DST002", model, X, config={"rank_states": states(model)}) == []
    assert "several ranks" in why_not("DST002", model, X)
    assert "list of dicts" in why_not("DST002", model, X, config={"rank_states": "both"})


def test_stages_of_a_pipeline_are_no_copies() -> None:
    model, other = network(nn.LayerNorm(8)), network(nn.LayerNorm(8))
    torch.manual_seed(0)
    for made in (model, other):
        nn.init.normal_(made.get_parameter("1.weight"), 1.0, 0.5)
    parts = {"rank_states": [dict(model.state_dict()), dict(other.state_dict())]}
    assert "different parts" in why_not("DST002", model, X, config=parts)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the rules say on two processes."""
    return ranks.run("tests.checkup.rules.rank_worker", 2, tmp_path_factory.mktemp("ranks"), limit=LIMIT)


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_are_compared_and_left_as_they_were(two: list[dict[str, Any]], rank: int) -> None:
    said = {name: result["findings"] for name, result in two[rank].items() if name != "alone"}
    assert said == {
        "same": {},
        "drifted": {"DST002": "error"},
        "seen": {"DST003": "info"},
        "parts": {},
        "partial": {"DST005": "error"},
        "reduced": {},
    }
    assert "different parts" in two[rank]["parts"]["not checked"]["DST002"]
    assert all(result["unchanged"] for result in two[rank].values())


def test_a_check_on_one_rank_alone_ends_and_says_so(two: list[dict[str, Any]]) -> None:
    assert "every rank" in two[0]["alone"]["not checked"]["DST002"]
