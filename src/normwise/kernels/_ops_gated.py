"""The dispatcher's operators of gated norms: schemas and fake kernels, as ``_ops`` has them for norms of rows.

``gated``
    ``gated_rows`` with its gradients: what stands in a compiled graph.
``gated_rows``
    RMSNorm(x * act(z)) or RMSNorm(x) * act(z) over rows of ``size`` trailing elements in ``groups`` groups with a
    mean square each; ``code`` as in ``_ops.Code`` and ``GatedCode``.
``gated_rows_saving``
    The same with 1 / root of each group, [rows, groups], in float32 (float64 for float64).
``gated_rows_backward``
    Gradients of x, z and weight for the gradient ``dy``; that of the weight is empty unless ``needs_weight``.
"""

from __future__ import annotations

from enum import IntFlag

import torch

from normwise.kernels._ops import LIBRARY, Code

__all__ = ["GatedCode"]

_NORM = "Tensor? weight, int size, int groups, int code"

LIBRARY.define(f"gated(Tensor x, Tensor z, {_NORM}, float eps, float offset) -> Tensor")
LIBRARY.define(f"gated_rows(Tensor x, Tensor z, {_NORM}, float eps, float offset) -> Tensor")
LIBRARY.define(f"gated_rows_saving(Tensor x, Tensor z, {_NORM}, float eps, float offset) -> (Tensor y, Tensor rstd)")
LIBRARY.define(
    f"gated_rows_backward(Tensor dy, Tensor x, Tensor z, Tensor rstd, {_NORM}, float offset, bool needs_weight) "
    "-> (Tensor dx, Tensor dz, Tensor dweight)"
)


class GatedCode(IntFlag):
    """Bits of ``code`` beside those of ``Code``; csrc/gated_table.h has the same."""

    GATE_FIRST = 256  # the norm of x * act(z), else act(z) times the norm of x
    SIGMOID = 512  # act is the sigmoid, else silu
    ROUND_PRODUCT = 1024  # the product with the gain is rounded to the dtype of x before act(z)


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


@torch.library.register_fake("normwise::gated_rows", lib=LIBRARY)
def _gated_rows(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    size: int,
    groups: int,
    code: int,
    eps: float,
    offset: float,
) -> torch.Tensor:
    promoted = code & Code.PROMOTE and weight is not None and weight.dtype is torch.float32
    return x.new_empty(x.shape, dtype=torch.float32 if promoted and x.dtype is not torch.float64 else x.dtype)


@torch.library.register_fake("normwise::gated_rows_saving", lib=LIBRARY)
def _gated_rows_saving(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    size: int,
    groups: int,
    code: int,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    y = _gated_rows(x, z, weight, size, groups, code, eps, offset)
    return y, x.new_empty((x.numel() // size, groups), dtype=_sums(x.dtype))


@torch.library.register_fake("normwise::gated_rows_backward", lib=LIBRARY)
def _gated_rows_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    size: int,
    groups: int,
    code: int,
    offset: float,
    needs_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not needs_weight:
        dweight = x.new_empty((0,), dtype=_sums(x.dtype))
    elif weight is None:
        dweight = x.new_empty((size,), dtype=_sums(x.dtype))
    else:
        dweight = weight.new_empty((weight.numel(),))
    return x.new_empty(x.shape), x.new_empty(x.shape), dweight
