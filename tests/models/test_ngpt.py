"""nGPT's layer beside a loop in plain torch, and what it promises about lengths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normwise as nw
from normwise.blocks import NGPTLayer

HIDDEN, HEADS = 16, 2


def unit(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return x / x.pow(2).sum(dim, keepdim=True).sqrt()


def turned(x: torch.Tensor) -> torch.Tensor:
    """Return [T, D] turned by position t, pair i by t * 10000^(-2 i / D)."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * (1 / 10000 ** (torch.arange(half).float() / half))  # float32, as everywhere
    cos, sin = angle.cos().double(), angle.sin().double()
    a, b = x[:, :half], x[:, half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def looped(layer: NGPTLayer, h: torch.Tensor) -> torch.Tensor:
    """Return a layer's stream for one sequence [T, H], a head at a time."""
    size = HIDDEN // HEADS
    gain = layer.qk_gain.stored * HIDDEN**0.5
    heads = []
    for head in range(HEADS):
        at = slice(head * size, (head + 1) * size)
        q, k = (gain[at] * unit(turned(h @ m.weight[at].T)) for m in (layer.q, layer.k))
        scores = size**0.5 * q @ k.T
        if layer.causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ (h @ layer.v.weight[at].T))
    rate = (layer.attention_rate.stored * 0.05 * HIDDEN**0.5).abs()
    h = unit(h + rate * (unit(torch.cat(heads, -1) @ layer.out.weight.T) - h))
    gate = layer.gate_gain.stored * HIDDEN**0.5 * (h @ layer.gate.weight.T)
    inner = layer.up_gain.stored * (h @ layer.up.weight.T) * gate * torch.sigmoid(gate)
    rate = (layer.mlp_rate.stored * 0.05 * HIDDEN**0.5).abs()
    return unit(h + rate * (unit(inner @ layer.down.weight.T) - h))


def made(**options: bool) -> NGPTLayer:
    torch.manual_seed(0)
    layer = NGPTLayer(HIDDEN, HEADS, 40, **options).double()
    with torch.no_grad():  # away from where training begins, with rates of both signs
        for learned in (layer.attention_rate, layer.mlp_rate, layer.qk_gain, layer.up_gain, layer.gate_gain):
            learned.stored.mul_(torch.randn_like(learned.stored))
    return layer


@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_is_the_papers_formula(causal: bool) -> None:
    layer, h = made(causal=causal), unit(torch.randn(2, 7, HIDDEN, dtype=torch.float64)).requires_grad_()
    found, wanted = layer(h), torch.stack([looped(layer, each) for each in h])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    upstream = torch.randn_like(found)
    learned = [h, *layer.parameters()]
    for one, other in zip(*(torch.autograd.grad(y, learned, upstream) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_stream_starts_five_percent_from_where_it_was() -> None:
    torch.manual_seed(0)
    layer, h = NGPTLayer(256, 4), unit(torch.randn(1, 9, 256))
    cosine = (layer(h) * h).sum(-1)
    # two steps of 0.05 towards directions that are nearly at right angles: cos = (0.95^2 + 0.05^2)^(-1/2) 0.95, squared
    once = 0.95 / (0.95**2 + 0.05**2) ** 0.5
    assert torch.allclose(cosine, torch.full_like(cosine, once**2), atol=5e-3)


def test_matrices_come_back_to_length_one_along_the_hidden_axis() -> None:
    layer = made()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(unit(torch.randn(1, 5, HIDDEN, dtype=torch.float64))).pow(4).sum().backward()
    optimizer.step()
    assert not torch.allclose(layer.q.weight.norm(dim=1), torch.ones(HIDDEN, dtype=torch.float64), atol=1e-9)
    layer.normalize_matrices()
    for matrix, dim in ((layer.q, 1), (layer.v, 1), (layer.gate, 1), (layer.out, 0), (layer.down, 0)):
        lengths = matrix.weight.norm(dim=dim)
        torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=0, atol=1e-12)
        assert matrix.weight.requires_grad


def test_the_map_shows_a_norm_on_every_branch_and_after_every_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(NGPTLayer(32, 4) for _ in range(4)))
    report = nw.check(model, unit(torch.randn(2, 8, 32)), effort="read")
    (stack,) = report.placement.stacks
    assert (stack.depth, stack.sublayers) == (4, 8)
    assert all(member.wiring.after_branch and member.wiring.after_add for member in stack.members)
    assert report.placement.qk_norm


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 heads do not divide hidden_size=16"):
        NGPTLayer(16, 3)
