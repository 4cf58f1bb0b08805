"""The check names the placement of a model that it has never seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normwise as nw
from normwise import models, placements
from normwise.facts.naming import MatrixGain, Wired, named, with_initial_gains
from normwise.facts.records import Stack
from normwise.spec import Gain, Wiring

KINDS = {
    **dict.fromkeys(("post", "deep-norm", "ds-init", "admin", "b2t", "residual"), "post"),
    **dict.fromkeys(("pre", "layernorm-scaling", "layerscale", "residual-multiplier", "sub-ln"), "pre"),
    **dict.fromkeys(("none", "rezero", "skip-init", "t-fixup"), "none"),
    **dict.fromkeys(("hybrid-norm", "mix-ln", "normformer"), "mixed"),
    "sandwich": "sandwich",
    "res-post": "res_post",
    "parallel": "parallel",
    "parallel-shared": "parallel_shared",
    "keel": "other",  # norms at three places of one add
}
TOKENS = torch.arange(32).reshape(2, 16) % 64


def stacks(model: nn.Module, *inputs: torch.Tensor) -> tuple[Stack, ...]:
    return nw.check(model, inputs, effort="read").placement.stacks


def seen(name: str, depth: int) -> list[Wired]:
    wired = placements.get(name)
    each = ("attention",) if wired.wire(0, depth).parallel else ("attention", "mlp")
    return [Wired(wired.wire(layer, depth, sublayer=s), layer, s) for layer in range(depth) for s in each]


@pytest.mark.parametrize("depth", [2, 4, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (12, 48))])
@pytest.mark.parametrize("name", placements.names())
def test_our_decoder_has_its_placements_kind_and_name(name: str, depth: int) -> None:
    torch.manual_seed(0)
    (stack,) = stacks(models.Decoder(64, 32, depth, 4, context=16, placement=name), TOKENS)
    if (name, depth) == ("mix-ln", 2):  # one block of each: the final norm may as well be the second one's own
        assert (stack.kind, stack.name) == ("mixed", None)
        return
    assert (str(stack.kind), stack.depth) == (KINDS[name], depth)
    # where the kind is the placement there is nothing more to say
    assert stack.name == (None if KINDS[name].replace("_", "-") == name else name)


@pytest.mark.parametrize("name", ["deep-norm", "layernorm-scaling", "keel", "admin", "sub-ln", "residual-multiplier"])
def test_our_encoder_decoder_has_the_name_in_both_stacks(name: str) -> None:
    torch.manual_seed(0)
    model = models.EncoderDecoder(64, 32, 3, 4, 4, context=16, placement=name)
    found = stacks(model, TOKENS, TOKENS)
    assert [stack.name for stack in found] == [name, name]


@pytest.mark.parametrize("depth", [1, 2, 3, 24])
@pytest.mark.parametrize("name", placements.names())
def test_wirings_are_told_apart_at_any_depth(name: str, depth: int) -> None:
    twice = placements.get(name).streams > 1
    found = named(seen(name, depth), depth, "", summed_twice=twice)
    assert found is not None
    # what is named instead is wired alike at this depth: initial gains, or constants that are 1, differ alone
    wirings = [[each.wiring for each in seen(which, depth)] for which in (name, found)]
    assert found == name or wirings[0] == wirings[1]


class Block(nn.Module):
    """A block that nobody's table knows, in plain torch."""

    def __init__(self, width: int, branch: float, alpha: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.branch, self.alpha = branch, alpha

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.alpha:
            x = self.norm1(self.alpha * x + self.attend(x))
            return self.norm2(self.alpha * x + self.down(self.up(x).relu()))
        x = x + self.attend(self.norm1(x))
        return x + self.branch * self.down(self.up(self.norm2(x)).relu())


def foreign(branch: float = 1.0, alpha: float = 0.0, depth: int = 6) -> Stack:
    torch.manual_seed(0)
    (stack,) = stacks(nn.Sequential(*(Block(32, branch, alpha) for _ in range(depth))), torch.randn(2, 8, 32))
    return stack


@pytest.mark.parametrize("alpha", [12**0.25, 2.0, 48**0.25])
def test_deep_norm_is_named_by_its_form_whatever_the_depth_of_its_constant(alpha: float) -> None:
    assert foreign(alpha=alpha).name == "deep-norm"


def test_a_stream_made_smaller_is_no_deep_norm() -> None:
    assert foreign(alpha=0.5).name is None


def test_half_steps_in_every_second_sublayer_are_no_residual_multiplier() -> None:
    stack = foreign(branch=0.5)
    assert (str(stack.kind), stack.name) == ("pre", None)


def test_a_few_odd_adds_do_not_take_a_name_away() -> None:
    many = seen("deep-norm", 12)
    many[0] = Wired(Wiring(after_add=True, inner=True, skip_scale=many[0].wiring.skip_scale), 0, "attention")
    assert named(many, 12, "post", summed_twice=False) == "deep-norm"
    many[1:5] = [
        Wired(Wiring(before=True, skip_scale=each.wiring.skip_scale), each.layer, each.sublayer) for each in many[1:5]
    ]
    assert named(many, 12, "post", summed_twice=False) is None


@pytest.mark.parametrize("plain", ["pre", "post"])
def test_one_block_is_named_by_its_kind(plain: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=plain == "pre").eval()
    (stack,) = stacks(layer, torch.randn(2, 5, 16))
    assert (str(stack.kind), stack.name) == (plain, None)


def test_a_stack_without_attention_has_no_placement_that_needs_it() -> None:
    bare, inner = Wiring(), Wiring(before=True, inner=True)
    for wiring, plain in (bare, "none"), (inner, "pre"):
        found = named([Wired(wiring, layer, "mlp") for layer in range(6)], 6, plain, summed_twice=False)
        assert found in (plain, "sub-ln")


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(16), nn.Parameter(torch.eye(16).to_sparse_csr(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + (self.weight @ x.relu().flatten(0, -2).T).T.reshape(x.shape))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_weights_that_cannot_be_read_end_no_map() -> None:
    report = nw.check(nn.Sequential(*(Sparse() for _ in range(4))), torch.randn(2, 5, 16), effort="read")
    assert len(report.norms) == 4


def test_one_learned_number_is_no_layer_scale() -> None:
    found = [
        Wired(Wiring(before=True, branch_gain=Gain()), layer, s) for layer in range(6) for s in ("attention", "mlp")
    ]
    assert named(found, 6, "pre", summed_twice=False) is None


@pytest.mark.parametrize(("name", "plain"), [("ds-init", "post"), ("t-fixup", "none")])
def test_initial_gains_name_what_the_wiring_cannot(name: str, plain: str) -> None:
    wired = placements.get(name)
    gains = [MatrixGain(layer, gain, 10**4) for layer in range(6) for gain in wired.gains(layer, 6).values()]
    assert with_initial_gains(plain, gains, 6) == name
    for others in (
        [each._replace(gain=1.04 * each.gain) for each in gains],  # five standard errors and a half
        [each._replace(gain=1.0) for each in gains],
        [each for each in gains if each.layer != 3],  # a layer whose weights cannot be read
        [*gains, MatrixGain(2, 1.0, 10**4)],
    ):
        assert with_initial_gains(plain, others, 6) == plain


def test_trained_weights_are_not_named_after_an_initialisation() -> None:
    torch.manual_seed(0)
    model = models.Decoder(64, 32, 6, 4, context=16, placement="ds-init")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std())
    (stack,) = stacks(model, TOKENS)
    assert (str(stack.kind), stack.name) == ("post", None)


def test_mix_ln_has_no_odd_blocks() -> None:
    torch.manual_seed(0)
    model = models.Decoder(64, 32, 12, 4, context=16, placement="mix-ln")
    assert "PLC002" not in {finding.code for finding in nw.check(model, TOKENS).findings}
