"""nGPT: a layer whose stream, keys, queries and matrices all have length 1.

The stream is interpolated on the sphere instead of added to: h <- N(h + |a| * (N(F(h)) - h)), with N(x) = x / |x| and
a learned rate a for each feature. That is no placement of norms around an add, so it is a layer of its own, beside
``Stack``. After every step of the optimizer ``normalize_matrices`` brings the weights back to length 1; weight decay
and warm-up are not needed then.

References: Loshchilov et al. 2024, arxiv.org/abs/2410.01131
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from normwise.blocks.rotary import Rotary
from normwise.functional import l2_norm
from normwise.placements._asked import is_whole

__all__ = ["NGPTLayer"]


class _Learned(nn.Module):
    """A learned vector that starts at ``initial`` and is stored as if it started at ``scale``.

    Its steps are then of the size of those of the matrices, whose entries are about ``scale``.
    """

    def __init__(self, size: int, initial: float, scale: float) -> None:
        super().__init__()
        self.stored, self.factor = nn.Parameter(torch.full((size,), scale)), initial / scale

    def forward(self) -> torch.Tensor:
        return self.stored * self.factor


class NGPTLayer(nn.Module):
    """Attention and a gated MLP on the hypersphere.

    q and k are s_qk * N(.) after the turn by their positions, with scores times sqrt(D); the MLP is
    W_down(s_u u * silu(s_v sqrt(H) v)). No matrix has a shift.

    Args:
        hidden_size: H.
        num_heads: heads, which divide H.
        mlp_size: features inside the MLP; 4 H by default.
        rate: initial |a|.
        causal: whether a query sees no later key.
        rope_theta: base of the rotary positions.

    Shape:
        [B, T, H], of length 1 along H -> the same

    Raises:
        ValueError: heads that do not divide H, or an MLP without features.

    Examples:
        >>> layer = NGPTLayer(hidden_size=8, num_heads=2)
        >>> h = layer(torch.nn.functional.normalize(torch.ones(1, 3, 8), dim=-1))
        >>> h.norm(dim=-1).detach()
        tensor([[1., 1., 1.]])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_size: int | None = None,
        *,
        rate: float = 0.05,
        causal: bool = True,
        rope_theta: float = 10_000.0,
    ) -> None:
        super().__init__()
        if not is_whole(num_heads, 1) or hidden_size % num_heads:
            raise ValueError(f"{num_heads} heads do not divide hidden_size={hidden_size}; change one")
        if mlp_size is not None and not is_whole(mlp_size, 1):
            raise ValueError(f"mlp_size is a whole number, 1 or more, or None for 4 H, given {mlp_size!r}")
        self.num_heads, self.causal = num_heads, causal
        inner, scale = mlp_size or 4 * hidden_size, hidden_size**-0.5
        self.rotary = Rotary(hidden_size // num_heads, rope_theta)
        self.q, self.k, self.v = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(3))
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.up, self.gate = (nn.Linear(hidden_size, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden_size, bias=False)
        self.attention_rate, self.mlp_rate = (_Learned(hidden_size, rate, scale) for _ in range(2))
        self.qk_gain = _Learned(hidden_size, 1.0, scale)
        self.up_gain, self.gate_gain = (_Learned(inner, 1.0, 1.0) for _ in range(2))
        self.normalize_matrices()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return the stream after both sublayers."""
        h = self._towards(h, self._attend(h), self.attention_rate())
        return self._towards(h, self._mlp(h), self.mlp_rate())

    def _towards(self, h: torch.Tensor, branch: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        return l2_norm(h + rate.abs() * (l2_norm(branch) - h))

    def _attend(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            matrix(h).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3) for matrix in (self.q, self.k, self.v)
        )
        gain = self.qk_gain().unflatten(-1, (self.num_heads, 1, -1))
        q, k = (gain * l2_norm(self.rotary(each)) for each in (q, k))
        scale = q.shape[-1] ** 0.5
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale)
        return self.out(mixed.transpose(-2, -3).flatten(-2))

    def _mlp(self, h: torch.Tensor) -> torch.Tensor:
        gate = self.gate_gain() * h.shape[-1] ** 0.5 * self.gate(h)
        return self.down(self.up_gain() * self.up(h) * functional.silu(gate))

    @torch.no_grad()
    def normalize_matrices(self) -> None:
        """Give every matrix rows, or columns where it writes to the stream, of length 1: along H in any case."""
        for reads in (self.q, self.k, self.v, self.up, self.gate):
            reads.weight.copy_(l2_norm(reads.weight, dim=1))
        for writes in (self.out, self.down):
            writes.weight.copy_(l2_norm(writes.weight, dim=0))
