"""The dispatcher's operators over an axis that is not the last: schemas and fake kernels.

``channel``
    ``norm_channels`` with its gradients: what stands in a compiled graph.
``norm_channels``
    ``norm_rows`` over axis ``axis`` (negative) of x, without a permuted copy; ``code`` as in ``Code``.
``norm_channels_saving``
    The same with stats [2, outer, length] (mean, rstd) of a centred norm, else [1, outer, length] (rstd), where
    outer and length are the products of the axes before and after; in float32 (float64 for float64).
``norm_channels_backward``
    Gradients of x, weight and bias; ``needs`` as for ``norm_rows_backward``, but a gain
    or bias that is not needed comes back empty.
"""

from __future__ import annotations

import math

import torch

from normwise.kernels._ops import LIBRARY

__all__: list[str] = []

_NORM = "Tensor? weight, Tensor? bias, int axis, int code, float eps, float offset"

LIBRARY.define(f"channel(Tensor x, {_NORM}) -> Tensor")
LIBRARY.define(f"norm_channels(Tensor x, {_NORM}) -> Tensor")
LIBRARY.define(f"norm_channels_saving(Tensor x, {_NORM}) -> (Tensor y, Tensor stats)")
LIBRARY.define(
    "norm_channels_backward(Tensor dy, Tensor x, Tensor stats, Tensor? weight, int axis, int code, float eps, "
    "float offset, int needs) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


@torch.library.register_fake("normwise::norm_channels", lib=LIBRARY)
def _norm_channels(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    axis: int,
    code: int,
    eps: float,
    offset: float,
) -> torch.Tensor:
    promoted = code & 8 and weight is not None and weight.dtype is torch.float32 and x.dtype is not torch.float64
    return x.new_empty(x.shape, dtype=torch.float32 if promoted else x.dtype)


@torch.library.register_fake("normwise::norm_channels_saving", lib=LIBRARY)
def _norm_channels_saving(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    axis: int,
    code: int,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    outer, length = math.prod(x.shape[:axis]), math.prod(x.shape[x.ndim + axis + 1 :])
    stats = x.new_empty((2 if code & 3 in (1, 2) else 1, outer, length), dtype=_sums(x.dtype))
    return _norm_channels(x, weight, bias, axis, code, eps, offset), stats


@torch.library.register_fake("normwise::norm_channels_backward", lib=LIBRARY)
def _norm_channels_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    stats: torch.Tensor,
    weight: torch.Tensor | None,
    axis: int,
    code: int,
    eps: float,
    offset: float,
    needs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype, channels = _sums(x.dtype) if weight is None else weight.dtype, x.shape[axis]
    dweight = x.new_empty((channels if needs & 2 else 0,), dtype=dtype)
    return x.new_empty(x.shape), dweight, x.new_empty((channels if needs & 4 else 0,), dtype=dtype)
