"""QKNorm: queries and keys normalized before their product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from normwise import kernels
from normwise.functional._checks import check_floating, size_of
from normwise.functional._hidden import variant
from normwise.functional.hidden import RMS
from normwise.layers._norm_module import HiddenModule, told_kernel
from normwise.spec import NormSpec

__all__ = ["QKNorm"]


class HeadNorm(HiddenModule):
    """The norm of queries or of keys; its gain is flat, as checkpoints store it."""

    usual = RMS

    def __init__(
        self, heads: int, size: int, head_dim: int, spec: NormSpec, device: Any, dtype: Any, kernel: str
    ) -> None:
        super().__init__(size, device=device, dtype=dtype, spec=spec, kernel=kernel)
        self.heads, self.head_dim = heads, head_dim

    def forward(self, x: torch.Tensor, head_axis: int) -> torch.Tensor:
        if self.heads == 1:
            return self._normalize(x)
        axes = (head_axis, -1)
        weight, bias = (
            each if each is None or not each.ndim else each.unflatten(0, (self.heads, self.head_dim))
            for each in (self.weight, self.bias)
        )
        return kernels.forward(variant(self.spec, "axes", axes), x, weight, bias, kernel=self.kernel)


class QKNorm(nn.Module):
    """Normalize queries and keys, each head by itself or all heads of a position together.

    The two differ: per head (Qwen3, Gemma 3, ViT-22B) every head gets a statistic and all share one gain of
    ``head_dim`` values; over all heads (OLMo 2, before the heads are split) one statistic mixes the heads, and
    the gain has a value for every feature of every head.

    Args:
        head_dim: D, features of a head.
        num_heads: query heads; needed for ``over="all_heads"``.
        num_kv_heads: key heads; as many as query heads by default.
        over: ``"head"`` or ``"all_heads"``.
        eps: instead of the one of ``spec``.
        device: of the gains.
        dtype: of the gains.
        head_axis: axis of the heads in the input: -2 for [B, T, heads, D], 1 or -3 for [B, heads, T, D].
        spec: the convention, RMSNorm of torch by default; ``FAMILIES["qwen3"]``, or a LayerNorm for ViT-22B.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        q and k [B, T, heads, D] (or the layout ``head_axis`` says) -> the same two

    Raises:
        ValueError: another number of heads or features; an unknown ``over``.
        TypeError: an input that is not floating point.

    Examples:
        >>> q = torch.tensor([[[[3.0, 4.0], [30.0, 40.0]]]])  # [B, T, heads, D]
        >>> QKNorm(2)(q, q)[0].detach().flatten()
        tensor([0.8485, 1.1314, 0.8485, 1.1314])
        >>> QKNorm(2, 2, over="all_heads")(q, q)[0].detach().flatten()
        tensor([0.1194, 0.1592, 1.1940, 1.5920])

    References:
        Henry et al. 2020, arxiv.org/abs/2010.04245; Dehghani et al. 2023, arxiv.org/abs/2302.05442
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        over: str = "head",
        eps: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        head_axis: int = -2,
        spec: NormSpec = RMS,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        if over not in ("head", "all_heads"):
            raise ValueError(f"QKNorm normalizes over='head' or over='all_heads', given {over!r}; pass one of them")
        counts = {"head_dim": head_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        if any(count is not None and count < 1 for count in counts.values()):
            raise ValueError(f"QKNorm needs heads and features, given {counts}; pass 1 or more of each")
        if over == "all_heads" and num_heads is None:
            raise ValueError("QKNorm(over='all_heads') needs the number of heads, given None; pass num_heads=")
        self.head_dim = size_of(head_dim, "head_dim", "QKNorm")
        self.over, self.head_axis = over, head_axis
        spec = spec if eps is None else replace(spec, eps=eps)
        together = over == "all_heads"
        queries = num_heads if together and num_heads is not None else 1
        keys = (num_kv_heads or queries) if together else 1
        self.q_norm = HeadNorm(queries, queries * head_dim, head_dim, spec, device, dtype, kernel)
        self.k_norm = HeadNorm(keys, keys * head_dim, head_dim, spec, device, dtype, kernel)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize queries and keys."""
        return self._one(q, self.q_norm, "queries"), self._one(k, self.k_norm, "keys")

    def _one(self, x: torch.Tensor, norm: HeadNorm, name: str) -> torch.Tensor:
        check_floating(x, "QKNorm")
        axis = self.head_axis % x.ndim - x.ndim if x.ndim >= 2 else -1
        heads = x.shape[axis] if self.over == "all_heads" else 1
        if x.ndim < 2 or axis == -1 or x.shape[-1] != self.head_dim or heads != norm.heads:
            wanted = f"{norm.heads} heads on axis {self.head_axis} and " if self.over == "all_heads" else ""
            raise ValueError(
                f"QKNorm takes {name} with {wanted}{self.head_dim} features on the last axis, given shape "
                f"{list(x.shape)}; split the heads first, or pass another head_axis"
            )
        return norm(x, axis)

    def extra_repr(self) -> str:
        """Return sizes and what shares a statistic."""
        told = f"{self.head_dim}, over={self.over!r}, head_axis={self.head_axis}"
        return ", ".join([told, *told_kernel(self.q_norm.kernel)])
