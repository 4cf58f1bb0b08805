"""Measure what every placement does to signals and gradients at initialisation, beside what theory predicts.

``python docs/measure_placements.py`` (minutes) writes the tables of ``docs/measured.md`` and of the two guides
``docs/placements.md``, and the pictures ``docs/images/placements-*.svg``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from tables import write_table  # beside this file, which is run as a script

from normwise import placements
from normwise.models import Decoder
from normwise.rendering.charts import Panel, Series, depth_chart
from normwise.rendering.numbers import number
from normwise.rendering.svg import standalone
from normwise.theory import predict

DOCS = Path(__file__).parent
WORDS, WIDTH, DEPTH, HEADS, BATCH, TIME, SEEDS = 96, 128, 24, 4, 8, 64, (0, 1, 2)
ENGLISH = (
    "placement, stream at the end, theory, influence of layers 1; 12; 24, gradient of the median token, theory, "
    "of all tokens, share of position 0, as built: stream, as built: gradient"
)
CHINESE = (
    "放置方式, 末端残差流, 理论, 第 1; 12; 24 层的影响, 中位 token 的梯度, 理论, "
    "全部 token 的梯度, 位置 0 的占比, 默认模型：残差流, 默认模型：梯度"
)
HEADERS = {"measured.md": ENGLISH, "placements.md": ENGLISH, "placements.zh-CN.md": CHINESE}
# by name: what is drawn, of which placements, and what the picture shows
PICTURES = {
    "stream": ("rms", ("pre", "sandwich", "layernorm-scaling", "post"), "RMS of the stream by depth"),
    "gradient": ("gradient", ("pre", "sandwich", "post", "deep-norm"), "gradient of the median token by depth"),
}


@dataclass(frozen=True, slots=True)
class Signals:
    """By depth, the stream that enters the first layer first.

    Args:
        rms: root mean square of the stream.
        gradient: that of the median token's gradient, relative to all tokens' at the end.
        whole: that of all tokens' gradient, relative to the same.
        first: share of the gradient's energy on position 0.
        influence: 1 - cos of what enters and leaves each layer.
    """

    rms: tuple[float, ...]
    gradient: tuple[float, ...]
    whole: tuple[float, ...]
    first: tuple[float, ...]
    influence: tuple[float, ...]


def built(placement: str, seed: int, *, own: bool) -> tuple[Decoder, torch.Tensor]:
    """Return a decoder and what enters its stack: as it is built by default, or with branches of unit matrices.

    Unit: fan-in initialisation times the placement's gains, ReLU, no positions, tokens N(0, 1).
    """
    torch.manual_seed(seed)
    if own:
        model = Decoder(WORDS, WIDTH, DEPTH, HEADS, placement=placement)
    else:
        model = Decoder(WORDS, WIDTH, DEPTH, HEADS, placement=placement, mlp="relu", positions="none", init="fan-in")
        torch.nn.init.normal_(model.embedding.tokens.weight)
    model = model.double()  # without norms gradients leave the range of float32
    return model, model.embedding(torch.randint(WORDS, (BATCH, TIME))).detach()


def run(model: Decoder, x: torch.Tensor) -> Signals:
    """Return what one model does; the gradient that comes back to its end is N(0, 1)."""
    two = model.stack.placement.streams == 2
    x, summed = x.requires_grad_(), x
    streams = [x]
    for layer in model.stack.layers:
        x, summed = layer(x, summed) if two else (layer(x), summed)
        x.retain_grad()
        streams.append(x)
    end = x if not two or model.stack.final_norm is None else x + model.stack.final_norm(summed)
    upstream = torch.randn_like(end)
    end.backward(upstream)
    squares = [(torch.zeros_like(s) if s.grad is None else s.grad).pow(2).mean((0, 2)) for s in streams]
    last = float(upstream.pow(2).mean())
    pairs = pairwise(streams)
    return Signals(
        rms=tuple(float(s.detach().pow(2).mean().sqrt()) for s in streams),
        gradient=tuple(math.sqrt(float(each.median()) / last) for each in squares),
        whole=tuple(math.sqrt(float(each.mean()) / last) for each in squares),
        first=tuple(float(each[0] / each.sum()) for each in squares),
        influence=tuple(1 - float(torch.cosine_similarity(a.detach(), b.detach(), dim=-1).mean()) for a, b in pairs),
    )


@cache
def measured(placement: str, *, own: bool = False) -> Signals:
    """Return the means of the seeds."""
    runs = [run(*built(placement, seed, own=own)) for seed in SEEDS]
    return Signals(
        *(
            tuple(fmean(values) for values in zip(*(getattr(each, name) for each in runs), strict=True))
            for name in ("rms", "gradient", "whole", "first", "influence")
        )
    )


@cache
def predicted(placement: str) -> Signals | None:
    """Return what theory says of the first seed's weights; None where there are two streams."""
    model, x = built(placement, SEEDS[0], own=False)
    if model.stack.placement.streams == 2:
        return None
    told = predict(model.stack, x)
    return Signals(
        rms=tuple(math.sqrt(q) for q in told.q[::2]),
        gradient=told.token_gradient[::2],
        whole=told.gradient[::2],
        first=told.first_token[::2],
        influence=told.block_influence,
    )


def row(placement: str) -> list[str]:
    """Return the cells of a placement's row."""
    real, told, own = measured(placement), predicted(placement), measured(placement, own=True)
    return [
        f"`{placement}`",
        number(real.rms[-1]),
        number(told and told.rms[-1]),
        "; ".join(number(round(real.influence[at], 12), 2) for at in (0, 11, 23)),  # 1e-16 is a rounding of the cosine
        number(real.gradient[0]),
        number(told and told.gradient[0]),
        number(real.whole[0]),
        f"{100 * real.first[0]:.0f} %",
        f"{number(own.rms[0])} → {number(own.rms[-1])}",
        number(own.gradient[0]),
    ]


def picture(name: str) -> str:
    """Return a panel for each placement: measurement solid, theory dashed."""
    what, drawn, title = PICTURES[name]
    panels = []
    for placement in drawn:
        real, told = getattr(measured(placement), what), getattr(predicted(placement), what)
        both = (Series(name="measured", values=real), Series(name="theory", values=told, dashed=True))
        panels.append(Panel(name=placement, series=both))
    return standalone(depth_chart(panels, title=title, x_label="layer"))


def main() -> None:
    """Write tables and pictures."""
    rows = [row(placement) for placement in placements.names()]
    for page, header in HEADERS.items():
        write_table(DOCS / page, "measured placements", header, rows)
    for name in PICTURES:
        (DOCS / "images" / f"placements-{name}.svg").write_text(picture(name), "utf-8", newline="\n")


if __name__ == "__main__":
    main()
