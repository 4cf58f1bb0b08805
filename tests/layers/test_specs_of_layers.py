"""The spec of a layer is the norm it computes, and stays so when the layer is changed."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from normwise import layers
from normwise.layers import FAMILIES, convention_of, families_of
from normwise.spec import Cast, Modulation, NormSpec, Scope, Weight, reference
from normwise.spec.definition import plain

LIKE_TORCH = {"momentum", "cast"}  # the momentum is the layer's; of equal casts convention_of names another
MEASURED = {
    "batch": (lambda: layers.BatchNorm1d(8), (4, 8, 5)),
    "batch without affine": (lambda: layers.BatchNorm1d(8, affine=False), (4, 8, 5)),
    "batch of images": (lambda: layers.BatchNorm2d(8), (4, 8, 3, 5)),
    "batch of sequences": (lambda: layers.BatchNorm(8, channel_dim=-1), (4, 5, 8)),
    "gated in groups": (lambda: layers.GatedRMSNorm(8, groups=2), None),
    "group": (lambda: layers.GroupNorm(2, 8), (4, 8, 5)),
    "instance": (lambda: layers.InstanceNorm1d(8, affine=True), (4, 8, 5)),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_spec_of_a_layer_is_the_one_that_is_measured(name: str) -> None:
    build, shape = MEASURED[name]
    layer = build()
    with plain():  # the order of operations is that of the definition, not of a compiled kernel
        found = convention_of(layer, example=None if shape is None else torch.randn(shape))
    names = [each.name for each in fields(NormSpec) if each.name not in LIKE_TORCH]
    assert {each: getattr(layer.spec, each) for each in names} == {each: getattr(found, each) for each in names}


def test_channels_on_a_late_axis_have_all_axes_before_them_in_the_spec() -> None:
    assert layers.BatchNorm(8, channel_dim=3).spec.axes == (-4, -3, -2)


class Annotated(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + 1e-6) + self.b_2


def test_the_norm_of_the_annotated_transformer_is_known_by_its_name() -> None:
    assert families_of(convention_of(Annotated(8))) == ("annotated-transformer",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_the_annotated_transformer_is_computed_from_left_to_right(dtype: torch.dtype) -> None:
    norm = layers.LayerNorm.like("annotated-transformer", 48, dtype=dtype)
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((99, 48), (48,), (48,)))
    norm.load_state_dict({"weight": weight, "bias": bias})
    std = x.var(-1, keepdim=True).sqrt()  # torch.std differs by a unit in the last place
    assert torch.equal(norm(x), weight * (x - x.mean(-1, keepdim=True)) / (std + 1e-6) + bias)


SET = {
    "layer": (lambda: layers.LayerNorm(3), nn.LayerNorm(3), (4, 3)),
    "rms": (lambda: layers.RMSNorm(3), nn.RMSNorm(3), (4, 3)),
    "group": (lambda: layers.GroupNorm(1, 3), nn.GroupNorm(1, 3), (4, 3, 5)),
    "batch": (lambda: layers.BatchNorm1d(3), nn.BatchNorm1d(3), (4, 3)),
    "instance": (lambda: layers.InstanceNorm1d(3), nn.InstanceNorm1d(3), (4, 3, 5)),
}


@pytest.mark.parametrize("name", SET)
def test_an_eps_that_is_set_later_counts_as_in_torch(name: str) -> None:
    build, twin, shape = SET[name]
    layer, x = build(), torch.randn(shape)
    layer.eps = twin.eps = 0.5
    assert layer.eps == layer.spec.eps == 0.5
    assert "eps=0.5" in repr(layer)
    torch.testing.assert_close(layer(x), twin(x))


def test_channel_norms_take_eps_and_parameters_of_a_spec() -> None:
    assert layers.ChannelLayerNorm(4).eps == layers.ChannelRMSNorm(4).eps == 1e-6
    assert layers.ChannelLayerNorm(4, spec=FAMILIES["bert"]).eps == 1e-12
    assert layers.ChannelLayerNorm(4, 1e-3, spec=FAMILIES["bert"]).eps == 1e-3
    assert layers.ChannelLayerNorm(4, spec=FAMILIES["cohere"]).bias is None
    weightless = layers.ChannelRMSNorm(4, spec=FAMILIES["nanochat"])
    assert weightless.weight is None
    assert not weightless.elementwise_affine


@pytest.mark.parametrize("build", [layers.ChannelRMSNorm, lambda n, spec: layers.QKNorm(n, 2, spec=spec).q_norm])
def test_a_scalar_gain_of_a_spec_is_one_number(build: type[nn.Module]) -> None:
    assert build(4, spec=NormSpec(weight=Weight.SCALAR)).weight.shape == ()


def test_heads_together_share_a_scalar_gain() -> None:
    norm = layers.QKNorm(4, 2, over="all_heads", spec=NormSpec(weight=Weight.SCALAR))
    norm.load_state_dict({"q_norm.weight": torch.tensor(3.0), "k_norm.weight": torch.tensor(1.0)})
    q = torch.randn(2, 5, 2, 4)
    expected = 3 * reference(NormSpec(scope=Scope.HIDDEN, axes=(-2, -1)), q)
    torch.testing.assert_close(norm(q, q)[0], expected)


MISFITS = {
    "no gate": (lambda: layers.GatedRMSNorm(4, spec=FAMILIES["llama"]), "gate='after', given a spec with gate='none'"),
    "a gate": (lambda: layers.RMSNorm(4, spec=FAMILIES["mamba2-gated"]), "gate='none', given a spec with gate='bef"),
    "a scale": (
        lambda: layers.LayerNorm(4, spec=NormSpec(modulation=Modulation.SCALE)),
        "given a spec with modulation='sc",
    ),
    "gated channels": (
        lambda: layers.ChannelRMSNorm(4, spec=FAMILIES["mamba2-gated"]),
        "ChannelRMSNorm .* gate='no",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_an_operand_that_a_layer_cannot_take_is_refused_and_not_forgotten(name: str) -> None:
    build, said = MISFITS[name]
    with pytest.raises(ValueError, match=said):
        build()


def test_a_gated_layer_takes_either_order_of_a_spec() -> None:
    assert layers.GatedRMSNorm(4, spec=replace(FAMILIES["mamba2-gated"], cast=Cast.NONE)).spec.gate == "before"


def test_the_spec_of_a_batch_norm_is_the_one_that_probing_finds() -> None:
    for norm in (layers.BatchNorm1d(6, momentum=0.2), layers.BatchNorm1d(6, track_running_stats=False)):
        assert layers.convention_of(norm).momentum == norm.spec.momentum == (0.2 if norm.track_running_stats else None)
