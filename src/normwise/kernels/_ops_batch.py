"""The dispatcher's operators over batches: schemas and fake kernels; what ``_ops`` says of its own holds here.

``batch_norm``
    y = (x - mean) * rstd * (offset + weight) + bias for each channel, with the mean and the biased variance of its
    real elements, and ``stats`` [5, C]: mean, what its rounding left, rstd, variance, number of elements; in float32
    (float64 for float64). ``mask`` is bool with the axes of x, of size 1 on axis ``channel`` and where it repeats.
``batch_norm_given``
    The same with a mean and a variance [C] that are given.
``batch_norm_backward``
    Gradients of x, weight and bias for the gradient ``dy``; ``needs``: 1 for x, 2 for the weight, 4 for the bias;
    those not needed come back empty.
``batch_moments``
    ``stats`` alone.
``batch``
    The first two, differentiable: what ``torch.compile`` puts into a graph. It stands for ``_batch``'s function, which
    it becomes again when the graph is differentiated or run.

Outputs shaped like x have its memory format, as those of elementwise operators have.
"""

from __future__ import annotations

import torch

from normwise.kernels._ops import LIBRARY

__all__ = ["ELEMENTS", "MEAN", "ROWS", "VARIANCE"]

MEAN, VARIANCE, ELEMENTS, ROWS = 0, 3, 4, 5  # rows of ``stats`` and how many; csrc/batch_table.h has the same

_NORM = "Tensor? weight, Tensor? bias, Tensor? mask, int channel, float eps, float offset"

LIBRARY.define(f"batch_norm(Tensor x, {_NORM}) -> (Tensor y, Tensor stats)")
LIBRARY.define(f"batch_norm_given(Tensor x, Tensor mean, Tensor variance, {_NORM}) -> (Tensor y, Tensor stats)")
LIBRARY.define(
    "batch_norm_backward(Tensor dy, Tensor x, Tensor stats, Tensor? weight, Tensor? mask, int channel, "
    "float offset, bool given, int needs) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
LIBRARY.define(
    "batch(Tensor x, Tensor? weight, Tensor? bias, Tensor? mask, Tensor? mean, Tensor? variance, int channel, "
    "float eps, float offset) -> (Tensor y, Tensor stats)"
)
LIBRARY.define("batch_moments(Tensor x, Tensor? mask, int channel) -> Tensor")


def _sums(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


@torch.library.register_fake("normwise::batch_moments", lib=LIBRARY)
def _batch_moments(x: torch.Tensor, mask: torch.Tensor | None, channel: int) -> torch.Tensor:
    return x.new_empty((ROWS, x.shape[channel]), dtype=_sums(x))


@torch.library.register_fake("normwise::batch_norm", lib=LIBRARY)
def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    channel: int,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), _batch_moments(x, mask, channel)


@torch.library.register_fake("normwise::batch_norm_given", lib=LIBRARY)
def _batch_norm_given(
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    channel: int,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), _batch_moments(x, mask, channel)


@torch.library.register_fake("normwise::batch_norm_backward", lib=LIBRARY)
def _batch_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    stats: torch.Tensor,
    weight: torch.Tensor | None,
    mask: torch.Tensor | None,
    channel: int,
    offset: float,
    given: bool,
    needs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    held = _sums(x) if weight is None else weight.dtype
    dx = torch.empty_like(x) if needs & 1 else x.new_empty((0,), dtype=_sums(x))
    dweight, dbias = (
        x.new_empty((x.shape[channel],), dtype=held) if needs & bit else x.new_empty((0,), dtype=_sums(x))
        for bit in (2, 4)
    )
    return dx, dweight, dbias
