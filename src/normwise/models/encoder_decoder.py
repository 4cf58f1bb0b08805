"""An encoder and a decoder that reads it: the transformer as it was first published, for translation and its like.

B batch, S source, T target, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from normwise.models._build import Build
from normwise.spec import NormSpec

__all__ = ["EncoderDecoder"]


class EncoderDecoder(nn.Module):
    """A sequence to sequence model with one embedding, of which the placement of the norms is one argument.

    Args:
        vocab_size: V.
        hidden_size: H.
        num_encoder_layers: N.
        num_decoder_layers: M.
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

    Shape:
        source [B, S], target [B, T] -> logits [B, T, V]

    Raises:
        TypeError, ValueError: as ``Decoder``.

    Examples:
        >>> ids = torch.zeros(2, 5, dtype=torch.long)
        >>> EncoderDecoder(256, 64, 2, 3, 4)(ids, ids[:, :3]).shape
        torch.Size([2, 3, 256])
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_encoder_layers: int,
        num_decoder_layers: int,
        num_heads: int,
        *,
        placement: str = "post",
        norm: str | NormSpec = "layer",
        eps: float | None = None,
        mlp: str = "relu",
        mlp_size: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        positions: str = "learned",
        rope_theta: float = 10_000.0,
        context: int = 512,
        bias: bool = True,
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
        self.embedding = build.embedding(num_encoder_layers, "encoder")
        self.encoder = build.stack(num_encoder_layers, causal=False, side="encoder", other_depth=num_decoder_layers)
        self.decoder = build.stack(
            num_decoder_layers, causal=True, side="decoder", other_depth=num_encoder_layers, cross=True
        )
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.tokens.weight
        else:
            nn.init.normal_(self.head.weight, std=0.02)

    def forward(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        source_mask: torch.Tensor | None = None,
        target_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of the target's next tokens.

        Args:
            source: [B, S].
            target: [B, T].
            source_mask: bool [B, S], True at real tokens.
            target_mask: bool [B, T].
        """
        memory = self.encoder(self.embedding(source), attention={"mask": source_mask})
        x = self.decoder(
            self.embedding(target), attention={"mask": target_mask}, cross={"memory": memory, "mask": source_mask}
        )
        return self.head(x)
