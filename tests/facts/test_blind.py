"""Architectures that no other test names: streams from constants, joined embeddings, filters, parallel mixers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import normwise as nw
from normwise.checkup.report import Report

HIDDEN, HEADS, DEPTH = 24, 4, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        k, v = self.kv(memory).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(queries), k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))


def norm() -> nn.LayerNorm:
    return nn.LayerNorm(HIDDEN)


def map_of(model: nn.Module, *inputs: Tensor) -> Report:
    return nw.map(model.eval(), inputs)


def features() -> Tensor:
    return torch.randn(2, 7, HIDDEN)


class QueryLayer(nn.Module):
    """DETR's decoder layer: post-norm, positions added to queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross, self.mlp = Attention(), Attention(), mlp()
        self.norm1, self.norm2, self.norm3 = norm(), norm(), norm()

    def forward(self, x: Tensor, positions: Tensor, memory: Tensor) -> Tensor:
        x = self.norm1(x + self.own(x + positions, x))
        x = self.norm2(x + self.cross(x + positions, memory))
        return self.norm3(x + self.mlp(x))


class ZeroTarget(nn.Module):
    """A decoder whose target is zero and whose learned queries are only added as positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(HIDDEN, HIDDEN)
        self.positions = nn.Embedding(5, HIDDEN)
        self.layers = nn.ModuleList([QueryLayer() for _ in range(DEPTH)])
        self.norm = norm()

    def forward(self, pixels: Tensor) -> Tensor:
        memory = self.stem(pixels)
        positions = self.positions.weight.unsqueeze(0).repeat(memory.shape[0], 1, 1)
        x = torch.zeros_like(positions)
        for layer in self.layers:
            x = layer(x, positions, memory)
        return self.norm(x)


class Resampler(nn.Module):
    """Learned latents read the input through cross-attention: pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, HIDDEN))
        self.cross = nn.ModuleList([Attention() for _ in range(DEPTH)])
        self.mlps = nn.ModuleList([mlp() for _ in range(DEPTH)])
        self.norms = nn.ModuleList([norm() for _ in range(3 * DEPTH + 1)])

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.latents.expand(pixels.shape[0], -1, -1)
        for i in range(DEPTH):
            x = x + self.cross[i](self.norms[3 * i](x), self.norms[3 * i + 1](pixels))
            x = x + self.mlps[i](self.norms[3 * i + 2](x))
        return self.norms[-1](x)


class PositionsEveryLayer(nn.Module):
    """A position table that is added again in each layer, and a bias of the scores: neither is a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(7, HIDDEN))
        self.stem = nn.Linear(HIDDEN, HIDDEN)
        self.attentions = nn.ModuleList([Attention() for _ in range(DEPTH)])
        self.norms = nn.ModuleList([norm() for _ in range(DEPTH + 1)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for attention, before in zip(self.attentions, self.norms, strict=False):
            y = before(x)
            x = x + attention(y + self.positions, y)
        return self.norms[-1](x)


def test_a_decoder_on_a_zero_target_is_one_post_norm_stream_from_its_first_add() -> None:
    report = map_of(ZeroTarget(), features())
    (stack,) = report.placement.stacks
    assert (stack.kind, stack.sublayers, stack.starts_with_norm, stack.final_norm) == ("post", 3 * DEPTH, False, True)
    places = {site.path: site.placement for site in report.norms}
    assert places["layers.0.norm1"] == places["layers.0.norm2"] == "post"


def test_learned_latents_start_a_stream_of_their_own() -> None:
    (stack,) = map_of(Resampler(), features()).placement.stacks
    assert (stack.kind, stack.sublayers, stack.starts_with_norm, stack.final_norm) == ("pre", 2 * DEPTH, False, True)


def test_a_position_table_that_every_layer_adds_is_no_stream() -> None:
    (stack,) = map_of(PositionsEveryLayer(), features()).placement.stacks
    assert (stack.kind, stack.sublayers, stack.starts_with_norm, stack.final_norm) == ("pre", DEPTH, False, True)


class Decomposed(nn.Module):
    """Autoformer's encoder: a moving average is subtracted behind each post-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(HIDDEN, HIDDEN)
        self.attentions = nn.ModuleList([Attention() for _ in range(DEPTH)])
        self.mlps = nn.ModuleList([mlp() for _ in range(DEPTH)])
        self.norms = nn.ModuleList([norm() for _ in range(2 * DEPTH)])
        self.average = nn.AvgPool1d(3, stride=1)

    def seasonal(self, x: Tensor) -> Tensor:
        padded = torch.cat([x[:, :1], x, x[:, -1:]], dim=1)
        return x - self.average(padded.transpose(1, 2)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(DEPTH):
            x = self.seasonal(self.norms[2 * i](x + self.attentions[i](x, x)))
            x = self.norms[2 * i + 1](self.seasonal(x + self.mlps[i](x)))
        return x


class Detail(nn.Module):
    """PoolFormer: a moving average less the stream itself, or what it leaves, is the whole sublayer."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.sign = sign
        self.stem = nn.Linear(HIDDEN, HIDDEN)
        self.mlps = nn.ModuleList([mlp() for _ in range(DEPTH)])
        self.norms = nn.ModuleList([norm() for _ in range(2 * DEPTH + 1)])
        self.average = nn.AvgPool1d(3, stride=1, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(DEPTH):
            y = self.norms[2 * i](x)
            smooth = self.average(y.transpose(1, 2)).transpose(1, 2)
            x = x + (smooth - y if self.sign > 0 else y - smooth)
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return self.norms[-1](x)


class TwoModalities(nn.Module):
    """GIT: normed image features and normed token embeddings are joined to one sequence."""

    def __init__(self, *, image_norm: bool) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), norm() if image_norm else nn.Identity())
        self.text = nn.Sequential(nn.Embedding(50, HIDDEN), norm())
        self.attentions = nn.ModuleList([Attention() for _ in range(DEPTH)])
        self.mlps = nn.ModuleList([mlp() for _ in range(DEPTH)])
        self.norms = nn.ModuleList([norm() for _ in range(2 * DEPTH)])

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        x = torch.cat([self.image(pixels), self.text(ids)], dim=1)
        for i in range(DEPTH):
            x = self.norms[2 * i](x + self.attentions[i](x, x))
            x = self.norms[2 * i + 1](x + self.mlps[i](x))
        return x


class Recurrence(nn.Module):
    """Mamba's outline: a causal depthwise convolution, then a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 4, groups=HIDDEN, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.up(x).chunk(2, dim=-1)
        y = self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.down(nn.functional.silu(y) * gate.sigmoid())


class SideBySide(nn.Module):
    """One norm before attention and something beside it: another mixer (Falcon-H1) or an MLP (GPT-J)."""

    def __init__(self, beside: str) -> None:
        super().__init__()
        self.stem, self.mixes = nn.Linear(HIDDEN, HIDDEN), beside == "mixer"
        self.attentions = nn.ModuleList([Attention() for _ in range(DEPTH)])
        self.beside = nn.ModuleList([Recurrence() if self.mixes else mlp() for _ in range(DEPTH)])
        self.mlps = nn.ModuleList([mlp() for _ in range(DEPTH)])
        self.norms = nn.ModuleList([norm() for _ in range(2 * DEPTH + 1)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(DEPTH):
            y = self.norms[2 * i](x)
            x = x + (self.beside[i](y) + self.attentions[i](y, y))
            x = x + self.mlps[i](self.norms[2 * i + 1](x)) if self.mixes else x
        return self.norms[-1](x)


class PositionalConvolution(nn.Module):
    """data2vec-audio: convolutions with norms of their own encode positions before a post-norm stack."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(HIDDEN, HIDDEN), norm()
        self.convs = nn.ModuleList([nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1) for _ in range(2)])
        self.conv_norms = nn.ModuleList([norm() for _ in range(2)])
        self.mlps = nn.ModuleList([mlp() for _ in range(2 * DEPTH)])
        self.norms = nn.ModuleList([norm() for _ in range(2 * DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.stem(x)
        for conv, after in zip(self.convs, self.conv_norms, strict=True):
            y = nn.functional.gelu(after(conv(y.transpose(1, 2)).transpose(1, 2)))
        x = self.norm(x + y)
        for sublayer, after in zip(self.mlps, self.norms, strict=True):
            x = after(x + sublayer(x))
        return x


def ids() -> Tensor:
    return torch.randint(0, 50, (2, 7))


def test_a_moving_average_taken_off_the_stream_is_no_sublayer() -> None:
    (stack,) = map_of(Decomposed(), features()).placement.stacks
    assert (stack.kind, stack.sublayers, stack.starts_with_norm, stack.final_norm) == ("post", 2 * DEPTH, False, False)


def test_what_a_moving_average_leaves_is_a_sublayer_where_it_is_added() -> None:
    for sign in (1.0, -1.0):
        (stack,) = map_of(Detail(sign), features()).placement.stacks
        assert (stack.kind, stack.sublayers, stack.final_norm) == ("pre", 2 * DEPTH, True)


def test_a_stream_joined_of_norms_starts_with_a_norm_and_one_joined_of_other_parts_does_not() -> None:
    for image_norm in (True, False):
        (stack,) = map_of(TwoModalities(image_norm=image_norm), features(), ids()).placement.stacks
        assert (stack.kind, stack.starts_with_norm) == ("post", image_norm)


def test_two_mixers_side_by_side_are_one_sublayer_and_attention_beside_an_mlp_is_parallel() -> None:
    for beside, kind in (("mixer", "pre"), ("mlp", "parallel_shared")):
        (stack,) = map_of(SideBySide(beside), features()).placement.stacks
        assert stack.kind == kind


def test_norms_of_a_positional_encoder_are_sites_but_no_sublayer_s_inner_norm() -> None:
    report = map_of(PositionalConvolution(), features())
    (stack,) = report.placement.stacks
    assert (stack.kind, report.placement.inner_norm) == ("post", False)
    assert {site.path: site.placement for site in report.norms}["conv_norms.0"] == "inner"
