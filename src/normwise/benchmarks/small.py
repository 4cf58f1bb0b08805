"""RMSNorm and LayerNorm on few rows: what a call costs beside its arithmetic.

Eight rows of 1,024: the memory moves in a microsecond, the rest is the way into the kernel and, with gradients, the
nodes of the graph. The layers stand beside functions, theirs (``torch.nn.functional``) and ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from normwise import functional as own_functional
from normwise import layers
from normwise.benchmarks._check import check_layer
from normwise.benchmarks._contest import BOTH, FORWARD, Built, Contest, Rival, Setting
from normwise.benchmarks._options import Options
from normwise.benchmarks._race import Method
from normwise.benchmarks._rivals import EPS, rivals_of

__all__ = ["OUR_FUNCTION", "TORCH_FUNCTION", "contests"]

ZH = """少量行上的 RMSNorm 与 LayerNorm：一次调用除算术以外的开销。

八行、每行 1024 个数：内存传输只需约一微秒，其余是进入内核的路径，求梯度时还有计算图的节点。除了层，
还测函数：torch.nn.functional 的和我们的。
"""
METHOD, QUICK = Method(rounds=15), Method(rounds=5)
SHAPE = "ROWSxWIDTH"
SHAPES = QUICK_SHAPES = ((8, 1024),)
DTYPES = (torch.float32, torch.bfloat16)
QUICK_DTYPES = (torch.float32,)

OUR_FUNCTION = "normwise.functional"
TORCH_FUNCTION = "F.layer_norm"  # stands beside RMSNorm too: torch's quickest norm


def contests(options: Options, threads: int) -> list[Contest]:
    """Return a contest for each dtype, shape and layer."""
    return [
        make(shape, dtype, options, threads)
        for dtype in options.dtypes
        for shape in options.shapes
        for make in (_rms, _layer)
    ]


def _rms(shape: tuple[int, ...], dtype: torch.dtype, options: Options, threads: int) -> Contest:
    size = shape[-1]
    setting = Setting(layer="RMSNorm", shape=shape, dtype=dtype, threads=threads, device=options.device)
    functions = {
        OUR_FUNCTION: lambda x, w: own_functional.rms_norm(x, (size,), w, EPS),
        "F.rms_norm": lambda x, w: functional.rms_norm(x, (size,), w, EPS),
        TORCH_FUNCTION: lambda x, w: functional.layer_norm(x, (size,), w, None, EPS),
    }
    return _contest(setting, layers.RMSNorm, nn.RMSNorm, functions, ("weight",), options)


def _layer(shape: tuple[int, ...], dtype: torch.dtype, options: Options, threads: int) -> Contest:
    size = shape[-1]
    setting = Setting(layer="LayerNorm", shape=shape, dtype=dtype, threads=threads, device=options.device)
    functions = {
        OUR_FUNCTION: lambda x, w, b: own_functional.layer_norm(x, (size,), w, b, EPS),
        TORCH_FUNCTION: lambda x, w, b: functional.layer_norm(x, (size,), w, b, EPS),
    }
    return _contest(setting, layers.LayerNorm, nn.LayerNorm, functions, ("weight", "bias"), options)


def _contest(
    setting: Setting,
    own: Callable[..., Any],
    torchs: Callable[..., nn.Module],
    functions: dict[str, Callable[..., torch.Tensor]],
    names: tuple[str, ...],
    options: Options,
) -> Contest:
    size = setting.shape[-1]
    ours, theirs = partial(own, size, eps=EPS), partial(torchs, size, eps=EPS)
    spec, rms = ours().spec, setting.layer == "RMSNorm"
    rivals = rivals_of(setting, ours, spec, theirs, with_eager=options.eager, rms=rms)
    called = [Rival(name=name, build=partial(_function, each, names, setting)) for name, each in functions.items()]
    return Contest(
        setting=setting,
        rivals=[rivals[0], called[0], *rivals[1:], *called[1:]],
        check=partial(check_layer, ours, spec, setting.shape, setting.dtype, device=options.device),
        passes=(FORWARD, BOTH),
    )


def _function(function: Callable[..., torch.Tensor], names: tuple[str, ...], setting: Setting) -> Built:
    size = setting.shape[-1]
    parameters = tuple(
        torch.full((size,), float(name == "weight"), dtype=setting.dtype, device=setting.device).requires_grad_()
        for name in names
    )
    return Built(lambda x: function(x, *parameters), parameters)
