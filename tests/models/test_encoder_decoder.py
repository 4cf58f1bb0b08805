"""The encoder-decoder computes what torch.nn.Transformer computes from the same random weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normwise.blocks import Attention, Layer, Residual
from normwise.models import EncoderDecoder
from tests.nearness import relative_error

WORDS, WIDTH, HEADS, ENCODER, DECODER = 23, 16, 2, 3, 2
# placement -> where torch's layers have the norm of each of ours
PLACES = {"pre": "before", "post": "after_add"}


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    weights, shifts = theirs.get_parameter("in_proj_weight").chunk(3), theirs.get_parameter("in_proj_bias").chunk(3)
    for linear, weight, shift in zip((ours.q, ours.k, ours.v), weights, shifts, strict=True):
        linear.weight.copy_(weight)
        linear.bias.copy_(shift)
    ours.out.load_state_dict(theirs.out_proj.state_dict())


def copy_layer(ours: Layer, theirs: nn.Module, place: str) -> None:
    attentions = {"attention": "self_attn", "cross": "multihead_attn"}
    for number, (name, residual) in enumerate(ours.residuals(), 1):
        assert isinstance(residual, Residual)
        if isinstance(residual.sublayer, Attention):
            attention = theirs.get_submodule(attentions[name])
            assert isinstance(attention, nn.MultiheadAttention)
            copy_attention(residual.sublayer, attention)
        else:
            residual.sublayer.up.load_state_dict(theirs.get_submodule("linear1").state_dict())  # type: ignore[union-attr]
            residual.sublayer.down.load_state_dict(theirs.get_submodule("linear2").state_dict())  # type: ignore[union-attr]
        residual.get_submodule(place).load_state_dict(theirs.get_submodule(f"norm{number}").state_dict())


@torch.no_grad()
def pair(placement: str) -> tuple[EncoderDecoder, nn.Transformer]:
    """Return ours and torch's with equal weights; torch's stacks end in a norm wherever the others are."""
    torch.manual_seed(3)
    theirs = nn.Transformer(
        WIDTH, HEADS, ENCODER, DECODER, 4 * WIDTH, 0.0, batch_first=True, norm_first=placement == "pre"
    ).double()
    for parameter in theirs.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    ours = EncoderDecoder(
        WORDS, WIDTH, ENCODER, DECODER, HEADS, placement=placement, positions="none", final_norm=True
    ).double()
    for mine, stack in ((ours.encoder, theirs.encoder), (ours.decoder, theirs.decoder)):
        for layer, other in zip(mine.layers, stack.get_submodule("layers").children(), strict=True):
            assert isinstance(layer, Layer)
            copy_layer(layer, other, PLACES[placement])
        mine.get_submodule("final_norm").load_state_dict(stack.get_submodule("norm").state_dict())
    return ours, theirs


def ids(steps: int, seed: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, steps), generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("placement", PLACES)
@torch.no_grad()
def test_logits_are_those_of_torch(placement: str) -> None:
    ours, theirs = pair(placement)
    source, target = ids(9, 1), ids(6, 2)
    source_mask = torch.arange(9) < torch.tensor([[9], [5]])
    target_mask = torch.arange(6) < torch.tensor([[4], [6]])
    vectors = ours.embedding.tokens.weight
    truth = theirs(
        vectors[source],
        vectors[target],
        tgt_mask=torch.ones(6, 6, dtype=torch.bool).triu(1),
        src_key_padding_mask=~source_mask,
        tgt_key_padding_mask=~target_mask,
        memory_key_padding_mask=~source_mask,
    )
    found = ours(source, target, source_mask=source_mask, target_mask=target_mask)
    assert relative_error(found, truth @ vectors.T) < 1e-12


@torch.no_grad()
def test_padding_of_the_source_counts_nowhere() -> None:
    model = EncoderDecoder(WORDS, WIDTH, ENCODER, DECODER, HEADS).double()
    source, target = ids(9, 1), ids(6, 2)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    other = torch.where(mask, source, (source + 1) % WORDS)
    assert torch.equal(model(source, target, source_mask=mask), model(other, target, source_mask=mask))
    assert not torch.equal(model(source, target), model(other, target))


def test_a_head_of_its_own_starts_as_a_decoder_s() -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(200, 64, 1, 1, 2, tied=False)
    assert model.head.weight is not model.embedding.tokens.weight
    assert float(model.head.weight.detach().std()) == pytest.approx(0.02, rel=0.03)  # of 12,800 numbers: 4 deviations
