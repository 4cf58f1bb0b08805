"""Small models of four blocks (and a few odd ones), one for each way a norm sits on a residual stream.

``BLOCKS`` holds the cases. ``stacks`` lists what the map must say, largest stack first: the kind
(or the set of kinds that are fair), whether the stream starts with a norm, whether a final norm
follows. ``optional`` marks streams that need not be understood; if they are reported, the kind
must still be among the fair ones. [B=2, T=7, H=24], four heads; images are [2, 3, 16, 16].
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH, TIME, HIDDEN, HEADS, VOCABULARY, DEPTH = 2, 7, 24, 4, 50, 4
ALPHA = (2 * DEPTH) ** 0.25  # DeepNorm's skip constant for a decoder or an encoder of this depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """What the map must say of one stack. None: not asked."""

    kinds: frozenset[str]
    starts: bool | None = False
    final: bool | None = True
    depth: int | None = DEPTH
    sublayers: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCase:
    """One model and what its map must say. None: not asked."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    stacks: tuple[Expect, ...]
    qk: bool | None = False
    inner: bool | None = False
    embedding: bool | None = None
    optional: bool = False
    every: bool = False  # the first expectation holds for every stack, however many there are
    places: Mapping[str, str] | None = None  # placement of named sites


def stack(*kinds: str, **options: Any) -> Expect:
    """Describe one stack."""
    return Expect(kinds=frozenset(kinds), **options)


def ids() -> tuple[Tensor, ...]:
    """Return token ids [B, T]."""
    return (torch.randint(VOCABULARY, (BATCH, TIME), generator=torch.Generator().manual_seed(1)),)


def floats() -> tuple[Tensor, ...]:
    """Return features [B, T, H]."""
    return (torch.randn(BATCH, TIME, HIDDEN, generator=torch.Generator().manual_seed(1)),)


def images() -> tuple[Tensor, ...]:
    """Return images [B, 3, 16, 16]."""
    return (torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(1)),)


BLOCKS: list[BlockCase] = []


def model(*stacks: Expect, **options: Any) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a model that a function builds."""
    options.setdefault("inputs", ids)

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        BLOCKS.append(BlockCase(name=build.__name__, build=build, stacks=stacks, **options))
        return build

    return register


def block(*stacks: Expect, ends: bool = True, starts: bool = False, **options: Any) -> Callable[[type], type]:
    """Register a block class, wrapped in embedding, four blocks, final norm (``ends``) and head."""

    def register(cls: type) -> type:
        def build() -> nn.Module:
            return Decoder([cls() for _ in range(DEPTH)], first=starts, last=ends)

        BLOCKS.append(BlockCase(name=_snake(cls.__name__), build=build, **{"inputs": ids, **options}, stacks=stacks))
        return cls

    return register


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Rms(nn.Module):
    """A Llama norm, written out."""

    def __init__(self, size: int = HIDDEN, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(size) + 0.5), eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Layer(nn.LayerNorm):
    """A layer norm of the model's width with a gain that is not one."""

    def __init__(self, size: int = HIDDEN) -> None:
        super().__init__(size)
        self.weight.data.uniform_(0.5, 1.5)


def cosine(x: Tensor) -> Tensor:
    """Give every head vector unit length."""
    return F.normalize(x, dim=-1)


class Attention(nn.Module):
    """Causal self-attention through SDPA, or by hand with a softmax; norms of q and k, and of the output, if given."""

    def __init__(
        self,
        by_hand: bool = False,
        q: Callable[[Tensor], Tensor] | None = None,
        k: Callable[[Tensor], Tensor] | None = None,
        out: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.by_hand, self.q, self.k, self.out = by_hand, q or nn.Identity(), k or nn.Identity(), out or nn.Identity()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if memory is not None:
            k, v = self.qkv(memory).chunk(3, -1)[1:]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        q, k = self.q(q), self.k(k)
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=memory is None)
        return self.proj(self.out(y.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """Two projections with a GELU, or gated by SiLU; a norm before the second if given."""

    def __init__(self, gated: bool = False, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)
        self.gate = nn.Linear(HIDDEN, 64) if gated else None
        self.inner = inner or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.gate(x)) * self.up(x) if self.gate is not None else F.gelu(self.up(x))
        return self.down(self.inner(h))


class Decoder(nn.Module):
    """Embedding with positions, blocks, head; norms on the embedding (``first``) and at the end (``last``)."""

    def __init__(self, blocks: list[nn.Module], first: bool = False, last: bool = True) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(16, HIDDEN)
        self.first = Layer() if first else nn.Identity()
        self.blocks = nn.ModuleList(blocks)
        self.last = Layer() if last else nn.Identity()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embed(ids) + self.positions(torch.arange(ids.size(1))))
        for layer in self.blocks:
            x = layer(x)
        return self.head(self.last(x))


class Two(nn.Module):
    """Base of blocks with attention, an MLP, and norms ``n1`` and ``n2``."""

    def __init__(self, norm: Callable[[], nn.Module] = Layer, **attention: Any) -> None:
        super().__init__()
        self.n1, self.attn, self.n2, self.mlp = norm(), Attention(**attention), norm(), Mlp()


# Pre


@block(stack("pre", sublayers=8))
class Pre(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


@block(stack("pre", final=False), ends=False)
class PreWithoutFinal(Pre):
    pass


@block(stack("pre", starts=True), starts=True, embedding=True)
class PreEmbeddingNorm(Pre):
    pass


@block(stack("pre", sublayers=8))
class PreByHand(Pre):
    """Softmax attention and RMS norms written out, gated MLP."""

    def __init__(self) -> None:
        super().__init__(Rms, by_hand=True)
        self.mlp = Mlp(gated=True)


@block(stack("pre", sublayers=8))
class PreInPlaceAdds(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.attn(self.n1(x))
        return x.add_(self.mlp(self.n2(x)))


@block(stack("pre"))
class PreInPlaceOnTheStream(Two):
    """Writes into the stream that the caller handed over."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.attn(self.n1(x))
        x += self.mlp(self.n2(x))
        return x


@block(stack("pre"))
class PreReversedOperands(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.n1(x)) + x
        return torch.add(self.mlp(self.n2(x)), x)


@block(stack("pre"))
class PreScaledBranch(Two):
    """Granite's residual multiplier."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.22 * self.attn(self.n1(x))
        return torch.add(x, self.mlp(self.n2(x)), alpha=0.22)


@block(stack("pre"))
class PreSubtracts(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = x - self.attn(self.n1(x))
        return x.sub(self.mlp(self.n2(x)))


@block(stack("pre"))
class PreLerp(Two):
    """x + a (F - x): the skip is scaled by 1 - a."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.lerp(x, self.attn(self.n1(x)), 0.3)
        return x.lerp(self.mlp(self.n2(x)), 0.3)


@block(stack("pre"))
class PreLayerScale(Two):
    def __init__(self) -> None:
        super().__init__()
        self.g1, self.g2 = nn.Parameter(torch.full((HIDDEN,), 0.1)), nn.Parameter(torch.full((HIDDEN,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.g1 * self.attn(self.n1(x))
        return torch.addcmul(x, self.g2, self.mlp(self.n2(x)))


@block(stack("pre"))
class PreCheckpointed(Pre):
    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return y


@block(stack("pre"))
class PreDataDependentIf(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        h = self.n2(x)
        return x + self.mlp(h if h.sum() > 1e9 else 2 * h)


@block(stack("pre"))
class PreDropout(Pre):
    """Branch dropout; the same map in train mode."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attn(self.n1(x)), 0.1, self.training)
        return x + F.dropout(self.mlp(self.n2(x)), 0.1, self.training)


@block(stack("pre"))
class PreFloatStream(Two):
    """The stream is carried in float64, the branches run in float32."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x.double() + self.attn(self.n1(x))).to(x.dtype)
        return (x.double() + self.mlp(self.n2(x))).to(x.dtype)


@block(stack("pre"))
class PreTimeFirst(Two):
    """[T, B, H] inside the block."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        x = x + self.attn(self.n1(x).transpose(0, 1)).transpose(0, 1)
        return (x + self.mlp(self.n2(x))).transpose(0, 1)


@block(stack("pre"))
class PreMaskedWrite(Two):
    """The MLP runs on some tokens only, and is written back into the stream in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        mask = torch.arange(x.size(1)) % 2 == 0
        y = self.mlp(self.n2(x)[:, mask])
        x[:, mask] += y
        return x


@block(stack("pre"))
class PreMixtureOfExperts(Two):
    """Renormalized router weights, experts gathered by index and added with index_add_."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, 3), nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.mixture(self.n2(x))

    def mixture(self, h: Tensor) -> Tensor:
        flat = h.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == index)
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return out.view_as(h)


@block(stack("pre"))
class PreCached(Two):
    """Keys and values are written into a buffer and read back."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor
        self.register_buffer("cache", torch.zeros(2, BATCH, HEADS, 16, HIDDEN // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn.qkv(self.n1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        self.cache[0, :, :, : x.size(1)] = k
        self.cache[1, :, :, : x.size(1)].copy_(v)
        k, v = self.cache[:, :, :, : x.size(1)]
        x = x + self.attn.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.n2(x))


@block(stack("pre"), qk=True, places={"blocks.0.attn.q": "qk", "blocks.0.attn.k": "qk"})
class PreQueryKeyNorm(Pre):
    def __init__(self) -> None:
        super().__init__(Rms, q=Rms(HIDDEN // HEADS), k=Rms(HIDDEN // HEADS), by_hand=True)


@block(stack("pre"), qk=True)
class PreCosineAttention(Pre):
    def __init__(self) -> None:
        super().__init__(q=cosine, k=cosine)


@block(stack("pre"), inner=True, places={"blocks.1.attn.out": "inner", "blocks.1.mlp.inner": "inner"})
class PreSubLayerNorm(Pre):
    """Magneto's Sub-LN: one more norm before each output projection."""

    def __init__(self) -> None:
        super().__init__(out=Layer())
        self.mlp = Mlp(inner=Layer(64))


@block(stack("pre"), inner=True, places={"blocks.2.latent": "inner"})
class PreLatentAttention(Pre):
    """The key and value come from a normed latent."""

    def __init__(self) -> None:
        super().__init__()
        self.shrink, self.latent, self.grow = nn.Linear(HIDDEN, 8), Rms(8), nn.Linear(8, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        x = x + self.attn(h, self.grow(self.latent(self.shrink(h))))
        return x + self.mlp(self.n2(x))


@block(stack("pre", sublayers=4), inner=True)
class PreGatedNorm(nn.Module):
    """A mixer in the manner of Mamba-2: convolution, gate, gated norm, projection."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.into, self.out = Rms(), nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.conv, self.gated = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, groups=HIDDEN), Rms()

    def forward(self, x: Tensor) -> Tensor:
        h, z = self.into(self.n(x)).chunk(2, -1)
        h = F.silu(self.conv(h.transpose(1, 2)).transpose(1, 2))
        return x + self.out(self.gated(h * F.silu(z)))


@block(stack("pre", "other", "none", depth=None, starts=None, final=None), optional=True, every=True)
class PreAddmm(Two):
    """The last projection adds the residual itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        h = F.gelu(self.mlp.up(self.n2(x))).flatten(0, 1)
        return torch.addmm(x.flatten(0, 1), h, self.mlp.down.weight.T).view_as(x)


@block(stack("pre", "other", "none", depth=None, starts=None, final=None), optional=True, every=True)
class PreSumOfStacked(Two):
    """torch.stack([x, f]).sum(0) instead of an add."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, self.attn(self.n1(x))]).sum(0)
        return sum([x, self.mlp(self.n2(x))], torch.zeros(()))


class FusedAddNorm(nn.Module):
    """Returns (normed, residual), as serving engines do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Rms()

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        stream = x if residual is None else x + residual
        return self.norm(stream), stream


class FusedBlock(nn.Module):
    """Passes the residual beside the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.attn, self.n2, self.mlp = FusedAddNorm(), Attention(), FusedAddNorm(), Mlp()

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        h, stream = self.n1(x, residual)
        h, stream = self.n2(self.attn(h), stream)
        return self.mlp(h), stream


class FusedDecoder(nn.Module):
    """A decoder of fused blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.last = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, 9), FusedAddNorm()
        self.blocks = nn.ModuleList(FusedBlock() for _ in range(DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        x, residual = self.embed(ids), None
        for layer in self.blocks:
            x, residual = layer(x, residual)
        return self.head(self.last(x, residual)[0])


@model(stack("pre", sublayers=8, depth=None))
def pre_fused_add_norm() -> nn.Module:
    return FusedDecoder()


@model(stack("pre"))
def pre_compiled_eager() -> nn.Module:
    compiled = torch.compile(Decoder([Pre() for _ in range(DEPTH)]), backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


@model(stack("pre", depth=None))
def pre_jit_traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(Decoder([Pre() for _ in range(DEPTH)]).eval(), ids())
    assert isinstance(traced, nn.Module)
    return traced


@model(stack("pre", depth=None, sublayers=8))
def pre_shared_block() -> nn.Module:
    """One block called four times (ALBERT)."""
    return Decoder([Pre()] * DEPTH)


@model(stack("pre", depth=None, sublayers=2))
def pre_single_block() -> nn.Module:
    return Decoder([Pre()])


class ScaledEmbedding(Decoder):
    """Gemma multiplies the embedding by the root of the width."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * HIDDEN**0.5
        for layer in self.blocks:
            x = layer(x)
        return self.head(self.last(x)).softmax(-1)


@model(stack("pre"), embedding=False)
def pre_scaled_embedding() -> nn.Module:
    return ScaledEmbedding([Pre() for _ in range(DEPTH)])


class ProjectedEmbedding(Decoder):
    """A normed embedding is projected before the stream begins (ALBERT, ELECTRA)."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.narrow, self.norm, self.widen = nn.Embedding(VOCABULARY, 12), Layer(12), nn.Linear(12, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.widen(self.norm(self.narrow(ids)))
        for layer in self.blocks:
            x = layer(x)
        return self.head(self.last(x))


@model(stack("pre", starts=False), embedding=True)
def pre_embedding_norm_before_projection() -> nn.Module:
    return ProjectedEmbedding([Pre() for _ in range(DEPTH)])


class Pooled(Decoder):
    """A class token at the end; the final norm stands after it was picked (ViT variants)."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.token = nn.Parameter(torch.randn(1, 1, HIDDEN))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = torch.cat([x, self.token.expand(x.size(0), -1, -1)], 1)
        for layer in self.blocks:
            x = layer(x)
        return self.head(self.last(x[:, -1]))


@model(stack("pre"))
def pre_pooled_final_norm() -> nn.Module:
    return Pooled([Pre() for _ in range(DEPTH)])


class Merging(nn.Module):
    """Two stages with patch merging between them, the norm on the joined slices (Swin)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 9)
        self.one, self.two = (nn.ModuleList(Pre() for _ in range(DEPTH)) for _ in range(2))
        self.norm, self.reduce, self.last = Layer(2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN), Layer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.one:
            x = layer(x)
        x = self.reduce(self.norm(torch.cat([x[:, 0:6:2], x[:, 1:6:2]], -1)))
        for layer in self.two:
            x = layer(x)
        return self.head(self.last(x).mean(1))


@model(stack("pre"), stack("pre"), inputs=floats)
def pre_two_stages() -> nn.Module:
    return Merging()


# Post


@block(stack("post", final=False, sublayers=8), ends=False)
class Post(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(x + self.attn(x))
        return self.n2(x + self.mlp(x))


@block(stack("post", starts=True, final=False), starts=True, ends=False, embedding=True)
class PostEmbeddingNorm(Post):
    pass


@block(stack("post", final=True))
class PostWithFinal(Post):
    pass


@block(stack("post", final=False), ends=False)
class PostByHand(Post):
    def __init__(self) -> None:
        super().__init__(Rms, by_hand=True)


@block(stack("post", final=False, name="deep-norm"), ends=False)
class PostDeepNorm(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(x * ALPHA + self.attn(x))
        return self.n2(torch.add(self.mlp(x), x, alpha=ALPHA))


@block(stack("post", "mixed", starts=True, final=False))
class PostResidualFromNormed(Two):
    """x = N(x); x = x + F(x): the names say pre, the norm sits on the stream (MiniMax)."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(x)
        x = x + self.attn(x)
        x = self.n2(x)
        return x + self.mlp(x)


@block(stack("post", "other", final=False), ends=False)
class PostAndPre(Two):
    """KEEL: N(a x + F(N' x))."""

    def __init__(self) -> None:
        super().__init__()
        self.n3, self.n4 = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.n3(8.0 * x + self.attn(self.n1(x)))
        return self.n4(8.0 * x + self.mlp(self.n2(x)))


@block(stack("post", "other", final=False), ends=False, qk=True)
class PostNormalizedTransformer(nn.Module):
    """nGPT: unit vectors on the stream, steps towards the normed branch."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(q=cosine, k=cosine), Mlp()
        self.a, self.m = nn.Parameter(torch.full((HIDDEN,), 0.05)), nn.Parameter(torch.full((HIDDEN,), 0.05))

    def forward(self, x: Tensor) -> Tensor:
        x = cosine(x + self.a * (cosine(self.attn(x)) - x))
        return cosine(x + self.m * (cosine(self.mlp(x)) - x))


@block(stack("post", final=False, sublayers=8), ends=False)
class PostCheckpointed(Post):
    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return y


# Norms on the branch


@block(stack("sandwich", sublayers=8), places={"blocks.0.n1": "pre", "blocks.0.n3": "branch"})
class Sandwich(Two):
    def __init__(self) -> None:
        super().__init__(Rms)
        self.n3, self.n4 = Rms(), Rms()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.n3(self.attn(self.n1(x)))
        return x + self.n4(self.mlp(self.n2(x)))


@block(stack("sandwich", starts=True), starts=True, embedding=True)
class SandwichPeri(Sandwich):
    """Peri-LN with a norm on the embedding."""


@block(stack("res_post", sublayers=8), places={"blocks.0.n1": "branch"})
class ResPost(Two):
    """OLMo-2, Swin v2."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.n1(self.attn(x))
        return x + self.n2(self.mlp(x))


@block(stack("res_post", final=False), ends=False)
class ResPostWithoutFinal(ResPost):
    pass


@block(stack("mixed"), inner=True)
class NormFormer(Two):
    """A norm after attention and one inside the MLP: half the adds are sandwiched, half are pre."""

    def __init__(self) -> None:
        super().__init__()
        self.n3, self.mlp = Layer(), Mlp(inner=Layer(64))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.n3(self.attn(self.n1(x)))
        return x + self.mlp(self.n2(x))


# Parallel


@block(stack("parallel"))
class Parallel(Two):
    """GPT-NeoX."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.n1(x)) + self.mlp(self.n2(x))


@block(stack("parallel"))
class ParallelBranchesFirst(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.n2(x)) + self.attn(self.n1(x)) + x


@block(stack("parallel_shared"))
class ParallelShared(nn.Module):
    """GPT-J, Phi, Cohere."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.attn, self.mlp = Layer(), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.n(x)
        return self.attn(h) + self.mlp(h) + x


@block(stack("parallel_shared"))
class ParallelSharedSkipFirst(ParallelShared):
    def forward(self, x: Tensor) -> Tensor:
        h = self.n(x)
        return x + self.attn(h) + self.mlp(h)


# No norm, mixtures, gates


@block(stack("none", final=False), ends=False)
class ReZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp, self.a = Attention(), Mlp(), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a * self.attn(x)
        return x + self.a * self.mlp(x)


@block(stack("none", final=True))
class NoneWithFinal(ReZero):
    """Dynamic tanh in place of norms, one norm at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(torch.tanh(self.a * x))
        return x + self.mlp(torch.tanh(self.a * x))


@model(stack("mixed"))
def mixed_one_odd_block() -> nn.Module:
    """Three pre-norm blocks and a post-norm one: 75 % agree."""
    return Decoder([Pre(), Pre(), Post(), Pre()])


@model(stack("mixed"))
def mixed_halves() -> nn.Module:
    return Decoder([Pre(), Pre(), ResPost(), ResPost()])


@block(stack("pre", "none", "other", "mixed", depth=None, final=None), optional=True)
class HighwayGate(Two):
    """g x + (1 - g) F(N x) with a gate computed from x."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        g = self.gate(x).sigmoid()
        x = g * x + (1 - g) * self.attn(self.n1(x))
        g = self.gate(x).sigmoid()
        return g * x + (1 - g) * self.mlp(self.n2(x))


class HyperConnected(nn.Module):
    """Two copies of the stream, mixed by learned matrices around each sublayer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.last = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, 9), Layer()
        self.norms = nn.ModuleList(Layer() for _ in range(2 * DEPTH))
        self.layers = nn.ModuleList(Attention() if i % 2 == 0 else Mlp() for i in range(2 * DEPTH))
        self.mix = nn.ParameterList(torch.eye(2) + 0.1 * torch.randn(2, 2) for _ in range(2 * DEPTH))
        self.read = nn.ParameterList(torch.rand(2) for _ in range(2 * DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).unsqueeze(-1).expand(-1, -1, -1, 2)
        for norm, layer, mix, read in zip(self.norms, self.layers, self.mix, self.read, strict=True):
            y = layer(norm(x @ read))
            x = x @ mix + y.unsqueeze(-1)
        return self.head(self.last(x.sum(-1)))


@model(stack("pre", "none", "other", "mixed", depth=None, starts=None, final=None), optional=True, inner=None)
def hyper_connections() -> nn.Module:
    return HyperConnected()


@block(stack("pre", "other", "mixed", depth=None, final=None, starts=None), optional=True, inner=None)
class Reversible(Two):
    """Two half streams that feed each other."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x, x.flip(-1)
        a = a + self.attn(self.n1(b))
        b = b + self.mlp(self.n2(a))
        return a + b


class ReversibleNet(nn.Module):
    """Reformer: x1 += F(N x2), x2 += G(N x1), joined at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.last = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, 9), Layer()
        self.blocks = nn.ModuleList(Two() for _ in range(DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        a = b = self.embed(ids)
        for layer in self.blocks:
            assert isinstance(layer, Two)
            a = a + layer.attn(layer.n1(b))
            b = b + layer.mlp(layer.n2(a))
        return self.head(self.last((a + b) / 2))


@model(stack("pre", "other", "mixed", depth=None, starts=None, final=None), optional=True, every=True, inner=None)
def reversible_net() -> nn.Module:
    return ReversibleNet()


# Modulation


class DiT(nn.Module):
    """Blocks whose norms are modulated by a condition, which also gates the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(DEPTH))
        self.modulate, self.last = nn.Linear(5, 2 * HIDDEN), nn.LayerNorm(HIDDEN, elementwise_affine=False)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.blocks:
            x = layer(x, condition)
        scale, shift = self.modulate(F.silu(condition)).unsqueeze(1).chunk(2, -1)
        return self.head(self.last(x) * (1 + scale) + shift)


class DiTBlock(nn.Module):
    """adaLN-zero."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = (nn.LayerNorm(HIDDEN, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attn, self.mlp, self.modulate = Attention(), Mlp(), nn.Linear(5, 6 * HIDDEN)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        s1, b1, g1, s2, b2, g2 = self.modulate(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        x = x + g1 * self.attn(self.n1(x) * (1 + s1) + b1)
        return x + g2 * self.mlp(self.n2(x) * (1 + s2) + b2)


@model(stack("pre", sublayers=8), inputs=lambda: (*floats(), torch.randn(BATCH, 5)))
def pre_adaptive() -> nn.Module:
    return DiT()


# torch.nn's own


def _encoder(norm_first: bool, final: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 48, batch_first=True, norm_first=norm_first)
    norm = nn.LayerNorm(HIDDEN) if final else None
    body = nn.TransformerEncoder(layer, DEPTH, norm=norm, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), body, nn.Linear(HIDDEN, 9))


@model(stack("post", final=False, sublayers=8), inputs=floats)
def torch_encoder_post() -> nn.Module:
    return _encoder(norm_first=False, final=False)


@model(stack("post", final=True, sublayers=8), inputs=floats)
def torch_encoder_post_final() -> nn.Module:
    return _encoder(norm_first=False, final=True)


@model(stack("pre", final=False, sublayers=8), inputs=floats)
def torch_encoder_pre() -> nn.Module:
    return _encoder(norm_first=True, final=False)


@model(stack("pre", final=True, sublayers=8), inputs=floats)
def torch_encoder_pre_final() -> nn.Module:
    return _encoder(norm_first=True, final=True)


class EncoderDecoder(nn.Module):
    """nn.Transformer between projections; it always adds a norm at the end of both halves."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that norm_first rules out nested tensors
            self.body = nn.Transformer(HIDDEN, HEADS, 3, 3, 48, batch_first=True, norm_first=norm_first)
        self.head = nn.Linear(HIDDEN, 9)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.body(self.source(source), self.target(target)))


def _source_and_target() -> tuple[Tensor, ...]:
    return (*floats(), torch.randn(BATCH, 5, HIDDEN, generator=torch.Generator().manual_seed(3)))


@model(stack("post", depth=3, sublayers=9), stack("post", depth=3, sublayers=6), inputs=_source_and_target)
def torch_transformer_post() -> nn.Module:
    return EncoderDecoder(norm_first=False)


@model(stack("pre", depth=3, sublayers=9), stack("pre", depth=3, sublayers=6), inputs=_source_and_target)
def torch_transformer_pre() -> nn.Module:
    return EncoderDecoder(norm_first=True)


# Convolutional and other families


def conv(into: int, out: int, stride: int = 1) -> nn.Conv2d:
    """Return a 3x3 convolution."""
    return nn.Conv2d(into, out, 3, stride, 1, bias=False)


class ResidualV1(nn.Module):
    """relu(x + bn(conv(relu(bn(conv x)))))."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b1, self.c2, self.b2 = conv(12, 12), nn.BatchNorm2d(12), conv(12, 12), nn.BatchNorm2d(12)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.b2(self.c2(F.relu(self.b1(self.c1(x))))))


class ResidualV2(ResidualV1):
    """x + conv(relu(bn(conv(relu(bn x)))))."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c2(F.relu(self.b2(self.c1(F.relu(self.b1(x))))))


class ConvNet(nn.Module):
    """Stem, blocks, optional final norm, pooling, head."""

    def __init__(self, blocks: Iterator[nn.Module], last: nn.Module | None = None) -> None:
        super().__init__()
        self.stem, self.blocks = conv(3, 12), nn.Sequential(*blocks)
        self.last, self.head = last or nn.Identity(), nn.Linear(12, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.last(self.blocks(self.stem(x)))).mean((2, 3)))


RESNET = stack("res_post", final=False, sublayers=4)
RESNET_V2 = stack("pre", final=True, sublayers=4)


@model(RESNET, inputs=images, inner=True)
def resnet_v1() -> nn.Module:
    return ConvNet(ResidualV1() for _ in range(DEPTH))


@model(RESNET, inputs=images, inner=True)
def resnet_v1_train() -> nn.Module:
    return ConvNet(ResidualV1() for _ in range(DEPTH)).train()


@model(RESNET_V2, inputs=images, inner=True)
def resnet_v2() -> nn.Module:
    return ConvNet((ResidualV2() for _ in range(DEPTH)), nn.BatchNorm2d(12))


@model(RESNET_V2, inputs=images, inner=True)
def resnet_v2_train() -> nn.Module:
    return ConvNet((ResidualV2() for _ in range(DEPTH)), nn.BatchNorm2d(12)).train()


class Shortcut(ResidualV1):
    """The first block of a stage: the skip is projected and normed."""

    def __init__(self) -> None:
        super().__init__()
        self.c3, self.b3 = nn.Conv2d(12, 12, 1), nn.BatchNorm2d(12)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.b3(self.c3(x)) + self.b2(self.c2(F.relu(self.b1(self.c1(x))))))


@model(
    stack("res_post", final=False, depth=None, starts=None),
    inputs=images,
    inner=True,
    places={"blocks.0.b3": "shortcut", "blocks.0.b1": "inner", "blocks.2.b2": "branch"},
)
def resnet_projected_shortcut() -> nn.Module:
    return ConvNet(iter([Shortcut(), *(ResidualV1() for _ in range(3))]))


class GroupResidual(nn.Module):
    """The residual block of diffusion U-Nets."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.c1, self.n2, self.c2 = nn.GroupNorm(3, 12), conv(12, 12), nn.GroupNorm(3, 12), conv(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c2(F.silu(self.n2(self.c1(F.silu(self.n1(x))))))


class UNet(nn.Module):
    """Down, middle, up with a concatenated skip."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.join, self.head = conv(3, 12), conv(12, 12, 2), conv(24, 12), conv(12, 3)
        self.left, self.middle, self.right = (nn.Sequential(GroupResidual(), GroupResidual()) for _ in range(3))
        self.last = nn.GroupNorm(3, 12)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(self.stem(x))
        middle = self.middle(self.down(left))
        x = self.join(torch.cat([F.interpolate(middle, scale_factor=2), left], 1))
        return self.head(F.silu(self.last(self.right(x))))


@model(stack("pre", depth=None, final=None), inputs=images, every=True, inner=True)
def unet_group_norm() -> nn.Module:
    return UNet()


class ConvNextBlock(nn.Module):
    """x + g W2 gelu(W1 N(depthwise x)): the norm stands inside the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(12, 12, 7, padding=3, groups=12), nn.LayerNorm(12)
        self.up, self.down, self.g = nn.Linear(12, 48), nn.Linear(48, 12), nn.Parameter(torch.full((12,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.g * self.down(F.gelu(self.up(h)))).permute(0, 3, 1, 2)


@model(stack("none", "other", final=False), inputs=images, inner=True)
def convnext() -> nn.Module:
    return ConvNet(ConvNextBlock() for _ in range(DEPTH))


class MixerBlock(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2, self.mlp = Layer(), Layer(), Mlp()
        self.tokens = nn.Sequential(nn.Linear(TIME, 16), nn.GELU(), nn.Linear(16, TIME))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.n2(x))


@model(stack("pre", sublayers=8))
def mlp_mixer() -> nn.Module:
    return Decoder([MixerBlock() for _ in range(DEPTH)])


# Traps: adds that are no residuals, residuals in disguise


class LowRank(nn.Module):
    """W x + B A x: an add of two maps of one input."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(into, out), nn.Linear(into, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


@block(stack("pre", sublayers=8))
class PreLowRankAdapters(Pre):
    def __init__(self) -> None:
        super().__init__()
        self.attn.qkv, self.attn.proj = LowRank(HIDDEN, 3 * HIDDEN), LowRank(HIDDEN, HIDDEN)
        self.mlp.up, self.mlp.down = LowRank(HIDDEN, 64), LowRank(64, HIDDEN)


@block(stack("pre", sublayers=8))
class PreSharedExpert(Two):
    """DeepSeek: the sum of a shared and a routed expert is one branch."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, 3), nn.ModuleList(Mlp(gated=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        h = self.n2(x)
        weights = self.router(h).sigmoid()
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        routed = sum(weights[..., i : i + 1] * expert(h) for i, expert in enumerate(self.experts))
        return x + (self.mlp(h) + routed)


@block(stack("pre"))
class PreSkipInsideTheBranch(Two):
    """A state-space layer's D x: the branch has a small skip of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.d = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, groups=HIDDEN), nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        x = x + self.attn.proj(F.silu(self.conv(h.transpose(1, 2)).transpose(1, 2) + self.d * h))
        return x + self.mlp(self.n2(x))


@block(stack("pre", sublayers=8))
class PrePositionsInEveryLayer(Two):
    """DETR adds positions to the normed input of every attention."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(TIME, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x) + self.positions)
        return x + self.mlp(self.n2(x))


@block(stack("pre", sublayers=8))
class PreTanhGate(Two):
    """Flamingo: the branch is gated by tanh of a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.g.tanh() * self.attn(self.n1(x))
        return x + self.g.tanh() * self.mlp(self.n2(x))


@block(stack("pre", sublayers=8))
class PreGateFromData(Two):
    """The branch is gated by a sigmoid of its own normed input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        x = x + self.gate(h).sigmoid() * self.attn(h)
        return x + self.mlp(self.n2(x))


@block(stack("sandwich", sublayers=8))
class SandwichLayerScale(Sandwich):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.full((HIDDEN,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.g * self.n3(self.attn(self.n1(x)))
        return x + self.g * self.n4(self.mlp(self.n2(x)))


@block(stack("mixed", "other", final=None, sublayers=16), ends=False)
class MacaronConformer(Two):
    """Two half-step MLPs around attention and convolution; a norm closes the block."""

    def __init__(self) -> None:
        super().__init__()
        self.n3, self.n4, self.close, self.mlp2 = Layer(), Layer(), Layer(), Mlp()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.mlp(self.n1(x))
        x = x + self.attn(self.n2(x))
        x = x + F.silu(self.conv(self.n3(x).transpose(1, 2))).transpose(1, 2)
        return self.close(x + 0.5 * self.mlp2(self.n4(x)))


class Swap(nn.Module):
    """BatchNorm1d over the hidden axis of [B, T, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x.transpose(1, 2)).transpose(1, 2)


@block(stack("post", final=False, sublayers=8), ends=False)
class PostBatchNorm(Post):
    """PatchTST."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = Swap(), Swap()


class Reinjected(Decoder):
    """Mixes the first value of the stream back in before every block (modded-nanoGPT)."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.mix = nn.Parameter(torch.tensor([[0.9, 0.1]] * len(blocks)))

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.embed(ids)
        for layer, mix in zip(self.blocks, self.mix, strict=True):
            x = layer(mix[0] * x + mix[1] * first)
        return self.head(self.last(x))


@model(stack("pre"))
def pre_first_value_reinjected() -> nn.Module:
    return Reinjected([Pre() for _ in range(DEPTH)])


class CrossAttending(nn.Module):
    """Pre-norm decoder blocks that also attend to a memory, whose own stack ends in a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, 9)
        self.encode, self.between = nn.ModuleList(Pre() for _ in range(3)), Layer()
        self.decode, self.last = nn.ModuleList(CrossBlock() for _ in range(3)), Layer()

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.embed(ids)
        for layer in self.encode:
            memory = layer(memory)
        memory, x = self.between(memory), self.embed(ids[:, :5])
        for layer in self.decode:
            x = layer(x, memory)
        return self.head(self.last(x))


class CrossBlock(Two):
    """Self-attention, cross-attention, MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.n3, self.cross = Layer(), Attention()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        x = x + self.cross(self.n3(x), memory)
        return x + self.mlp(self.n2(x))


@model(stack("pre", depth=3, sublayers=9), stack("pre", depth=3, sublayers=6))
def pre_cross_attention() -> nn.Module:
    return CrossAttending()


class TimeResidual(nn.Module):
    """Adds a projected time step between the convolutions: an add of an activation that is no residual."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.c1, self.n2, self.c2 = nn.GroupNorm(3, 12), conv(12, 12), nn.GroupNorm(3, 12), conv(12, 12)
        self.time = nn.Linear(5, 12)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.c1(F.silu(self.n1(x))) + self.time(F.silu(time))[:, :, None, None]
        return x + self.c2(F.silu(self.n2(h)))


class TimeNet(nn.Module):
    """A stack of residual blocks that know the time step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = conv(3, 12), nn.ModuleList(TimeResidual() for _ in range(DEPTH))
        self.last, self.head = nn.GroupNorm(3, 12), conv(12, 3)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.blocks:
            x = layer(x, time)
        return self.head(F.silu(self.last(x)))


@model(stack("pre", sublayers=4), inputs=lambda: (*images(), torch.randn(BATCH, 5)), inner=True)
def group_norm_time_embedding() -> nn.Module:
    return TimeNet()


# No stream


class Recurrent(nn.Module):
    """An LSTM tagger: no residual stream, one norm on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, HIDDEN), nn.LSTM(HIDDEN, HIDDEN, 2, batch_first=True)
        self.norm, self.head = Layer(), nn.Linear(HIDDEN, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.lstm(self.embed(ids))[0]))


@model(inner=None)
def lstm_without_residual() -> nn.Module:
    return Recurrent()


@model(inputs=floats, inner=None)
def plain_mlp_with_norms() -> nn.Module:
    """A chain of linear, norm, activation: no stream."""
    layers = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Layer(), nn.ReLU()) for _ in range(DEPTH)]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, 9))


class DenseNet(nn.Module):
    """Concatenation in place of addition: no stream either."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 12)
        self.norms = nn.ModuleList(nn.BatchNorm2d(12 * (i + 1)) for i in range(DEPTH))
        self.convs = nn.ModuleList(conv(12 * (i + 1), 12) for i in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, layer(F.relu(norm(x)))], 1)
        return x


@model(inputs=images, inner=None)
def dense_net() -> nn.Module:
    return DenseNet()


@model(inputs=floats)
def no_norm_at_all() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, 9))
