"""BatchNorm: each channel centred and scaled over the real elements of the batch."""

from __future__ import annotations

import torch  # noqa: F401 - for the examples

from normwise.functional.batch import BATCH
from normwise.layers._batch_module import BatchModule

__all__ = ["BatchNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"]


class BatchNorm(BatchModule):
    """BatchNorm of any number of axes, with the channels on any of them: ``channel_dim=-1`` for [B, T, H].

    Computes weight * (x - mean) / sqrt(var + eps) + bias per channel. In training mean and (biased) variance are
    those of the batch, and the running ones move: r <- (1 - momentum) r + momentum * value, with the unbiased
    variance. In eval mode the running ones are used. Takes the place of ``torch.nn.BatchNorm1d`` and its
    siblings: same arguments, same state dict.

    ``mask`` or ``lengths`` leave padding out: neither outputs at real positions nor running statistics depend on
    what the padding holds or how much there is; outputs at padding are 0. A channel without a real element
    leaves its running statistics alone, one with a single element leaves the variance. Under activation
    checkpointing (both modes) running statistics move once, not again in the recomputation.

    Inside ``torch.func`` transforms a training forward pass needs its running statistics as arguments, one set a
    sample under vmap: ``functional_call(norm, (parameters, buffers), x)``. Torch refuses to change captured ones
    and raises; in eval mode, or with ``track_running_stats=False``, nothing is changed.

    Args:
        num_features: C, channels.
        eps: added to the variance.
        momentum: weight of the new value (Keras and Flax call 1 - momentum by this name); None averages all
            batches since the last reset with equal weights.
        affine: whether there are a gain and a shift.
        track_running_stats: whether running statistics are kept; without them eval mode uses the batch too.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: whether there is a shift.
        channel_dim: axis of the channels.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        any with at least two axes and C channels on ``channel_dim`` -> the same

    Raises:
        ValueError: another number of channels; one value per channel while training; masks that do not fit.
        TypeError: an input that is not floating point, a mask that is not bool, lengths that are no whole numbers.

    Examples:
        >>> norm = BatchNorm(1, channel_dim=-1)
        >>> x = torch.tensor([[[1.0], [3.0]], [[5.0], [99.0]]])  # [B, T, H]
        >>> norm(x, lengths=torch.tensor([2, 1])).squeeze().detach()
        tensor([[-1.2247,  0.0000],
                [ 1.2247,  0.0000]])
        >>> norm.running_mean
        tensor([0.3000])

    References:
        Ioffe and Szegedy 2015, arxiv.org/abs/1502.03167
    """

    usual = BATCH


class BatchNorm1d(BatchModule):
    """BatchNorm of [N, C] or [N, C, L]; see ``BatchNorm`` for all else.

    Examples:
        >>> BatchNorm1d(1)(torch.tensor([[1.0], [3.0]])).T.detach()
        tensor([[-1.0000,  1.0000]])
    """

    usual = BATCH
    axes_allowed = (2, 3)


class BatchNorm2d(BatchModule):
    """BatchNorm of [N, C, H, W]; see ``BatchNorm`` for all else.

    Examples:
        >>> BatchNorm2d(1)(torch.tensor([[[[1.0, 3.0]]]])).flatten().detach()
        tensor([-1.0000,  1.0000])
    """

    usual = BATCH
    axes_allowed = (4,)


class BatchNorm3d(BatchModule):
    """BatchNorm of [N, C, D, H, W]; see ``BatchNorm`` for all else.

    Examples:
        >>> BatchNorm3d(1)(torch.tensor([[[[[1.0, 3.0]]]]])).flatten().detach()
        tensor([-1.0000,  1.0000])
    """

    usual = BATCH
    axes_allowed = (5,)
