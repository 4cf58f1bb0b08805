"""Attention: softmax(q k^T * scale) v for every head, over the sequence itself or over a memory.

B batch, T queries, S keys, H hidden. Heads may share keys and values (GQA), q and k may be normalized, positions may
be rotary, scores may be capped, keys may be limited to a window.

References: Vaswani et al. 2017, arxiv.org/abs/1706.03762; Ainslie et al. 2023, arxiv.org/abs/2305.13245
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from normwise.blocks.cache import Cache
from normwise.blocks.norms import MakeNorm
from normwise.blocks.rotary import Rotary
from normwise.layers import QKNorm
from normwise.placements._asked import advice

__all__ = ["Attention"]


class Attention(nn.Module):
    """Multi-head attention.

    Args:
        hidden_size: H.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values, which divide those of queries; as many by default.
        head_dim: D; H / num_heads by default.
        causal: whether a query sees no later key.
        cross: whether keys and values are of a memory.
        bias: whether q, k, v and out have a shift.
        rotary: turns q and k, or None.
        qk_norm: normalizes q and k: "head" each head, "all-heads" those of a position together, or None.
        norm: makes norms; needed for the options below and qk_norm.
        normalized: which of q, k and v heads have a norm of their own, such as "qkv".
        inner_norm: whether a norm stands before out.
        head_gains: whether each head has a learned factor.
        window: a query sees so many keys, itself among them; None: all.
        softcap: scores are softcap * tanh(scores / softcap); None: as they are.
        scale: factor of the scores; D^(-1/2) by default.
        dropout: of the attention weights while training.
        layer: its number, by which a cache knows it.

    Shape:
        [B, T, H] -> the same
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        norm: MakeNorm,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        cross: bool = False,
        bias: bool = False,
        rotary: Rotary | None = None,
        qk_norm: str | None = None,
        normalized: str = "",
        inner_norm: bool = False,
        head_gains: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        layer: int = 0,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"{num_heads} heads do not divide hidden_size={hidden_size}; change one, or pass head_dim")
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={num_heads}; change one")
        self.head_dim = head_dim or hidden_size // num_heads
        self.causal, self.cross = causal, cross
        self.window, self.softcap, self.dropout, self.layer = window, softcap, dropout, layer
        self.scale = self.head_dim**-0.5 if scale is None else scale
        queries, keys = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q = nn.Linear(hidden_size, queries, bias)
        self.k = nn.Linear(hidden_size, keys, bias)
        self.v = nn.Linear(hidden_size, keys, bias)
        self.out = nn.Linear(queries, hidden_size, bias)
        self.rotary = rotary
        self.qk_norm = self._qk_norm(qk_norm, norm)
        self.norms = nn.ModuleDict({each: norm(self.head_dim) for each in normalized})
        self.inner_norm = norm(queries) if inner_norm else None
        self.head_gains = nn.Parameter(torch.ones(num_heads)) if head_gains else None

    def _qk_norm(self, over: str | None, norm: MakeNorm) -> QKNorm | None:
        if over is None:
            return None
        if over not in ("head", "all-heads"):
            raise ValueError(f"qk_norm={over!r} is unknown; {advice(over, ('head', 'all-heads', 'None'))}")
        spec = norm(self.head_dim).spec
        kinds = {"head": "head", "all-heads": "all_heads"}
        return QKNorm(self.head_dim, self.num_heads, self.num_kv_heads, over=kinds[over], spec=spec)  # type: ignore[arg-type]

    def forward(
        self,
        x: torch.Tensor,
        *,
        memory: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Return the branch.

        Args:
            x: queries, and keys and values where there is no memory.
            memory: [B, S, H], what an encoder returned.
            mask: bool [B, S], True at keys that are real.
            cache: of earlier keys and values.

        Raises:
            TypeError: a mask that is not bool.
            ValueError: a memory that is missing or not read, or a mask of another shape.
        """
        if self.cross == (memory is None):
            reads = "reads a memory [B, S, H], what an encoder returned: pass memory=" if self.cross else "reads none"
            raise ValueError(f"this attention {reads}, given {'none' if memory is None else 'a memory'}")
        source = x if memory is None else memory
        q = self.q(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k(source).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v(source).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        if self.norms:
            q, k, v = (
                self.norms[name](h) if name in self.norms else h for name, h in zip("qkv", (q, k, v), strict=True)
            )
        q, k, v = (h.transpose(-2, -3) for h in (q, k, v))
        start = 0 if cache is None else cache.length
        if self.rotary is not None:
            q, k = self.rotary(q, start), self.rotary(k, start)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        if mask is not None:
            _check_mask(mask, k)
        h = self._attend(q, k, v, mask, start)
        if self.head_gains is not None:
            h = h * self.head_gains[:, None, None]
        h = h.transpose(-2, -3).flatten(-2)
        return self.out(h if self.inner_norm is None else self.inner_norm(h))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, start: int
    ) -> torch.Tensor:
        seen = None if mask is None else mask[:, None, None, :]
        simple = self.causal and seen is None and self.window is None and self.softcap is None and start == 0
        if not simple and self.causal:
            seen = self._before(q, k, start) if seen is None else seen & self._before(q, k, start)
        shared = self.num_kv_heads != self.num_heads
        if self.softcap is None:
            return functional.scaled_dot_product_attention(
                q,
                k,
                v,
                seen,
                self.dropout if self.training else 0.0,
                is_causal=simple,
                scale=self.scale,
                enable_gqa=shared,
            )
        if shared:
            k, v = (h.repeat_interleave(self.num_heads // self.num_kv_heads, -3) for h in (k, v))
        scores = self.softcap * torch.tanh(q @ k.transpose(-1, -2) * self.scale / self.softcap)
        scores = scores if seen is None else scores.masked_fill(~seen, float("-inf"))
        return functional.dropout(scores.softmax(-1), self.dropout, self.training) @ v

    def _before(self, q: torch.Tensor, k: torch.Tensor, start: int) -> torch.Tensor:
        """Return bool [T, S]: which keys a query sees."""
        at = torch.arange(start, start + q.shape[-2], device=q.device)[:, None]
        keys = torch.arange(k.shape[-2], device=q.device)
        seen = keys <= at
        return seen if self.window is None else seen & (keys > at - self.window)


def _check_mask(mask: torch.Tensor, k: torch.Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is bool, True at real tokens, given {mask.dtype}; mask.bool() is one")
    if mask.ndim != 2 or mask.shape[0] not in (1, k.shape[0]) or mask.shape[1] != k.shape[-2]:
        raise ValueError(f"mask has the shape [B, S] = {[k.shape[0], k.shape[-2]]}, given {list(mask.shape)}")
