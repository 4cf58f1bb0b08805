"""RMSNorm and LayerNorm, plain and with a residual, on the rows of a transformer.

Forward without gradients, backward through a graph built before, and both together. The rows are the sublayers' of a
model of width 1024 or 4096 with 4,096 or 16,384 tokens in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from normwise import layers
from normwise.benchmarks._check import check_layer
from normwise.benchmarks._contest import Contest, Setting
from normwise.benchmarks._options import Options
from normwise.benchmarks._race import Method
from normwise.benchmarks._rivals import EPS, rivals_of

__all__ = ["contests"]

ZH = """RMSNorm 与 LayerNorm，单独的和带残差相加的，输入为 Transformer 的各行。

测量不求梯度的前向、在事先建好的计算图上的反向，以及两者合计。
各行取自宽度 1024 或 4096、批内 4096 或 16384 个词元的模型。
"""
METHOD, QUICK = Method(), Method(rounds=3)
SHAPE = "ROWSxWIDTH"
SHAPES = ((4096, 1024), (4096, 4096), (16384, 4096))
QUICK_SHAPES = ((4096, 1024),)
DTYPES = (torch.float32, torch.bfloat16)
QUICK_DTYPES = (torch.float32,)

Layers = tuple[str, Callable[[int], Any], Callable[[int], nn.Module], bool]
KINDS: tuple[Layers, ...] = (
    ("RMSNorm", partial(layers.RMSNorm, eps=EPS), partial(nn.RMSNorm, eps=EPS), False),
    ("LayerNorm", partial(layers.LayerNorm, eps=EPS), partial(nn.LayerNorm, eps=EPS), False),
    ("AddRMSNorm", partial(layers.AddRMSNorm, eps=EPS), partial(nn.RMSNorm, eps=EPS), True),
    ("AddLayerNorm", partial(layers.AddLayerNorm, eps=EPS), partial(nn.LayerNorm, eps=EPS), True),
)


def contests(options: Options, threads: int) -> list[Contest]:
    """Return a contest for each dtype, shape and layer."""
    return [
        _contest(kind, shape, dtype, options, threads)
        for dtype in options.dtypes
        for shape in options.shapes
        for kind in KINDS
    ]


def _contest(kind: Layers, shape: tuple[int, ...], dtype: torch.dtype, options: Options, threads: int) -> Contest:
    name, own, torchs, residual = kind
    ours, theirs = partial(own, shape[-1]), partial(torchs, shape[-1])
    setting = Setting(layer=name, shape=shape, dtype=dtype, threads=threads, device=options.device, residual=residual)
    spec = ours().spec
    return Contest(
        setting=setting,
        rivals=rivals_of(setting, ours, spec, theirs, with_eager=options.eager, rms="RMS" in name),
        check=partial(check_layer, ours, spec, shape, dtype, residual=residual, device=options.device),
    )
