"""What it costs to take one norm for another of the same name: a line for each field they differ in.

Run it: ``python examples/norms_of_one_name.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from normwise import NormSpec
from normwise.layers import GatedRMSNorm, LayerNorm, Norm, QKNorm, RMSNorm
from normwise.spec import Form, Statistic

H = 1024  # features
SIGMA = 1e-3  # of the small inputs that tell one eps from another


def size(x: torch.Tensor) -> float:
    """Return the root mean square."""
    return x.double().square().mean().sqrt().item()


def apart(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return how far ``x`` is from ``y``, relative to ``y``."""
    return size(x.double() - y.double()) / size(y)


def computed(x: torch.Tensor, **fields: Any) -> torch.Tensor:
    """Return what a spec with these fields makes of ``x``, with neutral gains."""
    return Norm(NormSpec(**{"eps": 1e-6, **fields}), x.shape[-1])(x).detach()


def like(family: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what a family's norm with this gain makes of ``x``."""
    norm = RMSNorm.like(family, x.shape[-1], dtype=weight.dtype)
    norm.load_state_dict({"weight": weight})
    return norm(x).detach()


def differences() -> Iterator[tuple[str, str]]:
    """Return each field with the figures of two norms that differ in it."""
    x = torch.randn(64, H)
    gemma = 0.1 * torch.randn(H)  # a trained gain as Gemma stores it: 1 + weight multiplies
    half, half_gain = x.bfloat16(), (1 + gemma).bfloat16()
    exact = like("olmo2", half.double(), half_gain.double())

    yield "weight_offset", f"{size(like('gemma', x, gemma)):.2f} {size(like('llama', x, gemma)):.2f}"
    tiny = torch.full((H,), 0.003).bfloat16()
    yield "offset_in_weight_dtype", f"{(1 + tiny.float())[0]:.3f} {(1 + tiny).float()[0]:.3f}"
    yield "eps", " ".join(f"{size(computed(SIGMA * x, eps=eps)):.2f}" for eps in (1e-6, 1e-5))
    yield "eps_inside", " ".join(f"{size(computed(SIGMA * x, eps=1e-5, eps_inside=way)):.2f}" for way in (True, False))
    yield "eps_clamp", f"{size(computed(SIGMA * x, eps=1e-5, eps_clamp=True)):.2f}"
    layer: dict[str, Any] = {"center": True, "statistic": Statistic.VARIANCE, "eps": 0.0}
    spreads = [size(computed(torch.randn(64, n), **layer, biased=False)) for n in (4, 768)]
    yield "biased", f"{spreads[0]:.3f} {spreads[1]:.4f}"
    yield "center", f"{apart(RMSNorm(H)(x + 1), LayerNorm(H)(x + 1)):.2f}"
    llama, olmo = like("llama", half, half_gain), like("olmo2", half, half_gain)
    yield (
        "cast",
        f"{100 * (llama != olmo).double().mean():.0f} % {100 * apart(llama, exact):.2f} % "
        + (f"{100 * apart(olmo, exact):.2f} %"),
    )
    outputs = [like(family, half, half_gain.float()).dtype for family in ("llama", "olmo2")]
    yield "out_dtype", " ".join(str(each).removeprefix("torch.") for each in outputs)
    large = torch.full((1, H), 300.0).half()
    by_hand = large * torch.rsqrt(large.pow(2).mean(-1, keepdim=True) + 1e-6)  # 300 * 300 is beyond float16
    yield "stats_dtype", f"{size(by_hand):.2f} {size(computed(large)):.2f}"
    ways = [computed(x, form=form) for form in (Form.RECIPROCAL, Form.DIVISION)]
    yield "form", f"{100 * (ways[0] != ways[1]).double().mean():.0f} %"
    z = torch.randn(64, H)
    yield "gate", f"{apart(GatedRMSNorm(H, norm_before_gate=False)(x, z), GatedRMSNorm(H)(x, z)):.2f}"
    q = torch.randn(2, 16, 4, 64) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]  # heads of four sizes
    mixed = QKNorm(64, 4, over="all_heads")(q, q)[0]
    yield "axes", " ".join(f"{size(mixed[:, :, head]):.2f}" for head in range(4))


def main() -> None:
    """Print each field and its figures; the guide docs/which-norm.md says what they mean."""
    torch.manual_seed(0)
    for field, figures in differences():
        print(f"{field:24}{figures}")


if __name__ == "__main__":
    main()
