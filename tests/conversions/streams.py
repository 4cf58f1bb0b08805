"""Small models, one for each way in which a LayerNorm can sit on a residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SIZE, TOKENS, VOCABULARY = 12, 5, 17


class MLP(nn.Module):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Any wiring of one MLP, by its forward."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(size), MLP(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class PostBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.mlp(x))


class SandwichBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.after = nn.LayerNorm(SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.mlp(self.norm(x)))


class BareSandwichBlock(SandwichBlock):
    """The norm behind the branch has neither gain nor bias: it writes a mean of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.LayerNorm(SIZE, elementwise_affine=False)


class ParallelBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm2, self.mlp2 = nn.LayerNorm(SIZE), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x)) + self.mlp2(self.norm2(x))


class LayerScaleBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((SIZE,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.mlp(self.norm(x))


class NumberScaleBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.7 * x + self.scale * self.mlp(self.norm(x))


class VectorStreamBlock(Block):
    """The stream itself is multiplied by a vector: the mean of its product depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x + self.mlp(self.norm(x))


class MixtureBlock(Block):
    """Two experts with a weight a token, added row by row into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.other = nn.Linear(SIZE, 2), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(0, 1)
        weight = self.router(rows).softmax(-1)
        total = torch.zeros_like(rows)
        every = torch.arange(len(rows))
        for number, expert in enumerate((self.mlp, self.other)):
            total.index_add_(0, every, weight[:, number : number + 1] * expert(rows))
        return x + total.view_as(x)


class UnbiasedNorm(nn.Module):
    """The Annotated Transformer's: standard deviation with D - 1, eps outside the root."""

    def __init__(self, size: int = SIZE, eps: float = 1e-3) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.bias


class OffsetNorm(nn.LayerNorm):
    """Nemotron's LN1p."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class Model(nn.Module):
    """Embeddings, blocks, a final norm and a head."""

    def __init__(self, *blocks: nn.Module, tied: bool = False, final: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, SIZE)
        self.positions = nn.Parameter(torch.randn(1, TOKENS, SIZE))
        self.blocks: Any = nn.ModuleList(blocks)
        self.final: nn.Module = nn.LayerNorm(SIZE) if final else nn.Identity()
        self.head = nn.Linear(SIZE, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.tokens(ids) + self.positions[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


class Unnormed(Model):
    """The first block reads the stream without a norm (ModernBERT)."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions[:, : ids.shape[1]]
        x = x + self.blocks[0].mlp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


class Tapped(Model):
    """An auxiliary head reads the raw stream behind the first block."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.aside = nn.Linear(SIZE, 3)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(ids) + self.positions[:, : ids.shape[1]]
        x = self.blocks[0](x)
        aside = self.aside(x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(self.final(x)), aside


class Streaming(Model):
    """The stream itself is an output (output_hidden_states)."""

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(ids) + self.positions[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x)), x


class EmbeddingNormed(Model):
    """A norm with a gain writes the stream (BLOOM)."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.first = nn.LayerNorm(SIZE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


class Pooled(Model):
    """A mean over tokens stands before the final norm."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x.mean(1)))


class Merged(Model):
    """Two neighbours are joined along the features before the last norm (Swin)."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.final, self.head = nn.LayerNorm(2 * SIZE), nn.Linear(2 * SIZE, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(torch.cat([x[:, 0:4:2], x[:, 1:4:2]], -1)))


class Patches(nn.Module):
    """An image model: convolution, class token, positions as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, SIZE, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, SIZE))
        self.positions = nn.Buffer(torch.randn(1, 5, SIZE))
        self.blocks, self.final, self.head = nn.ModuleList([Block(), Block()]), nn.LayerNorm(SIZE), nn.Linear(SIZE, 7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x)[:, 0])


class ChannelsFirst(nn.Module):
    """A norm over channels whose module moves them to the end and back (ConvNeXt)."""

    class Norm(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.conv = nn.Conv2d(3, SIZE, 2, stride=2), self.Norm(SIZE), nn.Conv2d(SIZE, 4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.conv(self.norm(self.stem(images)))


class Recurrent(nn.Module):
    """One block is run three times (universal transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block, self.final = nn.Embedding(VOCABULARY, SIZE), Block(), nn.LayerNorm(SIZE)
        self.head = nn.Linear(SIZE, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for _ in range(3):
            x = self.block(x)
        return self.head(self.final(x))


class Low(nn.Module):
    """A linear map with a low-rank adapter beside it (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = (
            nn.Linear(SIZE, SIZE),
            nn.Linear(SIZE, 2, bias=False),
            nn.Linear(2, SIZE, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


class AdapterBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Low()


class TransposedBlock(Block):
    """Writes with x @ W, W of shape [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x) @ self.matrix


def ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
