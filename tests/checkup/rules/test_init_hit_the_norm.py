from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normwise as nw
from normwise.targets import Target, Weights
from tests.checkup.rules.gain_models import WIDTH, Offset, X, chain, offset, plain, train
from tests.checkup.rules.judging import findings

Init = Callable[[Tensor], object]


def hit(model: nn.Module, init: Init) -> nn.Module:
    torch.manual_seed(4)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            init(parameter.data)
    return model


def normal(tensor: Tensor) -> Tensor:
    return tensor.normal_(0.0, 0.02)


def uniform(tensor: Tensor) -> Tensor:
    return tensor.uniform_(-0.1, 0.1)


@pytest.mark.parametrize("init", [normal, uniform])
@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.RMSNorm(WIDTH)], ids=str)
def test_gains_drawn_around_zero_are_an_error(norm: nn.Module, init: Init) -> None:
    (found,) = findings("PAR003", hit(chain(norm, nn.LayerNorm(WIDTH)), init), X)
    assert found.severity == "error"
    assert found.paths == ("1", "3")
    assert abs(found.evidence["value"]) < 0.05


def test_the_repair_restores_the_size() -> None:
    (found,) = findings("PAR003", hit(plain(), normal), X)
    assert found.counterfactual is not None
    assert found.counterfactual["before"] < 0.05
    assert found.counterfactual["after"] == pytest.approx(1.0, abs=0.05)


def test_gains_spread_over_zero_to_one_are_a_warning_but_for_batch_norms() -> None:
    unit: Init = lambda tensor: tensor.uniform_(0.0, 1.0)  # noqa: E731
    (found,) = findings("PAR003", hit(chain(nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)), unit), X)
    assert found.severity == "warning"
    assert findings("PAR003", hit(chain(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)), unit), X) == []


def test_gains_drawn_around_one_are_sound_as_in_gans() -> None:
    around: Init = lambda tensor: tensor.normal_(1.0, 0.02)  # noqa: E731
    assert findings("PAR003", hit(plain(), around), X) == []


def test_weights_drawn_around_zero_are_sound_where_the_norm_adds_one() -> None:
    assert findings("PAR003", hit(offset(), normal), X) == []


def test_a_residual_scale_of_zero_is_sound() -> None:
    made = chain(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))
    nn.init.zeros_(made.get_parameter("3.weight"))
    assert findings("PAR003", made, X) == []


def test_a_short_vector_is_no_distribution() -> None:
    made = nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4))
    assert findings("PAR003", hit(made, normal), X) == []


def test_trained_and_loaded_models_are_not_judged() -> None:
    made = hit(plain(), normal)
    assert findings("PAR003", made, X, checkpoint=dict(made.state_dict())) == []
    counted = hit(chain(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)), normal)
    counted(X)
    assert findings("PAR003", counted, X) == []
    assert findings("PAR003", train(chain(Offset(), nn.LayerNorm(WIDTH))), X) == []


def test_an_architecture_built_with_random_weights_is_worth_knowing() -> None:
    target = Target(model=hit(plain(), normal), args=(X,), weights=Weights.RANDOM)
    assert [str(f.severity) for f in nw.check(target, select="PAR003").findings] == ["info"]
