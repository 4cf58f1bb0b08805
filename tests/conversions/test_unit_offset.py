"""unit-offset: the gain w stored as w - 1, to the bit where that can be stored, refused where not."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import normwise as nw
from normwise import layers
from normwise.conversions import Plan, apply_to_model, apply_to_state, plan
from normwise.errors import ConversionRefused
from normwise.spec import NormSpec
from normwise.targets import load
from tests.conversions import hand_written as hand
from tests.conversions.hand_written import of_transformers, redrawn, relative

X = torch.randn(4, 5, 24, generator=torch.Generator().manual_seed(3))


def model_of(norm: nn.Module, dtype: torch.dtype = torch.float32, low: float = 0.5) -> Any:
    return redrawn(nn.Sequential(norm), low=low).to(dtype)


def planned(model: nn.Module, **options: Any) -> Plan:
    return plan("unit-offset", model, X.to(next(model.parameters()).dtype), **options)


def converted(model: nn.Module, **options: Any) -> tuple[Any, Plan]:
    made = planned(model, **options)
    twin = copy.deepcopy(model)
    apply_to_model(made, twin)
    return twin, made


NORMS = [
    nn.LayerNorm(24),
    nn.RMSNorm(24),
    layers.RMSNorm(24),
    layers.LayerNorm(24, bias=False),
    layers.Norm(NormSpec(axes=(-1,), factor=2.0), 24),
    hand.GammaBeta(24),
    hand.Scaled(24),
    *(of_transformers(name, 24) for name in ("llama.LlamaRMSNorm", "t5.T5LayerNorm", "olmo2.Olmo2RMSNorm")),
    *(of_transformers(name, 24) for name in ("cohere.CohereLayerNorm", "deberta.DebertaLayerNorm")),
]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gains_from_one_half_on_are_stored_exactly_and_come_back(norm: nn.Module, dtype: torch.dtype) -> None:
    model = model_of(copy.deepcopy(norm), dtype)
    twin, made = converted(model)
    assert made.exact
    assert made.changes[0].how == "exact"
    assert twin.state_dict().keys() == model.state_dict().keys()
    before, after = (next(iter(each.state_dict().values())) for each in (model, twin))
    assert torch.equal(after.double() + 1, before.double())
    y, ours = model(X.to(dtype)), twin(X.to(dtype))
    assert ours.dtype is y.dtype
    assert relative(ours, y) <= 4 * torch.finfo(dtype).eps
    back, _ = converted(twin, direction="from-offset")
    assert all(torch.equal(back.state_dict()[key], value) for key, value in model.state_dict().items())
    assert relative(back(X.to(dtype)), y) <= 4 * torch.finfo(dtype).eps


def test_every_gain_of_half_precision_from_one_half_to_the_documented_bound_can_be_stored() -> None:
    for dtype, bound in ((torch.bfloat16, 256), (torch.float16, 2048)):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        gains = every[(every >= 0.5) & (every <= bound)].double()
        assert torch.equal((gains - 1).to(dtype).double() + 1, gains)
        beyond = every[(every > bound) & every.isfinite()].double()
        assert not torch.equal((beyond - 1).to(dtype).double() + 1, beyond)
        below = every[(every > 0) & (every < 0.5)].double()
        assert not torch.equal((below - 1).to(dtype).double() + 1, below)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gain_that_cannot_be_stored_is_refused_with_the_change_and_rounded_with_consent(dtype: torch.dtype) -> None:
    model = model_of(nn.LayerNorm(24), dtype)
    model[0].weight.data[0] = 0.1
    made = planned(model)
    stored = model[0].weight.detach().double()
    change = float(((stored - 1).to(dtype).double() + 1 - stored).abs().max())
    assert change > 0
    assert made.changes == ()
    assert f"a gain would change by {change:.2g}" in made.refused[0].why
    assert "rounding=True consents" in made.refused[0].why
    twin, made = converted(model, rounding=True)
    assert (made.exact, len(made.changes)) == (False, 1)
    assert f"{change:.2g}" in made.changes[0].how
    assert relative(twin(X.to(dtype)), model(X.to(dtype))) < 4 * torch.finfo(dtype).eps


def test_from_the_offset_what_one_plus_v_cannot_hold_is_refused() -> None:
    model = model_of(of_transformers("gemma.GemmaRMSNorm", 24), torch.bfloat16, low=-0.01)
    made = planned(model, direction="from-offset")
    assert "bfloat16 cannot hold it plus 1" in made.refused[0].why
    model[0].weight.data.copy_(torch.arange(24) / 128)
    assert planned(model, direction="from-offset").changes[0].how == "exact"


def test_a_bfloat16_gain_that_was_frozen_at_one_moves() -> None:
    frozen: Any = nn.Sequential(nn.LayerNorm(24)).to(torch.bfloat16)
    twin, _ = converted(frozen)
    for model in (frozen, twin):
        for _ in range(20):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            (model(X.bfloat16()).float().square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert float(frozen[0].weight.detach().max()) == float(frozen[0].weight.detach().min()) == 1.0
    assert float(twin[0].weight.detach().abs().max()) > 0


def test_gradients_of_the_stored_gain_are_those_of_the_gain() -> None:
    model = model_of(nn.LayerNorm(24))
    twin, _ = converted(model)
    for each in (model, twin):
        (each(X) * X).sum().backward()
    for theirs, ours in zip(model.parameters(), twin.parameters(), strict=True):
        assert theirs.grad is not None
        assert ours.grad is not None
        assert relative(ours.grad, theirs.grad) < 1e-5


def test_a_second_time_there_is_nothing_to_do() -> None:
    twin, _ = converted(model_of(nn.Sequential(nn.LayerNorm(24), nn.RMSNorm(24))))
    with pytest.raises(ConversionRefused, match="nothing to do: the gains of its 2 norms are stored with the offset"):
        nw.convert("unit-offset", twin, X)
    with pytest.raises(ConversionRefused, match=r"nothing to do: .* its 1 norms are stored without the offset"):
        nw.convert("unit-offset", model_of(nn.LayerNorm(24)), X, direction="from-offset")


def test_norms_that_store_the_offset_already_stay_and_others_are_converted() -> None:
    model = redrawn(nn.Sequential(of_transformers("gemma.GemmaRMSNorm", 24), nn.LayerNorm(24)))
    twin, made = converted(model)
    assert [change.path for change in made.changes] == ["1"]
    assert twin[0] is not model[0]
    assert type(twin[0]) is type(model[0])


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        (nn.GroupNorm(1, 5), "it is a group norm, and our layer of those adds nothing to its gain"),
        (nn.BatchNorm1d(5), "it is a batch norm"),
        (layers.ScaleNorm(24), "its gain is one number"),
        (hand.Conditional(24), "takes 'skip' as well"),
    ],
)
def test_norms_whose_layer_adds_no_offset_are_refused(norm: nn.Module, why: str) -> None:
    made = planned(model_of(norm))
    assert made.changes == ()
    assert why in made.refused[0].why


def test_a_gain_shared_by_norms_is_stored_once_and_one_shared_with_something_else_is_refused() -> None:
    model = redrawn(nn.Sequential(nn.LayerNorm(24), nn.LayerNorm(24)))
    model[1].weight = model[0].weight
    twin, made = converted(model)
    assert made.recipes[0].keys == ("0.weight", "1.weight")
    assert twin[1].weight is twin[0].weight
    assert relative(twin(X), model(X)) < 1e-6
    model[1] = nn.PReLU(24)
    model[1].weight = model[0].weight
    assert "its gain is shared with 1.weight, which is no norm that is converted" in planned(model).refused[0].why


def test_a_module_used_twice_is_converted_once() -> None:
    norm = nn.LayerNorm(24)
    model = redrawn(nn.Sequential(norm, nn.Linear(24, 24), norm))
    twin, made = converted(model)
    assert len(made.changes) == 1
    assert twin[0] is twin[2]
    assert relative(twin(X), model(X)) < 1e-6


@pytest.mark.parametrize("empty", [torch.device("meta"), FakeTensorMode()], ids=["meta", "fake"])
def test_without_numbers_it_is_not_known_whether_a_gain_can_be_stored(empty: Any) -> None:
    with empty:
        model = nn.Sequential(nn.LayerNorm(24))
    made = nw.conversions.unit_offset.plan(nw.facts.Facts(nw.Target(model=model, args=(X,))))
    assert "its gain holds no numbers" in made.refused[0].why


def test_plans_survive_json_and_serve_state_dicts() -> None:
    model = model_of(hand.GammaBeta(24))
    made = planned(model)
    again = Plan.from_json(json.dumps(made.to_json()))
    state = apply_to_state(again, model.state_dict())
    assert torch.equal(state["0.gamma"], model[0].gamma.detach() - 1)
    twin = copy.deepcopy(model)
    apply_to_model(again, twin)
    twin.load_state_dict(state, strict=True)
    assert relative(twin(X), model(X)) < 1e-6


def test_a_direction_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="choose from to-offset, from-offset"):
        planned(model_of(nn.LayerNorm(24)), direction="up")


def test_a_whole_model_is_proved_and_stays_equal_to_the_bit_in_bfloat16() -> None:
    target = load("hf:llama")
    redrawn(target.model).to(torch.bfloat16)
    done = nw.convert("unit-offset", target)
    assert done.plan.exact
    assert len(done.changes) == 9
    assert "weight decay on the stored gains now pulls the gains to 1" in done.plan.notes[0]
    with torch.no_grad():
        assert torch.equal(target.run(done.model)[0], target.run()[0])
