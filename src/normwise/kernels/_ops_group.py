"""The dispatcher's operators over groups of channels: schemas and fake kernels.

``group``
    ``norm_groups_saving`` with the gradients of y: what stands in a compiled graph.
``norm_groups``
    y = (x - mean) * rstd * (offset + weight) + bias of x [N, C, *], with mean and rstd of each sample and each of
    ``groups`` groups of channels; in the memory format of x. Of ``code`` only ``OFFSET_IN_WEIGHT_DTYPE`` counts.
``norm_groups_saving``
    The same with stats [3, N, groups] in float32 (float64 for float64): a pivot, what the mean is beyond it, and
    rstd; with ``variance`` a fourth row, the variance.
``norm_groups_backward``
    Gradients of x, weight and bias; ``needs`` as for ``norm_rows_backward``, but a gain
    or bias that is not needed comes back empty.
"""

from __future__ import annotations

import torch

from normwise.kernels._ops import LIBRARY

__all__: list[str] = []

_NORM = "Tensor? weight, Tensor? bias, int groups, int code, float eps, float offset"

LIBRARY.define(f"group(Tensor x, {_NORM}, bool variance) -> (Tensor y, Tensor stats)")
LIBRARY.define(f"norm_groups(Tensor x, {_NORM}) -> Tensor")
LIBRARY.define(f"norm_groups_saving(Tensor x, {_NORM}, bool variance) -> (Tensor y, Tensor stats)")
LIBRARY.define(
    "norm_groups_backward(Tensor dy, Tensor x, Tensor stats, Tensor? weight, int groups, int code, float offset, "
    "int needs) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _like(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous() and x.movedim(1, -1).is_contiguous():
        return torch.empty_like(x)
    return x.new_empty(x.shape)


@torch.library.register_fake("normwise::norm_groups", lib=LIBRARY)
def _norm_groups(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    code: int,
    eps: float,
    offset: float,
) -> torch.Tensor:
    return _like(x)


@torch.library.register_fake("normwise::norm_groups_saving", lib=LIBRARY)
def _norm_groups_saving(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    code: int,
    eps: float,
    offset: float,
    variance: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(x), x.new_empty((4 if variance else 3, x.shape[0], groups), dtype=_sums(x.dtype))


@torch.library.register_fake("normwise::norm_groups_backward", lib=LIBRARY)
def _norm_groups_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    stats: torch.Tensor,
    weight: torch.Tensor | None,
    groups: int,
    code: int,
    offset: float,
    needs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype, channels = _sums(x.dtype) if weight is None else weight.dtype, x.shape[1]
    dweight = x.new_empty((channels if needs & 2 else 0,), dtype=dtype)
    return _like(x), dweight, x.new_empty((channels if needs & 4 else 0,), dtype=dtype)
