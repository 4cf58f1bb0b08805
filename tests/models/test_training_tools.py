"""What people train with works on our models: torch.compile, DDP, activation checkpointing, bfloat16 autocast."""

from __future__ import annotations

import copy
import math
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normwise.blocks import Layer, Stack
from tests import ranks as processes
from tests.models.small import DEPTH, KINDS, PLACEMENTS, gradients, ids, loss, small
from tests.nearness import error, relative_error

WORLD, LIMIT = 2, 60.0  # processes, and seconds that they may take
EXACT = 1e-12  # relative to the largest element, in float64: the same sums in another order
NOISE = 1e-15  # relative to the largest gradient: that of a key's shift is 0 but for roundings
Gradients = dict[str, torch.Tensor]


def assert_near(found: Gradients, truth: Gradients) -> None:
    assert found.keys() == truth.keys()
    floor = NOISE * max(float(grad.abs().max()) for grad in truth.values())
    far = {name for name, grad in truth.items() if error(found[name], grad) > EXACT * float(grad.abs().max()) + floor}
    assert far == set()


def trained(model: nn.Module, kind: str) -> tuple[torch.Tensor, Gradients]:
    """Return what a model returns and its gradients."""
    model.zero_grad()
    output = model(*ids(kind))
    loss(output).backward()
    return output.detach(), gradients(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_and_a_pickled_model_compute_the_same_and_share_nothing(kind: str) -> None:
    model = small(kind, "deep-norm")
    output = model(*ids(kind))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(*ids(kind)), output)
        assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in other.parameters()}


# -- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        ("decoder", "pre"),
        ("decoder", "rezero"),
        pytest.param("decoder", "residual", marks=pytest.mark.slow),
        pytest.param("encoder", "post", marks=pytest.mark.slow),
        pytest.param("encoder-decoder", "parallel", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_is_one_graph_of_the_same_values(kind: str, placement: str) -> None:
    model = small(kind, placement)
    output, grads = trained(model, kind)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile(fullgraph=True, backend="aot_eager")  # keeps the names of the parameters
    compiled_output, compiled_grads = trained(model, kind)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert relative_error(compiled_output, output) < EXACT
    assert_near(compiled_grads, grads)


# -- DDP -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Gradients]]:
    """Return the gradients that each of two processes has, by kind and placement."""
    return processes.run("tests.models.ddp_worker", WORLD, tmp_path_factory.mktemp("ddp"), limit=LIMIT)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_processes_have_the_gradients_of_their_joined_batch(
    kind: str, placement: str, ranks: list[dict[tuple[str, str], Gradients]]
) -> None:
    _, alone = trained(small(kind, placement), kind)
    for rank in ranks:
        assert_near(rank[kind, placement], alone)
    halves = small(kind, placement)
    loss(halves(*(each.chunk(WORLD)[0] for each in ids(kind)))).backward()
    assert any(relative_error(grad, alone[name]) > 0.01 for name, grad in gradients(halves).items())


# -- activation checkpointing --------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_computed_twice_give_the_same_to_the_bit(kind: str, placement: str) -> None:
    model = small(kind, placement, torch.float32, dropout=0.1)
    torch.manual_seed(9)
    output, grads = trained(model, kind)
    calls: Counter[str] = Counter()
    for name, layer in model.named_modules():
        if isinstance(layer, Layer):
            layer.mlp.sublayer.register_forward_hook(lambda *_, name=name: calls.update([name]))  # type: ignore[union-attr]
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # pyright: ignore[reportAttributeAccessIssue]
    torch.manual_seed(9)
    output_again, grads_again = trained(model, kind)
    stacks = sum(isinstance(module, Stack) for module in model.modules())
    assert sorted(calls.values()) == [2] * DEPTH * stacks
    assert torch.equal(output_again, output)
    assert [name for name, grad in grads.items() if not torch.equal(grads_again[name], grad)] == []


# -- bfloat16 autocast ---------------------------------------------------------------------------

# Numbers are rounded to bfloat16, each by 2^-8 of itself at most, on their way through a sublayer: its input, a matrix
# and a product, twice, and attention's weights and scores: 8 times. Independent errors add up to the root of their
# number; norms divide error and value alike, so that nothing is amplified. The head adds 3; the way back is as long
# again. Measured: at most 0.25 of this forward, 0.62 back.
_ROUNDING = 2.0**-8
_OF_A_SUBLAYER, _OF_THE_HEAD = 8, 3


def allowed(model: nn.Module, *, back: bool) -> float:
    sublayers = sum(len(layer.names) for layer in model.modules() if isinstance(layer, Layer))
    roundings = _OF_A_SUBLAYER * sublayers + _OF_THE_HEAD
    return _ROUNDING * math.sqrt(roundings * (2 if back else 1))


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.detach().double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_float32_but_for_roundings(kind: str, placement: str) -> None:
    model = small(kind, placement, torch.float32)
    output, grads = trained(model, kind)
    model.zero_grad()
    streams: list[torch.dtype] = []
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.register_forward_pre_hook(lambda _, args: streams.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        half = model(*ids(kind))
        loss(half.float()).backward()
    assert set(streams) == {torch.float32}  # the stream keeps what branches add to it
    assert 0 < distance(half, output) < allowed(model, back=False)
    flat, half_flat = (torch.cat([grad.flatten() for grad in each.values()]) for each in (grads, gradients(model)))
    assert half_flat.isfinite().all()
    assert 0 < distance(half_flat, flat) < allowed(model, back=True)
