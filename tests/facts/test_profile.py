"""What is measured along a stack, against plain torch: hooks, autograd by hand, sums by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normwise as nw
from normwise.checkup.rules import idle_depth
from normwise.checkup.rules._examples import PreNormBlock
from normwise.facts import Facts
from normwise.facts import profile as profiles
from normwise.facts.profile import SEED
from normwise.facts.queries import query_weights
from normwise.facts.records import ProfileRow
from normwise.targets import Target

WIDTH, HEADS, BATCH, LENGTH = 32, 4, 2, 10


def profile(model: nn.Module, x: Tensor) -> tuple[ProfileRow, ...]:
    return Facts(Target(model=model.eval(), args=(x,))).profile


def second(x: Tensor) -> float:
    return float(x.double().square().mean())


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Attention whose queries are made in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.flat = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / WIDTH**0.5)  # [in, out], as GPT-2 keeps it

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.way == "one after another":
            q, k, v = self.qkv(x).split(WIDTH, -1)
        elif self.way == "head by head":  # q, k, v of a head side by side
            q, k, v = self.qkv(x).unflatten(-1, (HEADS, 3, -1)).transpose(1, 2).unbind(3)
            return q, k, v
        elif self.way == "in by out":
            q, k, v = torch.addmm(torch.zeros(3 * WIDTH), x.flatten(0, 1), self.flat).view(*x.shape[:2], -1).chunk(3, 2)
        elif self.way == "by einsum":
            q, k, v = (torch.einsum("btd,od->bto", x, m.weight) for m in (self.q, self.k, self.v))
        elif self.way == "one by einsum":
            q, k, v = torch.einsum("btd,od->bto", x, self.qkv.weight).chunk(3, -1)
        elif self.way == "rows of one":
            q, k, v = (F.linear(x, w) for w in self.qkv.weight.chunk(3))
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = heads(q), heads(k), heads(v)
        if self.way == "turned and normed":
            q, k = (F.rms_norm(t, t.shape[-1:]) for t in (q, k))
            angle = torch.arange(x.shape[1]).unsqueeze(-1) / torch.arange(1, q.shape[-1] + 1)
            q, k = (
                t * angle.cos() + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * angle.sin() for t in (q, k)
            )
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.made(x)
        if self.way == "by hand":
            scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def query_gradient(self) -> Tensor:
        """Return the gradient of what makes queries, cut out by hand."""
        if self.way in ("one after another", "rows of one"):
            return self.qkv.weight.grad[:WIDTH]  # type: ignore[index]
        if self.way == "head by head":
            return self.qkv.weight.grad.view(HEADS, 3, -1, WIDTH)[:, 0]  # type: ignore[union-attr]
        if self.way == "in by out":
            return self.flat.grad[:, :WIDTH]  # type: ignore[index]
        return self.q.weight.grad  # type: ignore[return-value]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


class Block(nn.Module):
    """One block of attention and MLP around norms, in plain torch."""

    def __init__(self, kind: str = "pre", way: str = "three") -> None:
        super().__init__()
        self.kind = kind
        self.attention, self.mlp = Attention(way), mlp()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "pre":
            x = x + self.attention(self.first(x))
            return x + self.mlp(self.second(x))
        if self.kind == "in place":
            x = x.clone()
            x += self.attention(self.first(x))
            x += self.mlp(self.second(x))
            return x
        if self.kind == "post":
            x = self.first(x + self.attention(x))
            return self.second(x + self.mlp(x))
        if self.kind == "deep":
            x = self.first(2.0 * x + self.attention(x))
            return self.second(2.0 * x + self.mlp(x))
        if self.kind == "sandwich":
            return x + self.second(self.mlp(self.first(x)))
        if self.kind == "parallel":
            return x + self.attention(self.first(x)) + self.mlp(self.second(x))
        if self.kind == "summed first":
            return x + (self.attention(self.first(x)) + self.mlp(self.second(x)))
        if self.kind == "scaled":
            return torch.add(x, self.mlp(self.first(x)), alpha=0.25)
        if self.kind == "gated":
            return torch.addcmul(x, self.mlp(self.first(x)), torch.tensor(0.5))
        return x + self.mlp(x)  # without a norm


class Stack(nn.Module):
    """Blocks between two linear maps."""

    def __init__(self, kind: str = "pre", way: str = "three", depth: int = 3) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = [Block(kind, way) for _ in range(depth)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def made(kind: str = "pre", way: str = "three", depth: int = 3) -> tuple[Stack, Tensor]:
    torch.manual_seed(3)
    return Stack(kind, way, depth), torch.randn(BATCH, LENGTH, WIDTH)


def without_biases(model: Stack) -> Stack:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def streams(model: Stack, x: Tensor) -> list[Tensor]:
    """Return the stream that enters each block, and the one that leaves the last."""
    kept: list[Tensor] = []
    hooks = [
        b.register_forward_hook(lambda _, args, out: kept.extend((args[0].clone(), out.clone()))) for b in model.blocks
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return [*kept[::2], kept[-1]]


def branches(model: Stack, x: Tensor, names: tuple[str, ...]) -> list[Tensor]:
    """Return what the named modules of each block gave, in the order of the run."""
    kept: list[Tensor] = []
    found = [getattr(b, n) for b in model.blocks for n in names]
    hooks = [m.register_forward_hook(lambda *a: kept.append(a[2].clone())) for m in found]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return kept


@pytest.mark.parametrize("kind", ["pre", "in place"])
def test_the_branch_gain_is_what_a_pre_norm_stream_grows_by(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Stack(kind, depth=8), torch.randn(8, 16, WIDTH)
    rows = profile(model, x)
    seen = branches(model, x, ("attention", "mlp"))
    assert [r.branch_gain for r in rows] == pytest.approx([second(b) for b in seen], rel=1e-5)
    q = second(streams(model, x)[0])
    for row, branch in zip(rows, seen, strict=True):
        now = row.residual_rms**2  # type: ignore[operator]
        # what the stream and a branch of fresh weights have in common is a mean of products, of mean 0: over WIDTH
        # features of tokens that are all alike it is at most two of its standard deviations
        apart = 2 * 2 * math.sqrt(q * second(branch) / WIDTH)
        assert now == pytest.approx(q + (row.branch_gain or 0.0), abs=apart)
        q = now
    grown = sum(r.branch_gain or 0.0 for r in rows)
    assert q == pytest.approx(second(streams(model, x)[0]) + grown, rel=2 * math.sqrt(2 / WIDTH))


def test_the_branch_gain_of_a_post_norm_stack_is_relative_to_the_normed_stream() -> None:
    for kind in ("post", "deep"):
        model, x = made(kind)
        rows, seen = profile(model, x), branches(model, x, ("attention", "mlp"))
        start = second(streams(model, x)[0])  # no norm in front of the first add
        expected = [second(b) / (start if i == 0 else 1) for i, b in enumerate(seen)]
        assert [r.branch_gain for r in rows] == pytest.approx(expected, rel=1e-5)


def test_the_branch_gain_without_a_norm_is_relative_to_the_stream() -> None:
    model, x = made("none")
    rows, seen, entered = profile(model, x), branches(model, x, ("mlp",)), streams(model, x)
    expected = [second(b) / second(s) for b, s in zip(seen, entered, strict=False)]
    assert [r.branch_gain for r in rows] == pytest.approx(expected, rel=1e-5)
    # a linear branch has one gain at any size of its input
    bias_free = without_biases(made("none")[0])
    once, larger = profile(bias_free, x), profile(bias_free, 100 * x)
    assert [r.branch_gain for r in larger] == pytest.approx([r.branch_gain for r in once], rel=1e-4)


def test_a_normed_branch_has_gain_1() -> None:
    model, x = made("sandwich")
    assert [r.branch_gain for r in profile(model, x)] == pytest.approx([1.0] * 3, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "branch"),
    [
        ("parallel", lambda a, m: a + m),
        ("summed first", lambda a, m: a + m),
        ("scaled", lambda a, m: 0.25 * m),
        ("gated", lambda a, m: 0.5 * m),
    ],
)
def test_the_branch_is_all_that_is_added(kind: str, branch: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = made(kind)
    rows = profile(model, x)
    parts = ("attention", "mlp") if kind in ("parallel", "summed first") else ("mlp", "mlp")
    kept = branches(model, x, parts[:1] if parts[0] == parts[1] else parts)
    pairs = [(k, k) for k in kept] if parts[0] == parts[1] else list(zip(kept[::2], kept[1::2], strict=True))
    expected = [second(branch(a, m)) for a, m in pairs]
    assert [r.branch_rms for r in rows] == pytest.approx([e**0.5 for e in expected], rel=1e-5)
    assert [r.branch_gain for r in rows] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["pre", "in place", "parallel"])
def test_block_influence_is_that_of_the_streams_around_a_block(kind: str) -> None:
    model, x = made(kind)
    rows, seen = profile(model, x), streams(model, x)
    expected = [float(1 - F.cosine_similarity(a, b, dim=-1).mean()) for a, b in pairwise(seen)]
    found = [r.block_influence for r in rows if r.block_influence is not None]
    assert found == pytest.approx(expected, rel=1e-4)
    each = len(rows) // 3
    assert [r.block_influence is not None for r in rows] == ([False] * (each - 1) + [True]) * 3


def test_block_influence_of_a_post_norm_stack_is_read_before_the_norm() -> None:
    model, x = made("post")
    with torch.no_grad():
        for block in model.blocks:  # gains that would turn every token
            block.second.weight.uniform_(0.1, 10)
    before: list[Tensor] = [streams(model, x)[0]]
    for block in model.blocks:
        block.second.register_forward_hook(lambda _, args, out: before.append(args[0].detach()))
    rows = profile(model, x)[1::2]
    before = before[:1] + before[-3:]
    expected = [float(1 - F.cosine_similarity(a, b, dim=-1).mean()) for a, b in pairwise(before)]
    assert [r.block_influence for r in rows] == pytest.approx(expected, rel=1e-4)


def test_tokens_of_zeros_do_not_count() -> None:
    model, x = made("none")
    without_biases(model)
    whole = [r.block_influence for r in profile(model, x)]
    padded = torch.cat([x, torch.zeros(BATCH, 5, WIDTH)], 1)
    assert [r.block_influence for r in profile(model, padded)] == pytest.approx(whole, rel=1e-6)


def test_a_stream_of_images_has_no_tokens() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(torch.relu(self.norm(x)))

    torch.manual_seed(0)
    rows = profile(nn.Sequential(nn.Conv2d(3, 4, 1), Unit(), Unit()), torch.randn(2, 3, 6, 6))
    assert len(rows) == 2
    assert all(r.block_influence is None and r.query_grad is None and r.branch_gain for r in rows)


def by_hand(model: Stack, x: Tensor) -> list[float]:
    """Return the size of the gradients of the queries' weights under the profile's own projection."""
    out = model.eval()(x)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(SEED))
    (out * direction).sum().div(out.numel() ** 0.5).backward()
    sizes = [float(b.attention.query_gradient().square().mean().sqrt()) for b in model.blocks]
    model.zero_grad()
    return sizes


WAYS = (
    "three",
    "by hand",
    "one after another",
    "head by head",
    "in by out",
    "rows of one",
    "turned and normed",
    "by einsum",
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_the_gradient_of_the_queries_weights(kind: str, way: str) -> None:
    model, x = made(kind, way)
    expected = by_hand(model, x)
    rows = profile(model, x)
    assert [r.query_grad for r in rows[::2]] == pytest.approx(expected, rel=1e-4)
    assert [r.query_grad for r in rows[1::2]] == [None] * 3
    assert all(p.grad is None for p in model.parameters())


def test_a_shared_weight_whose_part_cannot_be_told_has_no_gradient_of_queries() -> None:
    model, x = made("pre", "one by einsum")
    rows = profile(model, x)
    assert all(r.query_grad is None for r in rows)
    assert all(r.grad_rms for r in rows)


def test_torchs_own_attention_keeps_queries_in_the_first_rows() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True, norm_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 6, WIDTH)
    out = model(x)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(SEED))
    (out * direction).sum().div(out.numel() ** 0.5).backward()
    packed = [p.grad for n, p in model.named_parameters() if n.endswith("in_proj_weight")]
    expected = [float(g[:WIDTH].square().mean().sqrt()) for g in packed if g is not None]
    model.zero_grad()
    assert [r.query_grad for r in profile(model, x)[::2]] == pytest.approx(expected, rel=1e-4)


def test_frozen_queries_have_no_gradient() -> None:
    model, x = made()
    for block in model.blocks:
        block.attention.q.weight.requires_grad_(False)
    rows = profile(model, x)
    assert all(r.query_grad is None for r in rows)
    assert all(r.grad_rms for r in rows)


def test_gradients_too_large_to_hold_at_once_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    monkeypatch.setattr(profiles, "KEPT_BYTES", 4 * WIDTH * WIDTH)  # one matrix of several
    rows = profile(model, x)
    assert all(row.query_grad is None for row in rows)
    assert all(row.grad_rms is not None for row in rows)


def test_the_queries_of_a_grouped_attention_are_a_part_of_another_size() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.o = nn.Linear(WIDTH, WIDTH + 2 * 8), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x.clamp(-3, 3)).clamp(-8, 8).split([WIDTH, 8, 8], -1)
            k, v = (t.unsqueeze(1).expand(-1, HEADS, -1, -1) for t in (k, v))
            return self.o(F.scaled_dot_product_attention(heads(q), k, v).transpose(1, 2).flatten(2))

    model, x = made()
    for block in model.blocks:
        block.attention = Grouped()  # type: ignore[assignment]
    facts = Facts(Target(model=model.eval(), args=(x,)))
    for weights in query_weights(facts).values():
        assert [w.part is not None and w.part[0].tolist() for w in weights] == [list(range(WIDTH))]
    assert len(query_weights(facts)) == 3


def test_queries_of_collapsed_tokens_get_no_gradient() -> None:
    model, x = made()
    same = x[:, :1].expand(-1, LENGTH, -1).contiguous()
    apart, alike = profile(model, x)[0], profile(model, same)[0]
    assert alike.token_cosine == pytest.approx(1, abs=1e-6)
    assert alike.query_grad < 1e-6 * apart.query_grad  # type: ignore[operator]


def test_a_report_has_them_in_json() -> None:
    model, x = made()
    rows = json.loads(nw.check(model, x).to_json())["profile"]
    assert rows[1]["block_influence"] > 0
    assert rows[0]["query_grad"] > 0
    assert rows[0]["branch_gain"] > 0
    assert all({"predicted_rms", "predicted_grad", "predicted_influence"} <= set(r) for r in rows)


def test_idle_blocks_are_named_with_how_little_they_turn_the_stream() -> None:
    (found,) = idle_depth.check(Facts(idle_depth.bad()))
    evidence = found.evidence
    assert 0 < evidence["block_influence_at_most"] < 1e-6
    assert evidence["block_influence_of_the_median_block"] > 1e-3


class FlatPreNormBlock(PreNormBlock):
    """As in OPT: rows are added in two dimensions and viewed in three."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return (rows + self.mlp(self.norm(rows))).view(x.shape)


def test_idle_blocks_are_named_where_rows_are_added_in_two_dimensions() -> None:
    target = idle_depth.bad()
    for block in list(target.model.children())[3:5]:
        block.__class__ = FlatPreNormBlock
    (found,) = idle_depth.check(Facts(target))
    assert found.evidence["idle_blocks"] == 2


class Learned(nn.Module):
    """Attention whose queries are parameters: no weight makes them of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.k, self.v = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q = nn.Parameter(torch.randn(1, LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + F.scaled_dot_product_attention(self.q.expand(len(x), -1, -1), self.k(h), self.v(h))


def test_keys_are_not_taken_for_learned_queries() -> None:
    rows = profile(nn.Sequential(*(Learned() for _ in range(3))), torch.randn(BATCH, LENGTH, WIDTH))
    assert [row.query_grad for row in rows] == [None] * 3
