"""Batch norms are folded into the layer before them: every kind of layer and norm, exactly or not at all."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import normwise as nw
from normwise.conversions import Plan, apply_to_model, convert, plan
from tests.conversions.folding import EXACT, difference, folded, redrawn

Make = Callable[[], nn.Module]
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_norm_behind_a_convolution_goes_into_it(n: int, groups: int, bias: bool) -> None:
    model = nn.Sequential(CONVS[n](8, 16, 3, padding=1, stride=2, groups=groups, bias=bias), NORMS[n](16))
    made, converted = folded(model, 2, 8, *[7] * n)
    assert isinstance(converted[1], nn.Identity)
    assert made.created == (() if bias else ("0.bias",))
    assert not made.refused


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("groups", "outputs"), [(1, 12), (2, 12), (8, 16), (8, 8)])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_norm_behind_a_transposed_convolution_goes_into_it(n: int, groups: int, outputs: int, bias: bool) -> None:
    conv = TRANSPOSED[n](8, outputs, 3, stride=2, padding=1, output_padding=1, groups=groups, bias=bias)
    folded(nn.Sequential(conv, NORMS[n](outputs)), 2, 8, *[5] * n)


@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
def test_depthwise_layers_take_a_norm_over(make: Callable[..., nn.Module]) -> None:
    folded(nn.Sequential(make(6, 6, 3, groups=6, bias=False), nn.BatchNorm2d(6)), 2, 6, 7, 7)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_behind_a_linear_map_goes_into_it(affine: bool, bias: bool) -> None:
    folded(nn.Sequential(nn.Linear(5, 7, bias=bias), nn.BatchNorm1d(7, affine=affine)), 4, 5)


def test_a_norm_without_gain_and_shift_is_folded() -> None:
    folded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)), 2, 3, 6, 6)


def test_the_eps_of_the_norm_is_used() -> None:
    folded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=0.3)), 2, 3, 6, 6)


def test_several_norms_in_a_row_go_into_one_layer() -> None:
    made, _ = folded(nn.Sequential(nn.Conv2d(3, 4, 3), *(nn.BatchNorm2d(4) for _ in range(3))), 2, 3, 6, 6)
    assert len(made.changes) == 3


def test_every_norm_of_a_network_goes_into_the_layer_before_it() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
        nn.BatchNorm1d(5),
    )
    made, _ = folded(model, 2, 3, 6, 6)
    assert [change.path for change in made.changes] == ["1", "4", "8"]


class _Frozen(nn.Module):
    """The frozen norm of detection models, written out under names of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for name, start in (("gamma", 1.0), ("beta", 0.0), ("mu", 0.0), ("var", 1.0)):
            self.register_buffer(name, torch.full((size,), start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gamma, beta, mu, var = (b.reshape(1, -1, 1, 1) for b in self.buffers())
        scale = gamma * (var + 1e-4).rsqrt()
        return x * scale + (beta - mu * scale)


class _Centring(nn.Module):
    mu: torch.Tensor
    var: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(size, 1, 1))
        self.register_buffer("mu", torch.zeros(size, 1, 1))
        self.register_buffer("var", torch.ones(size, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mu) / torch.sqrt(self.var + 1e-3) * self.g


@pytest.mark.parametrize(
    "make",
    [
        lambda: _Frozen(4),
        lambda: _Centring(4),
        lambda: nn.SyncBatchNorm(4),
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        lambda: nw.layers.BatchNorm(4),
        lambda: nw.layers.BatchNorm2d(4, bias=False),
        lambda: nw.layers.SyncBatchNorm(4),
        lambda: nw.layers.FrozenBatchNorm(4),
    ],
)
def test_norms_are_known_by_what_they_compute(make: Make) -> None:
    made, converted = folded(nn.Sequential(nn.Conv2d(3, 4, 3), make()), 2, 3, 6, 6)
    assert isinstance(converted[1], nn.Identity)
    assert made.changes[0].path == "1"


class _GainOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)
        self.gain = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) * self.gain


def test_a_gain_outside_the_norm_stays_where_it_is() -> None:
    made, converted = folded(_GainOutside(), 2, 3, 6, 6)
    assert set(converted.state_dict()) == {"conv.weight", "conv.bias", "gain"}
    assert made.changes[0].path == "norm"


class _NormAct(nn.BatchNorm2d):
    """A norm that applies an activation, as timm's do."""

    def __init__(self, size: int, act: nn.Module) -> None:
        super().__init__(size)
        self.drop, self.act = nn.Identity(), act

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(input)))


def test_the_activation_of_a_norm_stays() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), _NormAct(4, nn.LeakyReLU(0.3)))
    made, converted = folded(model, 2, 3, 6, 6)
    assert isinstance(converted[1], nn.LeakyReLU)
    assert "act stays" in made.changes[0].how


class _Tokens(nn.Module):
    """A BatchNorm1d of tokens, as LeViT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return self.norm(x.flatten(0, 1)).reshape_as(x)


class _Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


def test_a_norm_over_the_last_axis_goes_into_a_linear_map() -> None:
    folded(nn.Sequential(nn.Linear(5, 7), nw.layers.BatchNorm(7, channel_dim=-1)), 2, 7, 5)


@pytest.mark.parametrize("make", [_Tokens, _Transposed])
def test_a_norm_whose_channels_are_moved_features_is_folded(make: Make) -> None:
    folded(make(), 2, 7, 5)  # 7 tokens, so that both axes have the same size


class _Reordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(nn.functional.channel_shuffle(self.conv(x), 2).flip(1))


def test_a_norm_of_reordered_channels_is_folded_channel_by_channel() -> None:
    folded(_Reordered(), 2, 3, 6, 6)


@pytest.mark.parametrize(
    "between", [nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.UpsamplingNearest2d(scale_factor=2), nn.Dropout(0.5)]
)
def test_averages_between_layer_and_norm_do_not_matter(between: nn.Module) -> None:
    folded(nn.Sequential(nn.Conv2d(3, 4, 3), between, nn.BatchNorm2d(4)), 2, 3, 8, 8)


def test_a_pool_that_counts_padding_keeps_a_norm_from_the_layer_before_it() -> None:
    model = redrawn(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2, padding=1), nn.BatchNorm2d(4)))
    made = plan("fold-batch-norm", model, torch.randn(2, 3, 8, 8).double())
    assert not made.changes


def test_the_g_of_a_weight_norm_is_scaled() -> None:
    conv = parametrizations.weight_norm(nn.Conv2d(3, 4, 3, bias=False))
    made, converted = folded(nn.Sequential(conv, nn.BatchNorm2d(4)), 2, 3, 6, 6)
    assert made.recipes[0].keys == ("0.parametrizations.weight.original0",)
    assert nn.utils.parametrize.is_parametrized(converted[0])


class _Own(nn.Conv2d):
    """A convolution that pads in its own forward, as EfficientNet's do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(nn.functional.pad(input, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


def test_a_bias_is_created_where_the_forward_uses_it() -> None:
    made, _ = folded(nn.Sequential(_Own(3, 4, 3, bias=False), nn.BatchNorm2d(4)), 2, 3, 6, 6)
    assert made.created == ("0.bias",)


class _Raw(nn.Module):
    """A layer whose parameters have names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.offset = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.randn(4))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.conv2d(x, self.kernel, self.offset))


def test_a_layer_without_a_module_of_its_own_takes_a_norm_over() -> None:
    folded(_Raw(), 2, 3, 6, 6)


def test_the_state_dict_keeps_the_keys_of_the_layer_and_loses_those_of_the_norm() -> None:
    _, converted = folded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), 2, 3, 6, 6)
    assert list(converted.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_once(dtype: torch.dtype) -> None:
    model = redrawn(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).to(dtype)
    conv, norm = copy.deepcopy(model).double()
    converted = copy.deepcopy(model)
    apply_to_model(plan("fold-batch-norm", model, torch.randn(2, 3, 6, 6).to(dtype)), converted)
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    assert converted[0].weight.dtype == dtype
    assert torch.equal(converted[0].weight, (conv.weight * scale.view(-1, 1, 1, 1)).to(dtype))
    assert torch.equal(converted[0].bias, (conv.bias * scale + (norm.bias - norm.running_mean * scale)).to(dtype))


def test_a_model_without_numbers_has_the_same_plan() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), _Frozen(4)).eval()

    with torch.device("meta"):
        empty = model()
    on_meta = plan("fold-batch-norm", empty, torch.empty(2, 3, 6, 6, device="meta"))
    real = plan("fold-batch-norm", model(), torch.randn(2, 3, 6, 6))
    assert on_meta.changes
    assert json.dumps(on_meta.to_json()) == json.dumps(real.to_json())


def test_a_plan_of_another_model_of_the_same_kind_folds_its_numbers() -> None:
    def model(seed: int) -> nn.Module:
        return redrawn(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), seed)

    x = torch.randn(2, 3, 6, 6).double()
    made = Plan.from_json(json.dumps(plan("fold-batch-norm", model(0), x).to_json()))
    other, converted = model(1), model(1)
    apply_to_model(made, converted)
    with torch.no_grad():
        assert difference(other(x), converted(x)) <= EXACT


@pytest.mark.parametrize(
    ("name", "norms"),
    [("levit", 38), ("detr", 29)]
    + [pytest.param(*row, marks=pytest.mark.slow) for row in (("resnet", 29), ("mobilenet_v1", 27), ("regnet", 29))],
)
def test_models_of_transformers_lose_all_their_batch_norms(name: str, norms: int) -> None:
    target = nw.targets.load(f"hf:{name}")
    made = plan("fold-batch-norm", target)
    assert (len(made.changes), made.refused) == (norms, ())


class _Differentiating(nn.Module):
    """A forward that needs gradients, for which torch decomposes its ops."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(x.square().sum(), x)
        return self.norm(self.conv(gradient.detach()))


def test_a_model_that_differentiates_is_folded() -> None:
    folded(_Differentiating(), 2, 3, 6, 6)


@pytest.mark.parametrize("border", ["pad", "map"])
def test_the_proof_holds(border: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), _Frozen(8), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1)
    )
    done = convert("fold-batch-norm", redrawn(model).float(), torch.randn(2, 3, 8, 8), border=border)
    assert len(done.changes) == 2
    assert [gate.name for gate in done.proof.gates if gate.passed] == ["structure", "twin", "weights", "dtype"]
