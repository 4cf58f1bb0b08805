"""A decoder: tokens in, logits of the next token out. GPT-2, Llama, Gemma 2 and OLMo 2 are settings of it.

B batch, T time, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from normwise.blocks import Cache
from normwise.models._build import Build
from normwise.spec import NormSpec

__all__ = ["Decoder"]


class Decoder(nn.Module):
    """A causal language model, of which the placement of the norms is one argument.

    Args:
        vocab_size: V.
        hidden_size: H.
        num_layers: the number of layers.
        num_heads: attention heads.
        placement: where the norms sit, a name of ``normwise.placements.names()``.
        norm: "rms", "layer", "scale", the name of a model family such as "llama", or a ``NormSpec``.
        eps: of the norms, instead of the usual one.
        mlp: its activation, one of ``normwise.blocks.ACTIVATIONS``; "swiglu" and its like have a gate.
        mlp_size: features inside the MLP; 4 H by default.
        num_kv_heads: heads of keys and values; as many as ``num_heads`` by default.
        head_dim: features of a head; H / num_heads by default.
        positions: "rotary", "learned" or "none".
        rope_theta: base of the rotary wavelengths.
        context: the most positions, of learned ones and of a cache.
        bias: whether matrices have a shift.
        attention_bias: the same for attention alone.
        qk_norm: normalizes queries and keys: "head", "all-heads" or None.
        embedding_norm: whether a norm follows the embedding.
        embedding_scale: factor of the token embeddings.
        final_norm: whether the stream ends in a norm; None: where the placement needs it.
        windows: of the layers in turn, how many keys a query sees; None: all.
        softcap: of the attention scores, or None.
        attention_scale: factor of the scores; head_dim^(-1/2) by default.
        dropout: of embeddings, attention weights and branches, while training.
        init: an initialisation of ``normwise.models.INITS``; None: the one of the placement.
        tied: whether the head is the embedding.
        head_bias: whether the head has a shift.
        head_softcap: logits are head_softcap * tanh(logits / head_softcap); None: as they are.

    Shape:
        ids [B, T] -> logits [B, T, V]

    Raises:
        TypeError: a norm that is neither a name nor a spec; ids or masks of another dtype.
        ValueError: an unknown name (near ones are listed), no layer, heads that do not divide H, a size that is not
            a whole number, more positions than the context, a token outside the vocabulary.

    Examples:
        >>> model = Decoder(256, 64, 4, 4, placement="deep-norm")
        >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 256])
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        *,
        placement: str = "pre",
        norm: str | NormSpec = "rms",
        eps: float | None = None,
        mlp: str = "gelu",
        mlp_size: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        positions: str = "rotary",
        rope_theta: float = 10_000.0,
        context: int = 2048,
        bias: bool = False,
        attention_bias: bool | None = None,
        qk_norm: str | None = None,
        embedding_norm: bool = False,
        embedding_scale: float = 1.0,
        final_norm: bool | None = None,
        windows: Sequence[int | None] = (),
        softcap: float | None = None,
        attention_scale: float | None = None,
        dropout: float = 0.0,
        init: str | None = None,
        tied: bool = True,
        head_bias: bool = False,
        head_softcap: float | None = None,
    ) -> None:
        super().__init__()
        build = Build(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_heads=num_heads,
            placement=placement,
            norm=norm,
            eps=eps,
            mlp=mlp,
            mlp_size=mlp_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            positions=positions,
            rope_theta=rope_theta,
            context=context,
            bias=bias,
            attention_bias=attention_bias,
            qk_norm=qk_norm,
            embedding_norm=embedding_norm,
            embedding_scale=embedding_scale,
            final_norm=final_norm,
            windows=tuple(windows),
            softcap=softcap,
            attention_scale=attention_scale,
            dropout=dropout,
            init=init,
        )
        if head_softcap is not None and not head_softcap > 0:
            raise ValueError(f"head_softcap is a number above 0, or None for no cap, given {head_softcap!r}")
        self.context, self.head_softcap = context, head_softcap
        self.embedding = build.embedding(num_layers)
        self.stack = build.stack(num_layers, causal=True, side="decoder")
        self.head = nn.Linear(hidden_size, vocab_size, head_bias)
        if tied:
            self.head.weight = self.embedding.tokens.weight
        else:
            nn.init.normal_(self.head.weight, std=0.02)
        if head_bias:
            nn.init.zeros_(self.head.bias)

    def forward(
        self, ids: torch.Tensor, *, mask: torch.Tensor | None = None, cache: Cache | None = None
    ) -> torch.Tensor:
        """Return the logits.

        Args:
            ids: [B, T]; with a cache, those that it has not seen.
            mask: bool [B, T], True at real tokens; with a cache [B, S], S all tokens seen so far and these.
            cache: what earlier calls left, see ``new_cache``; it is written.
        """
        x = self.embedding(ids, 0 if cache is None else cache.length)
        x = self.stack(x, attention={"mask": mask, "cache": cache})
        if cache is not None:
            cache.advance(ids.shape[1])
        logits = self.head(x)
        return logits if self.head_softcap is None else self.head_softcap * torch.tanh(logits / self.head_softcap)

    def new_cache(self, context: int | None = None) -> Cache:
        """Return an empty cache for ``context`` positions, at most and by default those of the model."""
        cache = Cache(self.context if context is None else context)
        if cache.context > self.context:
            raise ValueError(
                f"a cache of {context} positions is longer than the model's context of {self.context}; "
                "ask for fewer, or build the model with a longer context"
            )
        return cache
