"""Predictions stand beside measurements of real stacks at initialisation; nothing is fitted."""

from __future__ import annotations

import math
from functools import cache
from statistics import fmean, geometric_mean

import pytest
import torch

from normwise.models import Decoder
from normwise.theory import Prediction, predict

WORDS, WIDTH, DEPTH, TIME, SEEDS = 96, 128, 24, 64, (0, 1, 2)


def drawn(placement: str, seed: int, mlp: str = "relu") -> tuple[Decoder, torch.Tensor]:
    """Return a decoder of 24 layers whose branches keep second moments, and a batch of what enters it."""
    torch.manual_seed(seed)
    model = Decoder(WORDS, WIDTH, DEPTH, 4, placement=placement, mlp=mlp, positions="none", init="fan-in")
    with torch.no_grad():
        model.embedding.tokens.weight.normal_()
    return model, model.embedding(torch.randint(WORDS, (8, TIME))).detach()


@torch.no_grad()
def measured(model: Decoder, x: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return the root mean square of the stream after each layer, and each layer's influence."""
    sizes, influence = [], []
    for layer in model.stack.layers:
        after = layer(x)
        influence.append(1 - float(torch.cosine_similarity(x, after, dim=-1).mean()))
        sizes.append(float(after.pow(2).mean().sqrt()))
        x = after
    return sizes, influence


@cache
def predicted(placement: str) -> Prediction:
    """Return what is told of the decoder of the first seed."""
    model, x = drawn(placement, 0)
    return predict(model.stack, x)


def of_seeds(placement: str) -> tuple[list[float], list[float], Prediction]:
    runs = [measured(*drawn(placement, seed)) for seed in SEEDS]
    sizes, influence = ([fmean(each) for each in zip(*kind, strict=True)] for kind in zip(*runs, strict=True))
    return sizes, influence, predicted(placement)


@pytest.mark.parametrize(
    ("placement", "within"),
    [
        ("pre", 0.15),
        ("sandwich", 0.15),
        ("residual-multiplier", 0.15),
        ("layernorm-scaling", 0.25),
        ("post", 0.25),
    ],
)
def test_size_of_the_stream_and_influence_of_blocks(placement: str, within: float) -> None:
    sizes, influence, told = of_seeds(placement)
    for layer in range(DEPTH):
        assert sizes[layer] == pytest.approx(math.sqrt(told.q[2 * layer + 2]), rel=0.08), layer
    for layer in (0, 3, 11, 23):
        assert influence[layer] == pytest.approx(told.block_influence[layer], rel=within), layer


def test_deep_norm_turns_the_stream_little() -> None:
    _, influence, told = of_seeds("deep-norm")
    assert told.path_angle == pytest.approx(sum(math.acos(1 - each) for each in influence) / math.pi, rel=0.1)
    assert told.path_angle < 0.2
    assert told.gradient[0] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("placement", "within"),
    [("pre", 0.1), ("sandwich", 0.1), ("layernorm-scaling", 0.1), ("residual-multiplier", 0.1), ("deep-norm", 0.03)],
)
def test_gradient_where_the_stream_enters(placement: str, within: float) -> None:
    ratios = []
    for seed in SEEDS:
        model, x = drawn(placement, seed)
        y = x.requires_grad_()
        for layer in model.stack.layers:
            y = layer(y)
        upstream = torch.randn_like(y)
        (gradient,) = torch.autograd.grad(y, x, upstream)
        ratios.append(float(gradient.pow(2).mean().sqrt() / upstream.pow(2).mean().sqrt()))
    assert geometric_mean(ratios) == pytest.approx(predicted(placement).gradient[0], rel=within)


def test_post_norm_leaves_its_gradient_to_position_zero() -> None:
    told = predicted("post")
    assert told.first_token[2 * 8] > 0.85
    for block in (8, 16):
        assert told.token_gradient[2 * block + 16] > 8 * told.token_gradient[2 * block]
    assert told.rho[-1] > 0.99


def test_every_result_says_under_which_assumptions() -> None:
    told = predicted("pre")
    assert any("initialisation" in each for each in told.assumptions)
    assert len(told.error) == len(told.q) == 2 * DEPTH + 1
    with pytest.raises(ValueError, match="two streams"):
        predicted("residual")


def test_a_gradient_goes_around_a_layer_by_the_connection_to_its_input() -> None:
    measured, expected = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        model = Decoder(96, 128, 12, 4, context=64, placement="b2t", mlp="relu")
        x = model.embedding(torch.randint(0, 96, (4, 64))).detach().requires_grad_()
        y = model.stack(x)
        (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
        energy = gradient.square().mean(-1)
        measured.append(
            [float(energy.mean().sqrt()), float(energy.median().sqrt()), float(energy[:, 0].sum() / energy.sum())]
        )
        told = predict(model.stack, x)
        expected.append([told.gradient[0], told.token_gradient[0], told.first_token[0]])
    found, wanted = (torch.tensor(each).mean(0) for each in (measured, expected))
    assert torch.allclose(found, wanted, rtol=0.1), (found, wanted)
