from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.checkup.rules.gain_models import WIDTH, Offset, X, chain, gains, load, offset, plain, stored, train
from tests.checkup.rules.judging import findings

GEMMA, LLAMA = {"model_type": "gemma2"}, {"model_type": "llama"}


def loaded(model: nn.Sequential, mean: float, **how: Any) -> tuple[nn.Sequential, dict[str, torch.Tensor]]:
    checkpoint = stored(model, mean)
    load(model, checkpoint, **how)
    return model, checkpoint


@pytest.mark.parametrize("config", [GEMMA, {"text_config": {"model_type": "gemma3_text"}}, None], ids=str)
def test_gains_of_a_unit_offset_in_a_plain_norm_are_an_error_with_its_repair(config: Any) -> None:
    model, checkpoint = loaded(plain(), 0.0)
    (found,) = findings("PAR002", model, X, checkpoint=checkpoint, config=config)
    assert found.severity == "error"
    assert found.paths == ("1", "3", "5")
    assert found.counterfactual is not None
    assert found.counterfactual["before"] < 0.4
    assert 0.9 < found.counterfactual["after"] < 1.1


def test_a_family_is_witness_enough_without_a_checkpoint() -> None:
    model, _ = loaded(plain(), 0.0)
    (found,) = findings("PAR002", model, X, config=GEMMA)
    assert found.evidence["witness"] == "family"


def test_stored_gains_need_not_lie_around_zero_where_the_family_is_known() -> None:
    model, checkpoint = loaded(plain(), 0.5)
    assert len(findings("PAR002", model, X, checkpoint=checkpoint, config=GEMMA)) == 1


def test_a_loader_that_adds_the_one_is_sound() -> None:
    model, checkpoint = loaded(plain(), 0.0, add=1.0)
    assert findings("PAR002", model, X, checkpoint=checkpoint, config=GEMMA) == []


def test_one_gain_that_a_converter_forgot_is_found() -> None:
    model, checkpoint = loaded(plain(), 0.0, add=1.0, spared=("5.weight",))
    (found,) = findings("PAR002", model, X, checkpoint=checkpoint)
    assert found.paths == ("5",)


def test_a_one_that_was_added_twice_is_found() -> None:
    model, checkpoint = loaded(offset(), 0.0, add=1.0)
    (found,) = findings("PAR002", model, X, checkpoint=checkpoint)
    assert found.counterfactual is not None
    assert found.counterfactual["before"] / found.counterfactual["after"] > 1.8


def test_plain_gains_in_a_norm_that_adds_one_need_their_family_as_a_witness() -> None:
    model, checkpoint = loaded(offset(), 1.0)
    assert len(findings("PAR002", model, X, checkpoint=checkpoint, config=LLAMA)) == 1
    # trained gains of Gemma are as large: by themselves they prove nothing
    for config in (None, GEMMA):
        assert [f.severity for f in findings("PAR002", model, X, checkpoint=checkpoint, config=config)] == ["info"]
    deep, checkpoint = loaded(offset(), 1.3)
    assert findings("PAR002", deep, X, checkpoint=checkpoint, config=GEMMA) == []


@pytest.mark.parametrize("score", [False, True], ids=["a loss", "a score"])
@pytest.mark.parametrize(("added", "expected"), [(1.0, ["error"]), (0.0, [])], ids=["twice", "once"])
def test_the_loss_on_the_data_is_a_witness_for_a_one_too_many(added: float, expected: list[str], score: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*offset(4), nn.Linear(WIDTH, 3)), torch.randn(64, WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(100):
        optimizer.zero_grad()
        (model(x) - x[:, :3]).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for i in range(1, 8, 2):
            model[i].get_parameter("weight").add_(added)

    def evaluate(model: nn.Module, batches: Any) -> float:
        total = sum(float((model(batch) - batch[:, :3]).square().mean()) for batch in batches)
        return -total if score else total

    found = findings("PAR002", model, x, eval_fn=evaluate, config=GEMMA)
    loud = [f for f in found if f.severity != "info"]
    assert [str(f.severity) for f in loud] == ([] if score else expected)
    for f in loud:
        assert f.counterfactual is not None
        assert f.counterfactual["after"] < f.counterfactual["before"]


def test_a_unit_offset_model_with_its_own_gains_is_sound() -> None:
    model, checkpoint = loaded(offset(), 0.0)
    assert findings("PAR002", model, X, checkpoint=checkpoint, config=GEMMA) == []


def test_a_reference_whose_gains_are_one_larger_is_a_witness() -> None:
    model, checkpoint = loaded(plain(), 0.0)
    right = plain()
    load(right, checkpoint, add=1.0)
    (found,) = findings("PAR002", model, X, reference=right)
    assert found.evidence["witness"] == "reference"
    assert findings("PAR002", right, X, reference=right) == []


@pytest.mark.parametrize("made", [plain(), offset()], ids=["plain", "offset"])
def test_trained_models_of_either_kind_are_sound(made: nn.Sequential) -> None:
    assert findings("PAR002", train(made), X) == []


def test_gains_at_their_initial_value_are_sound_in_every_family() -> None:
    for model in (plain(), offset()):
        for config in (GEMMA, LLAMA, {"model_type": "nobody-knows"}, None):
            assert findings("PAR002", model, X, config=config) == []


def test_the_names_of_a_chain_are_those_of_its_gains() -> None:
    assert gains(plain(2)) == ["1.weight", "3.weight"]


class Gated(nn.Module):
    """A norm scaled by the sigmoid of a parameter, which lies around 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * torch.sigmoid(self.gate)


def test_the_parameter_of_a_gate_is_no_gain() -> None:
    model = chain(Gated(), Gated())
    random = torch.Generator().manual_seed(0)
    checkpoint = {k: torch.randn(t.shape, generator=random) * 0.2 for k, t in model.state_dict().items()}
    model.load_state_dict(checkpoint)
    assert findings("PAR002", model, X, checkpoint=checkpoint, config=GEMMA) == []


def test_plain_norms_beside_those_with_an_offset_may_be_plain_in_the_family_too() -> None:
    model = chain(Offset(), Offset(), nn.RMSNorm(WIDTH, eps=1e-6))
    checkpoint = stored(model, 0.0)
    checkpoint["5.weight"] += 1
    model.load_state_dict(checkpoint)
    assert findings("PAR002", model, X, checkpoint=checkpoint, config={"model_type": "qwen3_next"}) == []
