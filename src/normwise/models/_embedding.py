"""Tokens to vectors: their embedding, learned positions and types, and the options that go with them."""

from __future__ import annotations

import torch
from torch import nn

from normwise.blocks.norms import MakeNorm

__all__ = ["Embedding"]


class Embedding(nn.Module):
    """ids [B, T] -> [B, T, H]: tokens, times ``scale``, plus positions and types, then a norm and dropout.

    Args:
        vocab_size: V.
        hidden_size: H.
        context: learned positions; 0: none.
        types: kinds of tokens, such as BERT's two segments; 0: none.
        scale: of the tokens, such as Gemma's sqrt(H).
        norm: makes the norm, or None.
        std: of the initial numbers.
        dropout: while training.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        context: int = 0,
        types: int = 0,
        scale: float = 1.0,
        norm: MakeNorm | None = None,
        std: float = 0.02,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(context, hidden_size) if context else None
        self.types = nn.Embedding(types, hidden_size) if types else None
        self.norm = norm(hidden_size) if norm else None
        self.dropout = nn.Dropout(dropout)
        for table in (self.tokens, self.positions, self.types):
            if table is not None:
                nn.init.normal_(table.weight, std=std)

    def forward(self, ids: torch.Tensor, start: int = 0, types: torch.Tensor | None = None) -> torch.Tensor:
        """Return the vectors of tokens whose first position is ``start``.

        Raises:
            TypeError: ids that are no tensor of whole numbers.
            ValueError: another shape, more positions than the context, a token or type that is not in its table.
        """
        _check(ids)
        x = _rows(self.tokens, ids, "tokens")
        if self.scale != 1.0:
            x = x * torch.tensor(self.scale, dtype=x.dtype, device=x.device)
        if self.positions is not None:
            end = start + ids.shape[1]
            if end > self.positions.num_embeddings:
                raise ValueError(
                    f"{end} positions are more than the context of {self.positions.num_embeddings}; "
                    "give fewer, or build the model with a longer context"
                )
            x = x + self.positions(torch.arange(start, end, device=ids.device))
        if self.types is not None:
            x = x + _rows(self.types, torch.zeros_like(ids) if types is None else types, "types")
        elif types is not None:
            raise ValueError("types are given to a model that has none; build it with types=")
        return self.dropout(x if self.norm is None else self.norm(x))


def _check(ids: torch.Tensor) -> None:
    """Refuse what is no batch of ids."""
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
        given = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TypeError(f"ids are an int64 tensor [B, T], given {given}; a tokenizer or torch.tensor makes one")
    if ids.ndim != 2:
        raise ValueError(f"ids have the shape [B, T], given {list(ids.shape)}; one sequence is ids[None]")


def _rows(table: nn.Embedding, ids: torch.Tensor, name: str) -> torch.Tensor:
    """Return rows of a table; the lookup itself finds what is outside, so that nothing is read twice."""
    try:
        return table(ids)
    except IndexError as error:
        low, high = int(ids.min()), int(ids.max())
        raise ValueError(f"{name} are 0 to {table.num_embeddings - 1} here, given {low} to {high}") from error
