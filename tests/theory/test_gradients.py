"""The three figures of gradients at initialisation, measured in real nets of width 128: SCIENCE 3.3, 3.4, 3.8, 4b."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, geometric_mean

import pytest
import torch
from torch.nn import functional

from normwise import placements
from normwise.blocks import MLP, Stack, norm_maker
from normwise.models import Decoder
from normwise.theory import predict

WORDS, WIDTH, TIME, BATCH, SEEDS = 96, 128, 64, 8, (0, 1, 2)
DEPTHS = [8, pytest.param(24, marks=pytest.mark.slow)]


def drawn(placement: str, depth: int, seed: int) -> Decoder:
    """Return a causal ReLU decoder with LayerNorm, Xavier matrices and unit embeddings."""
    torch.manual_seed(seed)
    model = Decoder(
        WORDS,
        WIDTH,
        depth,
        4,
        placement=placement,
        norm="layer",
        mlp="relu",
        positions="none",
        init="xavier",
        tied=False,
    )
    torch.nn.init.normal_(model.embedding.tokens.weight)
    torch.nn.init.xavier_normal_(model.head.weight)
    return model


def streams(model: Decoder) -> list[torch.Tensor]:
    """Return the stream entering and after each layer, with its gradient of the loss on random targets."""
    x = model.embedding(torch.randint(WORDS, (BATCH, TIME)))
    taps = [x]
    for layer in model.stack.layers:
        taps.append(x := layer(x))
    for tap in taps:
        tap.retain_grad()
    logits = model.head(x if model.stack.final_norm is None else model.stack.final_norm(x))
    functional.cross_entropy(logits.flatten(0, 1), torch.randint(WORDS, (BATCH * TIME,))).backward()
    return taps


def rms(x: torch.Tensor) -> float:
    return float(x.detach().square().mean().sqrt())


@pytest.mark.parametrize("depth", DEPTHS)
def test_pre_norm_gradients_of_the_last_matrix_times_the_stream_are_constant(depth: int) -> None:
    runs = []
    for seed in SEEDS:
        model = drawn("pre", depth, seed)
        taps = streams(model)
        at = (0, depth // 2 - 1, depth - 1)
        weights = [model.stack.get_parameter(f"layers.{i}.mlp.sublayer.down.weight") for i in at]
        assert all(w.grad is not None for w in weights)
        runs.append([float(w.grad.norm()) * rms(taps[i + 1]) for i, w in zip(at, weights, strict=True)])  # type: ignore[union-attr]
    first, middle, last = (geometric_mean(each) for each in zip(*runs, strict=True))
    assert middle / first == pytest.approx(1, abs=0.07)
    assert last / first == pytest.approx(1, abs=0.07)


@pytest.mark.parametrize(("depth", "expected"), [(8, 2.685), pytest.param(24, 19.33, marks=pytest.mark.slow)])
def test_post_norm_gradients_grow_through_gated_mlps(depth: int, expected: float) -> None:
    ratios = []
    for seed in SEEDS:
        torch.manual_seed(seed)

        def make(*_: object) -> MLP:
            mlp = MLP(WIDTH, 4 * WIDTH, "swiglu", bias=False)
            for linear in (mlp.gate, mlp.up, mlp.down):
                assert linear is not None
                torch.nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            return mlp

        stack = Stack(depth, WIDTH, {"mlp": make}, placement=placements.get("post"), norm=norm_maker("layer"))
        x = torch.randn(BATCH, TIME, WIDTH, requires_grad=True)
        y = stack(x)
        upstream = torch.randn_like(y)
        (gradient,) = torch.autograd.grad(y, x, upstream)
        ratios.append(rms(gradient) / rms(upstream))
        if seed == SEEDS[0]:
            assert predict(stack, x).gradient[0] == pytest.approx(expected, rel=0.01)  # ((1 + chi) / (1 + v))^(S / 2)
    assert geometric_mean(ratios) == pytest.approx(expected, rel=0.05)


def by_token(model: Decoder, every: int) -> tuple[list[float], list[float], torch.Tensor]:
    """Return the median token's gradient and the share of position 0, every so many blocks, and what entered."""
    taps = streams(model)
    energy = [tap.grad.double().square().mean(-1) for tap in taps[::every] if tap.grad is not None]
    shares = [float(each[:, 0].sum() / each.sum()) for each in energy]
    return [float(each.median().sqrt()) for each in energy], shares, taps[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_gradients_by_token_follow_the_prediction_in_causal_post_norm(depth: int) -> None:
    runs = [by_token(drawn("post", depth, seed), 4) for seed in SEEDS]
    medians, shares, entered = zip(*runs, strict=True)
    told = predict(drawn("post", depth, SEEDS[0]).stack, entered[0])
    for i in range(depth // 4 + 1):
        median = geometric_mean(each[i] / each[-1] for each in medians)
        assert median == pytest.approx(told.token_gradient[8 * i], rel=0.3), i
        # at mid depth position 0 holds 0.1 more than expected
        assert fmean(each[i] for each in shares) == pytest.approx(told.first_token[8 * i], abs=0.15), i


@pytest.mark.slow
def test_causal_post_norm_leaves_its_gradient_to_position_zero() -> None:
    for seed in SEEDS:
        medians, shares, _ = by_token(drawn("post", 24, seed), 8)
        falls = [above / below for below, above in pairwise(medians)]
        assert all(fall >= 8 for fall in falls[1:])  # every 8 blocks above block 8
        assert all(share >= 0.85 for share in shares[:3])  # from block 16 down
        assert shares[3] < 0.03  # 1/64 at the end
