"""What the models are built of: the arguments they share, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from normwise import placements
from normwise.blocks import MLP, Attention, Rotary, Stack, norm_maker
from normwise.blocks.stack import MakeSublayer
from normwise.models._embedding import Embedding
from normwise.models.inits import initialise
from normwise.placements._asked import advice, is_whole, kebab
from normwise.spec import NormSpec, Wiring

__all__ = ["Build"]

POSITIONS = ("rotary", "learned", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """The arguments of a model; see ``Decoder`` for what they mean."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    placement: str
    norm: str | NormSpec
    eps: float | None
    mlp: str
    mlp_size: int | None
    num_kv_heads: int | None
    head_dim: int | None
    positions: str
    rope_theta: float
    context: int
    bias: bool
    qk_norm: str | None
    embedding_norm: bool
    embedding_scale: float
    final_norm: bool | None
    windows: tuple[int | None, ...]
    softcap: float | None
    attention_scale: float | None
    dropout: float
    init: str | None
    attention_bias: bool | None = None
    types: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be built, with the reason."""
        for name in ("vocab_size", "hidden_size", "num_heads", "context"):
            if not is_whole(value := getattr(self, name), 1):
                raise ValueError(f"{name} is a whole number, 1 or more, given {value!r}")
        for name in ("num_kv_heads", "head_dim", "mlp_size"):
            if (value := getattr(self, name)) is not None and not is_whole(value, 1):
                raise ValueError(f"{name} is a whole number, 1 or more, or None for the usual one, given {value!r}")
        if not is_whole(self.types, 0):
            raise ValueError(f"types is a whole number, 0 for none, given {self.types!r}")
        if not all(window is None or is_whole(window, 1) for window in self.windows):
            raise ValueError(f"a window is 1 key or more, or None for all of them, given windows={self.windows!r}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is a number above 0, or None for no cap, given {self.softcap!r}")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions={self.positions!r} is unknown; {advice(self.positions, POSITIONS)}")

    def embedding(self, depth: int, side: str = "decoder") -> Embedding:
        """Return what turns ids into vectors."""
        std = 0.02 if self.init_name in ("normal", "gpt-2") else self.hidden_size**-0.5
        return Embedding(
            self.vocab_size,
            self.hidden_size,
            context=self.context if self.positions == "learned" else 0,
            types=self.types,
            scale=self.embedding_scale,
            norm=norm_maker(self.norm, self.eps) if self.embedding_norm else None,
            std=std * placements.get(self.placement).embedding_gain(depth, side=side),
            dropout=self.dropout,
        )

    @property
    def init_name(self) -> str:
        """Return the initialisation: the one asked for, or the placement's."""
        return placements.get(self.placement).init if self.init is None else kebab(self.init)

    def stack(self, depth: int, *, causal: bool, side: str, other_depth: int = 0, cross: bool = False) -> Stack:
        """Return the layers, initialised."""
        if not is_whole(depth, 1):
            raise ValueError(f"the {side} has a whole number of layers, 1 or more, given {depth!r}")
        sublayers: dict[str, MakeSublayer] = {"attention": lambda i, wiring: self._attention(i, wiring, causal=causal)}
        if cross:
            sublayers["cross"] = lambda i, wiring: self._attention(i, wiring, causal=False, cross=True)
        sublayers["mlp"] = self._mlp
        stack = Stack(
            depth,
            self.hidden_size,
            sublayers,
            placement=placements.get(self.placement),
            norm=norm_maker(self.norm, self.eps),
            side=side,
            other_depth=other_depth,
            final_norm=self.final_norm,
            dropout=self.dropout,
        )
        initialise(stack, self.init)
        return stack

    def _attention(self, layer: int, wiring: Wiring, *, causal: bool, cross: bool = False) -> nn.Module:
        size = self.head_dim or self.hidden_size // self.num_heads
        return Attention(
            self.hidden_size,
            self.num_heads,
            norm=norm_maker(self.norm, self.eps),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            causal=causal,
            cross=cross,
            bias=self.bias if self.attention_bias is None else self.attention_bias,
            rotary=Rotary(size, self.rope_theta) if self.positions == "rotary" and not cross else None,
            qk_norm=self.qk_norm,
            normalized=wiring.qkv,
            inner_norm=wiring.inner,
            head_gains=wiring.head_gains,
            softcap=self.softcap,
            scale=self.attention_scale,
            dropout=self.dropout,
            layer=layer,
            window=self.windows[layer % len(self.windows)] if self.windows else None,
        )

    def _mlp(self, layer: int, wiring: Wiring) -> nn.Module:
        size = 4 * self.hidden_size if self.mlp_size is None else self.mlp_size
        inner = norm_maker(self.norm, self.eps) if wiring.inner else None
        return MLP(self.hidden_size, size, self.mlp, bias=self.bias, inner_norm=inner)
