"""swap-layers: every norm that one of our layers equals, nothing else, under the same names, and back."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import pytest
import torch
from torch import nn

import normwise as nw
from normwise import layers
from normwise.conversions import Plan, apply_to_model, apply_to_state, swap_layers
from normwise.errors import ConversionRefused
from normwise.graph.capture import tensors_in
from normwise.layers._norm_module import NormModule
from normwise.targets import load
from tests.conversions import hand_written as hand
from tests.conversions.hand_written import of_transformers, redrawn, relative

MODELS = ("llama", "bert", "gpt2", "t5", "albert", pytest.param("resnet", marks=pytest.mark.slow))
TO_THE_BIT = {"llama", "bert", "gpt2", "t5", "albert"}  # torch's CPU kernels of batch norms add in another order


def swapped(model: nn.Module) -> tuple[Any, Plan]:
    plan = swap_layers.plan_of_model(model)
    twin = copy.deepcopy(model)
    apply_to_model(plan, twin)
    return twin, plan


def outputs(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(tensors_in(model(x)))


# -- which layer takes whose place ---------------------------------------------------------------

TORCH = [
    (nn.LayerNorm(6), layers.LayerNorm, (2, 3, 6)),
    (nn.LayerNorm(6, bias=False), layers.LayerNorm, (2, 3, 6)),
    (nn.LayerNorm([4, 6]), layers.LayerNorm, (2, 3, 4, 6)),
    (nn.LayerNorm(6, elementwise_affine=False), layers.LayerNorm, (2, 3, 6)),
    (nn.RMSNorm(6), layers.RMSNorm, (2, 3, 6)),
    (nn.GroupNorm(3, 6), layers.GroupNorm, (2, 6, 5)),
    (nn.BatchNorm1d(6), layers.BatchNorm1d, (4, 6, 5)),
    (nn.BatchNorm2d(6, momentum=None), layers.BatchNorm2d, (4, 6, 5, 2)),
    (nn.BatchNorm2d(6, affine=False), layers.BatchNorm2d, (4, 6, 5, 2)),
    (nn.BatchNorm3d(6, track_running_stats=False), layers.BatchNorm3d, (4, 6, 5, 2, 3)),
    (nn.InstanceNorm2d(6), layers.InstanceNorm2d, (2, 6, 5, 4)),
    (nn.InstanceNorm1d(6, affine=True), layers.InstanceNorm1d, (2, 6, 5)),
    (nn.InstanceNorm1d(6, affine=True, track_running_stats=True), layers.InstanceNorm1d, (2, 6, 5)),
]
HAND_WRITTEN = [
    (hand.GammaBeta(6), layers.LayerNorm, (2, 3, 6)),
    (hand.Scaled(6), layers.RMSNorm, (2, 3, 6)),
    (hand.ImageNorm(6), layers.Norm, (2, 6, 5, 4)),
    (hand.OwnBatchNorm(6), layers.BatchNorm, (4, 6, 5)),
    (hand.Weightless(), layers.Norm, (2, 3, 6)),
    (hand.Activated(6), layers.BatchNorm2d, (4, 6, 5, 2)),
]


@pytest.mark.parametrize(("norm", "layer", "shape"), TORCH + HAND_WRITTEN, ids=lambda each: str(each)[:40])
def test_the_natural_layer_takes_the_place_with_the_same_tensors_values_and_gradients(
    norm: nn.Module, layer: type, shape: tuple[int, ...]
) -> None:
    model = redrawn(nn.Sequential(copy.deepcopy(norm)))
    twin, plan = swapped(model)
    assert isinstance(twin[0], layer), plan.refused
    assert list(twin.state_dict()) == list(model.state_dict())
    assert dict(twin.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for training in (True, True, False):
        x = torch.randn(shape, requires_grad=True)
        y, ours = model.train(training)(x), twin.train(training)(x)
        assert relative(ours, y) <= 1e-5
        direction = torch.randn_like(y)
        wanted = torch.autograd.grad((y * direction).sum(), [x, *model.parameters()])
        found = torch.autograd.grad((ours * direction).sum(), [x, *twin.parameters()])
        assert all(relative(a, b, 0.1) <= 1e-4 for a, b in zip(found, wanted, strict=True))
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            assert relative(twin.get_buffer(name), buffer) <= 1e-5


TRANSFORMERS = {
    "llama.LlamaRMSNorm": (layers.RMSNorm, "before_weight", 0),
    "t5.T5LayerNorm": (layers.RMSNorm, "to_weight", 0),
    "gemma.GemmaRMSNorm": (layers.RMSNorm, "after_weight", 1),
    "nemotron.NemotronLayerNorm1P": (layers.LayerNorm, "none", 1),
    "cohere.CohereLayerNorm": (layers.LayerNorm, "after_weight", 0),
    "olmo.OlmoLayerNorm": (layers.LayerNorm, "none", 0),
    "olmo2.Olmo2RMSNorm": (layers.RMSNorm, "after_weight", 0),
    "deberta.DebertaLayerNorm": (layers.LayerNorm, "before_weight", 0),
    "imagegpt.ImageGPTLayerNorm": (layers.RMSNorm, "none", 0),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_transformers_are_equal_to_the_bit(name: str, dtype: torch.dtype) -> None:
    layer, _, offset = TRANSFORMERS[name]
    model = redrawn(nn.Sequential(of_transformers(name, 24)), low=0.5 - offset).to(dtype)
    twin, plan = swapped(model)
    assert type(twin[0]) is layer
    assert "equal to the bit in float32, bfloat16, float16" in plan.changes[0].how
    x = torch.randn(3, 5, 24).to(dtype)
    assert twin(x).dtype is model(x).dtype
    assert torch.equal(twin(x), model(x))


def test_the_convention_is_read_off_what_a_module_computes() -> None:
    for name, (_, cast, offset) in TRANSFORMERS.items():
        twin, _ = swapped(nn.Sequential(of_transformers(name, 24)))
        if cast != "none":
            assert (twin[0].spec.cast, twin[0].spec.weight_offset) == (cast, offset), name


def test_a_gated_norm_keeps_its_second_argument() -> None:
    theirs = redrawn(nn.Sequential(of_transformers("qwen3_next.Qwen3NextRMSNormGated", 24)))
    twin, _ = swapped(theirs)
    x, gate = torch.randn(2, 3, 24), torch.randn(2, 3, 24)
    assert isinstance(twin[0], layers.GatedRMSNorm)
    assert relative(twin[0](x, gate), theirs[0](x, gate=gate)) < 1e-6


# -- whole models --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_stay_the_same_and_load_both_ways(name: str) -> None:
    target = load(f"hf:{name}")
    model = redrawn(target.model.eval())
    twin, plan = swapped(model)
    assert len(plan.changes) >= 3
    assert plan.refused == ()
    assert list(twin.state_dict()) == list(model.state_dict())
    assert not [
        path for path, m in twin.named_modules() if "Norm" in type(m).__name__ and not isinstance(m, NormModule)
    ]
    with torch.no_grad():
        pairs = list(zip(tensors_in(target.run(twin)), tensors_in(target.run(model)), strict=True))
    assert all(relative(a, b) < 1e-5 for a, b in pairs)
    if name in TO_THE_BIT:
        assert all(torch.equal(a, b) for a, b in pairs)
    redrawn(twin, seed=1)
    model.load_state_dict(twin.state_dict(), strict=True)
    with torch.no_grad():
        pairs = list(zip(tensors_in(target.run(twin)), tensors_in(target.run(model)), strict=True))
    assert all(relative(a, b) < 1e-5 for a, b in pairs)
    twin.load_state_dict(model.state_dict(), strict=True)


def test_a_module_used_in_many_places_is_replaced_once_and_stays_shared() -> None:
    norm = nn.LayerNorm(6)
    model = nn.ModuleDict({"a": nn.Sequential(norm), "b": nn.Sequential(nn.Linear(6, 6), norm)})
    twin, plan = swapped(model)
    assert [change.path for change in plan.changes] == ["a.0"]
    assert twin["a"][0] is twin["b"][1]
    assert isinstance(twin["a"][0], layers.LayerNorm)
    assert list(twin.state_dict()) == list(model.state_dict())


def test_a_parameter_shared_by_two_norms_stays_one() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6))
    model[1].weight = model[0].weight
    twin, _ = swapped(model)
    assert twin[1].weight is twin[0].weight


def test_mode_gradients_dtype_and_the_parameters_themselves_are_kept() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.BatchNorm1d(6)).to(torch.bfloat16)
    model[0].weight.requires_grad_(False)
    model[1].eval()
    before = dict(model.named_parameters())
    nw.accelerate(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert (model[0].training, model[1].training) == (True, False)
    assert (model[0].weight.requires_grad, model[0].bias.dtype) == (False, torch.bfloat16)


# -- names of their own --------------------------------------------------------------------------


def test_parameters_under_other_names_keep_them_through_copies_files_and_casts() -> None:
    model = redrawn(nn.Sequential(hand.GammaBeta(6), hand.OwnBatchNorm(6)))
    twin, _ = swapped(model)
    assert list(twin.state_dict()) == [
        *("0.gamma", "0.beta", "1.gain", "1.shift", "1.moving_mean", "1.moving_var", "1.batches"),
    ]
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    x = torch.randn(5, 6)
    for other in (copy.deepcopy(twin), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), twin(x))
        other[0].gamma.data.add_(1)
        assert not torch.equal(other(x), twin(x))
    assert twin.double()(x.double()).dtype is torch.float64
    assert twin.load_state_dict(model.state_dict(), strict=True, assign=True)
    assert torch.equal(twin[0].weight, model[0].gamma)


def test_a_gain_of_another_shape_keeps_it_and_is_trained() -> None:
    model = redrawn(nn.Sequential(hand.ImageNorm(6)))
    twin, _ = swapped(model)
    assert twin.state_dict()["0.weight"].shape == (6, 1, 1)
    twin(torch.randn(2, 6, 3, 3)).sum().backward()
    assert twin[0]._parameters["weight"].grad.shape == (6, 1, 1)


# -- the plan ------------------------------------------------------------------------------------


def test_a_plan_survives_json_and_serves_state_dicts() -> None:
    model = redrawn(nn.Sequential(hand.GammaBeta(6), nn.BatchNorm1d(6), nn.GroupNorm(2, 6), hand.Scaled(6)))
    plan = swap_layers.plan_of_model(model)
    twin = copy.deepcopy(model)
    again = Plan.from_json(json.dumps(plan.to_json()))
    apply_to_model(again, twin)
    x = torch.randn(4, 6)
    assert relative(twin.eval()(x), model.eval()(x)) < 1e-6
    assert apply_to_state(again, model.state_dict()).keys() == model.state_dict().keys()


def test_a_tensor_with_two_names_in_its_module_keeps_both() -> None:
    model = redrawn(nn.Sequential(nn.LayerNorm(6)))
    model[0].gain = model[0].weight
    twin, plan = swapped(model)
    assert list(twin.state_dict()) == ["0.weight", "0.bias", "0.gain"]
    assert "its gain is no gain, shift or running statistic" in plan.refused[0].why


def test_convert_copies_and_proves() -> None:
    model = redrawn(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)))
    converted = nw.convert("swap-layers", model, torch.randn(2, 6))
    assert type(model[1]) is nn.LayerNorm
    assert isinstance(converted.model.get_submodule("1"), layers.LayerNorm)
    assert converted.plan.exact
    assert "equal to the bit in float32" in converted.changes[0].how


def test_a_second_time_there_is_nothing_to_do() -> None:
    model = nn.Sequential(nn.LayerNorm(6), hand.GammaBeta(6))
    assert len(nw.accelerate(model).replaced) == 2
    again = nw.accelerate(model)
    assert (again.replaced, again.left) == ((), ())
    with pytest.raises(ConversionRefused, match="no norm of this kind"):
        nw.convert("swap-layers", model, torch.randn(2, 6))


@pytest.mark.parametrize("option", [{"to": "rmsnorm"}, {"to": "group-norm", "groups": 0}])
def test_options_that_do_not_exist_are_named(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"choose from rms-norm, layer-norm|a GroupNorm has at least 1 group"):
        nw.conversions.plan("swap-layers", nn.Sequential(nn.LayerNorm(6)), torch.randn(2, 6), **option)


# -- back ----------------------------------------------------------------------------------------


def test_restore_puts_the_old_modules_back_with_the_weights_of_now() -> None:
    model = redrawn(nn.Sequential(hand.GammaBeta(6), hand.OwnBatchNorm(6), nn.LayerNorm(6)))
    classes = [type(each) for each in model]
    nw.accelerate(model)
    twin = copy.deepcopy(model)
    for _ in range(2):
        twin.train()(torch.randn(4, 6)).sum().backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(0.1)
    x = torch.randn(4, 6)
    trained = twin.eval()(x)
    assert swap_layers.restore(twin) == ("0", "1", "2")
    assert [type(each) for each in twin] == classes
    assert not twin[1].training
    assert relative(twin(x), trained) < 1e-6
    assert swap_layers.restore(twin) == ()
    assert isinstance(model[0], layers.LayerNorm)  # the copy was restored, not this one


def test_restore_keeps_shared_modules_shared_and_follows_loads_and_casts() -> None:
    norm = hand.GammaBeta(6)
    model = nn.Sequential(norm, nn.Linear(6, 6), norm)
    nw.accelerate(model)
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
    model.to(torch.bfloat16)
    swap_layers.restore(model)
    assert model[0] is model[2] is norm
    assert (norm.gamma.dtype, norm.gamma[0].item()) == (torch.bfloat16, 2.0)
