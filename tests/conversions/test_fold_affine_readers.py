"""Who counts as a reader of a norm: every linear map with a weight of its own, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from normwise.conversions import apply_to_model, apply_to_state, fold_affine
from normwise.errors import ConversionRefused
from normwise.facts.facts import Facts
from normwise.layers import GatedRMSNorm, L2Norm, ScaleNorm
from normwise.targets import target
from tests.conversions.affine import drawn, folded, reasons

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class _Block(nn.Module):
    """A linear map, a norm over its output, and what reads the norm."""

    def __init__(self, forward: Forward, norm: nn.Module | None = None, **modules: nn.Module) -> None:
        super().__init__()
        self.write = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8) if norm is None else norm
        self.read = nn.Linear(8, 5)
        for name, module in modules.items():
            self.add_module(name, module)
        self.last = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self, self.norm(self.write(x)))


X = torch.linspace(-2, 3, 2 * 4 * 6).reshape(2, 4, 6).sin()

CARRIED: dict[str, Forward] = {
    "a view": lambda m, y: m.read(y.reshape(-1, 8)),
    "a split axis": lambda m, y: m.read(y.unflatten(1, (2, 2))),
    "a selection": lambda m, y: m.read(y[:, 0]),
    "indices": lambda m, y: m.read(y[:, torch.tensor([2, 0])]),
    "a roll over tokens": lambda m, y: m.read(y.roll(1, dims=1)),
    "a mean over tokens": lambda m, y: m.read(y.mean(1)),
    "a mean over tokens, kept": lambda m, y: m.read(y.mean(1, keepdim=True)),
    "itself, twice": lambda m, y: m.read(torch.cat([y, y.flip(1)], 1)),
    "a stack": lambda m, y: m.read(torch.stack([y, y], 1)),
    "a repetition": lambda m, y: m.read(y[:, :1].expand(2, 3, 8)),
    "a cast": lambda m, y: m.read(y.to(torch.float64).to(m.read.weight.dtype)),
    "two readers": lambda m, y: m.read(y) * m.other(y),
    "one reader, twice": lambda m, y: m.read(y) + m.read(y.flip(1)),
    "a product with the transpose": lambda m, y: y @ m.read.weight.T + m.read.bias,
    "a product from the left": lambda m, y: (m.square.weight @ y.transpose(1, 2)).sum(1),
    "the shape alone": lambda m, y: m.read(y) + torch.zeros_like(y).sum(-1, keepdim=True),
}
# the bias cannot go in, so the norm must have none
GAIN_ONLY = {"a product from the left"}


@pytest.mark.parametrize("how", CARRIED)
def test_a_gain_reaches_its_readers_through(how: str) -> None:
    norm = nn.LayerNorm(8, bias=False) if how in GAIN_ONLY else None
    modules = {"other": nn.Linear(8, 5)} if "two" in how else {"square": nn.Linear(8, 8)} if "left" in how else {}
    made, converted = folded(_Block(CARRIED[how], norm, **modules), X)
    assert bool((converted.get_parameter("norm.weight") == 1).all())
    assert made.changes[0].path == "norm"


FACTORS: dict[str, Forward] = {
    "a number": lambda m, y: m.read(y * 3.0),
    "a mask of tokens": lambda m, y: m.read(y * (torch.arange(4) < 3).to(y.dtype)[:, None]),
    "tokens set to zero": lambda m, y: m.read(y.masked_fill((torch.arange(4) > 2)[:, None], 0.0)),
    "a sum over tokens": lambda m, y: m.read(y.sum(1)),
    "padding of tokens": lambda m, y: m.read(F.pad(y, (0, 0, 1, 1))),
    "a gate of its own": lambda m, y: m.read(y * m.gate(y).sigmoid()),
}


@pytest.mark.parametrize("how", FACTORS)
def test_a_gain_passes_what_a_bias_does_not(how: str) -> None:
    gate = nn.Linear(8, 1)
    folded(_Block(FACTORS[how], nn.RMSNorm(8), gate=gate), X)
    (why,) = reasons(_Block(FACTORS[how], gate=gate), X).values()
    assert "its bias does not reach its readers as it is" in why
    assert "divided by its gain" in reasons(_Block(FACTORS[how], gate=gate), X, what="gain")["norm"]


OBSTACLES: dict[str, tuple[Forward, str]] = {
    "a residual add": (lambda m, y: m.read(y) + y[..., :5], "taken apart, merged or joined"),
    "an add": (lambda m, y: m.square(y) + y, "it is added to another value"),
    "an activation": (lambda m, y: m.read(y.relu()), "an elementwise op reads it"),
    "an output": (lambda m, y: y, "an output of the model"),
    "another norm": (lambda m, y: m.read(F.layer_norm(y, (8,))), "another norm reads it"),
    "an attention": (lambda m, y: F.scaled_dot_product_attention(y, y, m.square(y)), "an attention reads it"),
    "half of the features": (lambda m, y: m.small(y[..., :4]), "taken apart, merged or joined"),
    "a reduction over features": (lambda m, y: m.read(y) * y.amax(-1, keepdim=True), "reads it"),
    "a merged axis": (lambda m, y: m.wide(y.flatten(1)), "taken apart, merged or joined"),
    "values joined with others": (
        lambda m, y: m.read(torch.cat([y, torch.ones_like(y)], 1)),
        "taken apart, merged or joined",
    ),
}


@pytest.mark.parametrize("what", OBSTACLES)
def test_a_norm_is_refused_if_it_is_read_by(what: str) -> None:
    forward, said = OBSTACLES[what]
    model = _Block(forward, square=nn.Linear(8, 8), small=nn.Linear(4, 5), wide=nn.Linear(32, 5))
    why = reasons(model, X)["norm"]
    assert said in why
    assert "test_fold_affine_readers.py:" in why or said.startswith("an output")


def test_a_weight_shared_by_two_norms_is_refused() -> None:
    model = _Block(
        lambda m, y: m.read(y) + m.read(m.second(m.square(y))), second=nn.LayerNorm(8), square=nn.Linear(8, 8)
    )
    found = target(drawn(model), (X,))
    made = fold_affine.plan(Facts(found, effort="full"))
    assert not made.changes
    assert all("the weight of its reader read is shared with read" in refusal.why for refusal in made.refused)


def test_a_parameter_shared_with_what_did_not_run_is_refused() -> None:
    idle, norm = nn.LayerNorm(8), nn.LayerNorm(8)
    idle.weight = norm.weight
    assert "shares a parameter with idle.weight" in reasons(_Block(lambda m, y: m.read(y), norm, idle=idle), X)["norm"]
    model = _Block(lambda m, y: m.read(y), idle=nn.Linear(8, 5))
    model.get_submodule("idle").weight = model.read.weight
    assert "shared with idle" in reasons(model, X)["norm"]
    model = _Block(lambda m, y: m.read(y), idle=nn.Linear(8, 5))
    model.get_submodule("idle").bias = model.read.bias
    assert "the bias of its reader read is used elsewhere" in reasons(model, X)["norm"]


def test_a_norm_and_its_reader_shared_by_all_layers_fold_once() -> None:
    made, _ = folded(_Looped(), X)
    assert len(made.recipes) == 4


class _Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.write, self.norm, self.read = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.write(x)
        for _ in range(3):
            x = x + self.read(self.norm(x)).tanh()
        return x


class _Experts(nn.Module):
    """Sends every token to one of its experts; an expert without tokens does not run."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 5) for _ in range(3))
        self.used = used

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(y.shape[1]) % self.used
        return torch.stack([self.experts[int(e)](y[:, i]) for i, e in enumerate(tokens)], 1)


def test_an_expert_without_a_token_stops_the_fold() -> None:
    folded(_Block(lambda m, y: m.experts(y), experts=_Experts(3)), X)
    why = reasons(_Block(lambda m, y: m.experts(y), experts=_Experts(2)), X)["norm"]
    assert "experts.experts.2.weight was not used in this run" in why
    assert "give inputs that use it" in why


def _convolved(norm: nn.Module, conv: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 1), norm, conv)


class _ChannelsLast(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


IMAGE = torch.linspace(-2, 3, 2 * 3 * 49).reshape(2, 3, 7, 7).cos()


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(2, 8), lambda: _ChannelsLast(8)])
def test_a_convolution_without_padding_takes_both(norm: Callable[[], nn.Module], groups: int, bias: bool) -> None:
    made, _ = folded(_convolved(norm(), nn.Conv2d(8, 16, 3, groups=groups, bias=bias)), IMAGE)
    assert made.created == (() if bias else ("2.bias",))


@pytest.mark.parametrize("padding", [1, "same"])
def test_a_padded_convolution_takes_a_gain_but_no_bias(padding: int | str) -> None:
    folded(_convolved(_ChannelsLast(8, bias=False), nn.Conv2d(8, 4, 3, padding=padding)), IMAGE)
    (why,) = reasons(_convolved(_ChannelsLast(8), nn.Conv2d(8, 4, 3, padding=padding)), IMAGE).values()
    assert "it pads with zeros" in why


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_with_neighbours_leaves_a_bias_as_it_is(mode: Literal["reflect", "replicate"]) -> None:
    folded(_convolved(_ChannelsLast(8), nn.Conv2d(8, 4, 3, padding=1, padding_mode=mode)), IMAGE)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_transposed_convolution_takes_a_gain(groups: int) -> None:
    conv = nn.ConvTranspose2d(8, 4, 3, stride=2, groups=groups)
    folded(_convolved(_ChannelsLast(8, bias=False), conv), IMAGE)
    assert "transposed" in next(iter(reasons(_convolved(_ChannelsLast(8), conv), IMAGE).values()))


def test_a_gain_of_one_number_folds() -> None:
    made, _ = folded(_Block(lambda m, y: m.read(y), ScaleNorm(8)), X, weightless=True)
    assert made.dropped == ("norm.weight",)


def test_a_norm_without_parameters_has_nothing_to_fold() -> None:
    assert "neither gain nor bias" in reasons(_Block(lambda m, y: m.read(y), L2Norm()), X)["norm"]


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.write, self.norm, self.read = nn.Linear(6, 16), GatedRMSNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.write(x).chunk(2, -1)
        return self.read(self.norm(value, gate))


def test_a_gated_norm_folds_but_keeps_its_parameter() -> None:
    made, converted = folded(_Gated(), X, weightless=True)
    assert not made.dropped
    assert bool((converted.get_parameter("norm.weight") == 1).all())


def test_a_layer_that_ignores_a_bias_gets_none() -> None:
    class Router(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return F.linear(input, self.weight)

    class Adding(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            product = input @ self.weight.T
            return product if self.bias is None else product + self.bias

    why = reasons(_Block(lambda m, y: m.own(y), own=Router(8, 5, bias=False)), X)["norm"]
    assert "its reader own has no bias, and would not use one" in why
    made, _ = folded(_Block(lambda m, y: m.own(y), own=Adding(8, 5, bias=False)), X)
    assert made.created == ("own.bias",)


def test_a_computed_weight_is_refused() -> None:
    model = _Block(lambda m, y: m.own(y), own=parametrizations.weight_norm(nn.Linear(8, 5)))
    assert "the weight of own is no parameter" in reasons(model, X)["norm"]


def test_a_module_with_a_hook_is_refused() -> None:
    model = _Block(lambda m, y: m.read(y))
    model.read.register_forward_hook(lambda module, args, output: None)
    assert "read has hooks" in reasons(model, X)["norm"]


def test_a_part_of_a_fused_weight_is_refused() -> None:
    model = _Block(
        lambda m, y: m.attend(y, m.memory(y), m.memory(y))[0],
        attend=nn.MultiheadAttention(8, 2),
        memory=nn.Linear(8, 8),
    )
    assert "shared with attend" in reasons(model, X)["norm"]


def test_a_batch_norm_is_left_to_its_own_conversion() -> None:
    (why,) = reasons(_convolved(nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)), IMAGE).values()
    assert "fold-batch-norm" in why


def test_a_plan_of_one_norm_touches_no_other() -> None:
    from normwise.conversions._folding import fold

    model = drawn(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 4)))
    facts = Facts(target(model, (X,)), effort="full")
    done = fold(facts, [site for site in facts.sites if site.row.path == "3"])
    assert {key for recipe in done.recipes for key in recipe.keys} == {"4.weight", "3.weight"}
    assert done.folded == {"3": ("weight",)}


def test_folding_a_live_model_changes_its_state() -> None:
    model = drawn(_Block(lambda m, y: m.read(y)))
    expected = model(X)
    apply_to_model(fold_affine.plan(Facts(target(model, (X,)), effort="full")), model)
    torch.testing.assert_close(model(X), expected)


def test_half_precision_is_rounded_once() -> None:
    model = drawn(_Block(lambda m, y: m.read(y))).to(torch.bfloat16)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    made = fold_affine.plan(Facts(target(model, (X.to(torch.bfloat16),)), effort="full"))
    converted = apply_to_state(made, state)
    exact = state["read.weight"].double() * state["norm.weight"].double()
    assert torch.equal(converted["read.weight"], exact.to(torch.bfloat16))
    shift = state["read.bias"].double() + state["read.weight"].double() @ state["norm.bias"].double()
    assert torch.equal(converted["read.bias"], shift.to(torch.bfloat16))


def test_a_created_bias_has_the_dtype_of_its_weight() -> None:
    model = drawn(_Block(lambda m, y: m.own(y), own=nn.Linear(8, 5, bias=False))).to(torch.bfloat16)
    made = fold_affine.plan(Facts(target(model, (X.to(torch.bfloat16),)), effort="full"))
    assert apply_to_state(made, model.state_dict())["own.bias"].dtype is torch.bfloat16
    apply_to_model(made, model)
    assert model.get_parameter("own.bias").dtype is torch.bfloat16


def test_a_gain_too_large_for_the_dtype_is_refused() -> None:
    model = drawn(_Block(lambda m, y: m.read(y))).to(torch.float16)
    with torch.no_grad():
        model.get_parameter("norm.weight")[0] = 6e4
        model.get_parameter("read.weight")[0, 0] = 1e2
    made = fold_affine.plan(Facts(target(model, (X.to(torch.float16),)), effort="full"))
    with pytest.raises(ConversionRefused, match=r"read\.weight: the converted numbers leave the range of float16"):
        apply_to_model(made, model)


def test_what_stood_idle_beside_a_reader_is_named() -> None:
    made, _ = folded(_Block(lambda m, y: m.read(y) if y.shape[1] < 8 else m.long(y), long=nn.Linear(8, 5)), X)
    assert [note for note in made.notes if "did not use long.weight" in note]
    made, _ = folded(_Block(lambda m, y: m.read(y)), X)
    assert not [note for note in made.notes if "did not use" in note]


def test_a_part_of_a_weight_is_read_in_the_model_itself() -> None:
    block = _Block(lambda m, y: F.linear(y, m.read.weight[:2]))
    nn.init.ones_(block.get_parameter("norm.bias"))
    made = fold_affine.plan(Facts(target(block.eval(), X), effort="full"))
    assert [refusal.why for refusal in made.refused] == [
        "its reader in the model itself has no bias, and would not use one"
    ]
