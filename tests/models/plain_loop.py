"""Decoders written out by hand in plain torch, one update rule a placement: what the models are compared with.

Nothing here is shared with normwise: matrices come from a state dict, formulas from the papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Tensor = torch.Tensor
Weights = dict[str, Tensor]
EPS = 1e-5


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * gain


def turned(x: Tensor) -> Tensor:
    """Rotary positions, pair by pair, as complex numbers would turn; angles in float32."""
    size, steps = x.shape[-1], x.shape[-2]
    out = x.clone()
    for pair in range(size // 2):
        rate = 1.0 / 10_000.0 ** (torch.tensor(2 * pair, dtype=torch.float32) / size)
        angle = torch.arange(steps, dtype=torch.float32) * rate
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., pair], x[..., pair + size // 2]
        out[..., pair], out[..., pair + size // 2] = a * cos - b * sin, b * cos + a * sin
    return out


class Loop:
    """The layers of a decoder, from its state dict."""

    def __init__(self, weights: Weights, heads: int, depth: int) -> None:
        self.weights, self.heads, self.depth, self.layer = weights, heads, depth, 0

    def get(self, name: str) -> Tensor:
        return self.weights[f"stack.layers.{self.layer}.{name}"]

    def norm(self, where: str, x: Tensor) -> Tensor:
        return rms(x, self.get(f"{where}.weight"))

    def attention(self, x: Tensor, *, inner: bool = False, qkv: bool = False, gains: bool = False) -> Tensor:
        batch, steps, width = x.shape
        parts = []
        for name in "qkv":
            h = x @ self.get(f"attention.sublayer.{name}.weight").T
            h = h.reshape(batch, steps, self.heads, width // self.heads)
            if qkv:
                h = self.norm(f"attention.sublayer.norms.{name}", h)
            parts.append(h.permute(0, 2, 1, 3))
        q, k, v = turned(parts[0]), turned(parts[1]), parts[2]
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
        later = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        heads = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        if gains:
            heads = heads * self.get("attention.sublayer.head_gains").reshape(1, -1, 1, 1)
        h = heads.permute(0, 2, 1, 3).reshape(batch, steps, width)
        if inner:
            h = self.norm("attention.sublayer.inner_norm", h)
        return h @ self.get("attention.sublayer.out.weight").T

    def mlp(self, x: Tensor, *, inner: bool = False) -> Tensor:
        h = x @ self.get("mlp.sublayer.up.weight").T
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        if inner:
            h = self.norm("mlp.sublayer.norm", h)
        return h @ self.get("mlp.sublayer.down.weight").T


Update = Callable[[Loop, Tensor], Tensor]


def post(loop: Loop, x: Tensor) -> Tensor:
    x = loop.norm("attention.after_add", x + loop.attention(x))
    return loop.norm("mlp.after_add", x + loop.mlp(x))


def pre(loop: Loop, x: Tensor) -> Tensor:
    return scaled_pre(loop, x, 1.0, 1.0)


def scaled_pre(loop: Loop, x: Tensor, inside: float, outside: float) -> Tensor:
    x = x + outside * loop.attention(inside * loop.norm("attention.before", x))
    return x + outside * loop.mlp(inside * loop.norm("mlp.before", x))


def sandwich(loop: Loop, x: Tensor) -> Tensor:
    x = x + loop.norm("attention.after_branch", loop.attention(loop.norm("attention.before", x)))
    return x + loop.norm("mlp.after_branch", loop.mlp(loop.norm("mlp.before", x)))


def res_post(loop: Loop, x: Tensor) -> Tensor:
    x = x + loop.norm("attention.after_branch", loop.attention(x))
    return x + loop.norm("mlp.after_branch", loop.mlp(x))


def deep_norm(loop: Loop, x: Tensor) -> Tensor:
    alpha = (2 * loop.depth) ** (1 / 4)
    x = loop.norm("attention.after_add", alpha * x + loop.attention(x))
    return loop.norm("mlp.after_add", alpha * x + loop.mlp(x))


def sub_ln(loop: Loop, x: Tensor) -> Tensor:
    x = x + loop.attention(loop.norm("attention.before", x), inner=True)
    return x + loop.mlp(loop.norm("mlp.before", x), inner=True)


def normformer(loop: Loop, x: Tensor) -> Tensor:
    x = x + loop.norm("attention.after_branch", loop.attention(loop.norm("attention.before", x), gains=True))
    return x + loop.mlp(loop.norm("mlp.before", x), inner=True)


def mix_ln(loop: Loop, x: Tensor) -> Tensor:
    return post(loop, x) if loop.layer < math.ceil(loop.depth / 4) else pre(loop, x)


def layernorm_scaling(loop: Loop, x: Tensor) -> Tensor:
    return scaled_pre(loop, x, 1 / math.sqrt(loop.layer + 1), 1.0)


def residual_multiplier(loop: Loop, x: Tensor) -> Tensor:
    return scaled_pre(loop, x, 1.0, 1.4 / math.sqrt(loop.depth))


def hybrid_norm(loop: Loop, x: Tensor) -> Tensor:
    x = loop.norm("attention.after_add", x + loop.attention(x, qkv=True))
    return x + loop.mlp(x)


def b2t(loop: Loop, x: Tensor) -> Tensor:
    middle = loop.norm("attention.after_add", x + loop.attention(x))
    return loop.norm("mlp.after_add", x + middle + loop.mlp(middle))


def admin(loop: Loop, x: Tensor) -> Tensor:
    x = loop.norm("attention.after_add", x * loop.get("attention.skip_gain") + loop.attention(x))
    return loop.norm("mlp.after_add", x * loop.get("mlp.skip_gain") + loop.mlp(x))


def parallel(loop: Loop, x: Tensor) -> Tensor:
    return x + loop.attention(loop.norm("attention.before", x)) + loop.mlp(loop.norm("mlp.before", x))


def parallel_shared(loop: Loop, x: Tensor) -> Tensor:
    h = loop.norm("norm", x)
    return x + loop.attention(h) + loop.mlp(h)


def layerscale(loop: Loop, x: Tensor) -> Tensor:
    x = x + loop.get("attention.branch_gain") * loop.attention(loop.norm("attention.before", x))
    return x + loop.get("mlp.branch_gain") * loop.mlp(loop.norm("mlp.before", x))


def gained(loop: Loop, x: Tensor) -> Tensor:
    x = x + loop.get("attention.branch_gain") * loop.attention(x)
    return x + loop.get("mlp.branch_gain") * loop.mlp(x)


def nothing(loop: Loop, x: Tensor) -> Tensor:
    x = x + loop.attention(x)
    return x + loop.mlp(x)


def keel(loop: Loop, x: Tensor) -> Tensor:
    alpha = 2 * loop.depth
    x = loop.norm("attention.after_add", alpha * x + loop.attention(loop.norm("attention.before", x)))
    return loop.norm("mlp.after_add", alpha * x + loop.mlp(loop.norm("mlp.before", x)))


UPDATES: dict[str, tuple[Update, bool]] = {  # and whether a final norm follows
    "admin": (admin, False),
    "b2t": (b2t, False),
    "deep-norm": (deep_norm, False),
    "ds-init": (post, False),
    "hybrid-norm": (hybrid_norm, True),
    "keel": (keel, False),
    "layernorm-scaling": (layernorm_scaling, True),
    "layerscale": (layerscale, True),
    "mix-ln": (mix_ln, True),
    "none": (nothing, False),
    "normformer": (normformer, True),
    "parallel": (parallel, True),
    "parallel-shared": (parallel_shared, True),
    "post": (post, False),
    "pre": (pre, True),
    "res-post": (res_post, True),
    "residual-multiplier": (residual_multiplier, True),
    "rezero": (gained, False),
    "sandwich": (sandwich, True),
    "skip-init": (gained, False),
    "sub-ln": (sub_ln, True),
    "t-fixup": (nothing, False),
}


def logits(placement: str, weights: Weights, ids: Tensor, heads: int, depth: int) -> Tensor:
    """Run a decoder with rotary positions, RMSNorm with eps 1e-5, a GELU MLP and a tied head."""
    table = weights["embedding.tokens.weight"]
    loop, x = Loop(weights, heads, depth), table[ids]
    if placement == "residual":
        x = residual(loop, x)
    else:
        update, final = UPDATES[placement]
        for loop.layer in range(depth):
            x = update(loop, x)
        x = rms(x, weights["stack.final_norm.weight"]) if final else x
    return x @ table.T


def residual(loop: Loop, x: Tensor) -> Tensor:
    """ResiDual: a Post-Norm stream p, and r, the plain sum."""
    p = r = x
    for index in range(loop.depth):
        loop.layer = index
        for name, sublayer in (("attention", loop.attention), ("mlp", loop.mlp)):
            branch = sublayer(p)
            p, r = loop.norm(f"{name}.after_add", p + branch), r + branch
    return p + rms(r, loop.weights["stack.final_norm.weight"])
