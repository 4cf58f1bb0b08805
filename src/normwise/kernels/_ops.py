"""The dispatcher's operators of namespace ``normwise``: schemas and fake kernels, the same for every device.

They are defined here, not in the compiled library, so that they exist without one: ``cpu`` brings kernels for the
CPU key, ``triton`` for the CUDA key. What each computes:

``norm_rows``
    y = round?((x - mean) * rstd) * (offset + weight) + bias over rows of ``size`` trailing elements;
    ``code`` as in ``Code``.
``norm_rows_saving``
    The same with what the backward pass needs: statistics [2, *axes before the row] (mean, rstd) of a centred norm,
    else [1, *axes before the row] (rstd), in float32 (float64 for float64). See ``before_rows``.
``norm_rows_backward``
    Gradients of x, weight and bias for the gradient ``dy``; ``dsum``, if given, is added to that of x. ``needs``:
    1 for x, 2 for the weight, 4 for the bias; what is not needed comes back as None.
``add_norm_rows``
    sum = x + residual, in float32 if ``wide`` or if the two differ, and y as above in the dtype of x.
``norm``, ``add_norm``
    The first and the last, differentiable: what ``torch.compile`` puts into a graph. They stand for ``_autograd``'s
    functions, which they become again when the graph is differentiated or run.

None of them writes into an input, and only the last two have derivatives: ``_autograd`` puts the others to use.
"""

from __future__ import annotations

from enum import IntFlag

import torch

__all__ = ["LIBRARY", "Code", "before_rows", "ops"]

LIBRARY = torch.library.Library("normwise", "DEF")
_NORM = "Tensor? weight, Tensor? bias, SymInt size, int code, float eps, float offset"

LIBRARY.define(f"norm_rows(Tensor x, {_NORM}) -> Tensor")
LIBRARY.define(f"norm_rows_saving(Tensor x, {_NORM}) -> (Tensor y, Tensor stats)")
LIBRARY.define(
    "norm_rows_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor stats, Tensor? weight, SymInt size, int code, "
    "float eps, float offset, int needs) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
LIBRARY.define(f"add_norm_rows(Tensor x, Tensor residual, {_NORM}, bool wide) -> (Tensor y, Tensor sum, Tensor stats)")
LIBRARY.define(f"norm(Tensor x, {_NORM}) -> Tensor")
LIBRARY.define(f"add_norm(Tensor x, Tensor residual, {_NORM}, bool wide) -> (Tensor y, Tensor sum)")

ops = torch.ops.normwise


class Code(IntFlag):
    """Bit fields of the operators' ``code``; csrc/rows_table.h has the same."""

    LAYER = 1  # the kind, two bits: 0 mean square, 1 variance, 2 variance as torch's layer_norm adds it up,
    TORCH_LAYER = 2
    L2 = 3  # sum of squares
    ROUND_BEFORE_WEIGHT = 4  # the quotient is rounded to the dtype of x before the gain
    PROMOTE = 8  # the output has the promoted dtype of x and weight
    OFFSET_IN_WEIGHT_DTYPE = 16
    EPS_OUTSIDE = 32  # root = sqrt(s) + eps
    EPS_CLAMP = 64  # root = max(sqrt(s), eps)
    DIVIDE = 128  # by the root, instead of multiplying by its reciprocal
    CHECKED = 256  # raise unless this is a norm of the last axis with parameters of its shape: see _quick
    ONE_GAIN = 512  # where it is checked: the gain is one number

    @staticmethod
    def kind(code: int) -> int:
        """Return the two bits of the kind."""
        return code & 3


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def before_rows(x: torch.Tensor, size: int) -> tuple[int, ...]:
    """Return the sizes of the axes before those that make a row of ``size``, or the number of rows if none do.

    These are as few as suffice: rows of one element take no axis, so that all axes are before them.
    """
    axis, inner = x.ndim, 1
    while axis > 0 and inner != size:
        axis -= 1
        inner *= x.shape[axis]
    return tuple(x.shape[:axis]) if inner == size else (x.numel() // size,)


def _stats(x: torch.Tensor, size: int, code: int, dtype: torch.dtype) -> torch.Tensor:
    kinds = 2 if Code.kind(code) in (Code.LAYER, Code.TORCH_LAYER) else 1
    return x.new_empty((kinds, *before_rows(x, size)), dtype=_sums(dtype))


def _on_one_device(x: torch.Tensor, *others: torch.Tensor | None) -> None:
    for other in others:
        if other is not None and other.device != x.device:
            raise RuntimeError(f"tensors are on {x.device} and {other.device}; move them to one device")


@torch.library.register_fake("normwise::norm_rows", lib=LIBRARY)
def _norm_rows(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
) -> torch.Tensor:
    _on_one_device(x, weight, bias)
    promoted = code & 8 and weight is not None and weight.dtype is torch.float32 and x.dtype is not torch.float64
    return x.new_empty(x.shape, dtype=torch.float32 if promoted else x.dtype)


@torch.library.register_fake("normwise::norm_rows_saving", lib=LIBRARY)
def _norm_rows_saving(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _norm_rows(x, weight, bias, size, code, eps, offset), _stats(x, size, code, x.dtype)


@torch.library.register_fake("normwise::norm_rows_backward", lib=LIBRARY)
def _norm_rows_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    stats: torch.Tensor,
    weight: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
    needs: int,
) -> tuple[torch.Tensor | None, ...]:
    dtype = _sums(x.dtype) if weight is None else weight.dtype
    sizes = (x.shape, (size if weight is None else weight.numel(),), (size,))
    dtypes = (x.dtype, dtype, dtype)
    return tuple(x.new_empty(sizes[which], dtype=dtypes[which]) if needs & 1 << which else None for which in range(3))


@torch.library.register_fake("normwise::add_norm_rows", lib=LIBRARY)
def _add_norm_rows(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _on_one_device(x, residual, weight, bias)
    dtype = x.dtype if x.dtype is torch.float64 or (not wide and residual.dtype is x.dtype) else torch.float32
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype), _stats(x, size, code, dtype)
