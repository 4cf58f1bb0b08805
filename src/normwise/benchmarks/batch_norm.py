"""BatchNorm2d in training, and GroupNorm, on the images of a convolutional network.

A batch of 32 with 64 channels of 56 x 56, as in the first stage of a ResNet, in both layouts of memory. Forward is the
training pass: it measures the batch and moves the running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from normwise.functional.group import group_spec
from normwise.spec import NormSpec

__all__ = ["contests"]

ZH = """训练中的 BatchNorm2d，以及 GroupNorm，输入为卷积网络的图像。

批大小 32、64 个通道、56 x 56，如 ResNet 第一阶段，两种内存布局。前向是训练时的前向：统计本批并更新运行统计量。
"""
METHOD, QUICK = Method(), Method(rounds=3)
SHAPE = "NxCxHxW"
SHAPES = ((32, 64, 56, 56),)
QUICK_SHAPES = ((16, 64, 28, 28),)
DTYPES = (torch.float32, torch.bfloat16)
QUICK_DTYPES = (torch.float32,)
LAYOUTS = (None, "channels_last")
_GROUPS = 32  # of GroupNorm, as in its paper; fewer where the channels cannot be divided so


def contests(options: Options, threads: int) -> list[Contest]:
    """Return a contest for each dtype, shape, layer and layout."""
    return [
        _contest(name, shape, dtype, layout, options, threads)
        for dtype in options.dtypes
        for shape in options.shapes
        for name in ("BatchNorm2d", "GroupNorm")
        for layout in LAYOUTS
    ]


def _contest(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str | None, options: Options, threads: int
) -> Contest:
    ours, theirs, spec = _layers(name, shape[1], len(shape))
    setting = Setting(layer=name, shape=shape, dtype=dtype, threads=threads, layout=layout, device=options.device)
    return Contest(
        setting=setting,
        rivals=rivals_of(setting, ours, spec, theirs, with_eager=options.eager),
        check=partial(check_layer, ours, spec, shape, dtype, layout=layout, device=options.device),
    )


def _layers(name: str, channels: int, ndim: int) -> tuple[Callable[[], Any], Callable[[], nn.Module], NormSpec]:
    """Return what makes our layer and torch's, and what ours computes."""
    if name == "BatchNorm2d":
        ours = partial(layers.BatchNorm2d, channels, eps=EPS)
        return ours, partial(nn.BatchNorm2d, channels, eps=EPS), ours().spec
    groups = next(count for count in range(min(_GROUPS, channels), 0, -1) if channels % count == 0)
    ours = partial(layers.GroupNorm, groups, channels, eps=EPS)
    spec = replace(ours().spec, axes=group_spec(groups, EPS, ndim).axes)
    return ours, partial(nn.GroupNorm, groups, channels, eps=EPS), spec
