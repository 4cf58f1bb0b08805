"""SyncBatchNorm: each channel centred and scaled over the real elements of the batches of all processes."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from normwise import kernels
from normwise.functional.batch import BATCH, batch_spec, per_channel, update_running
from normwise.functional.masks import as_mask
from normwise.kernels import Moments
from normwise.layers._batch_module import BatchModule
from normwise.layers._collectives import Ranks, gather, ranks_of
from normwise.layers._pooling import ChannelMoments, measure, put_together
from normwise.spec.definition import stats_dtype

__all__ = ["SyncBatchNorm"]

_PLAIN = (_BatchNorm.forward, nn.SyncBatchNorm.forward, BatchModule.forward)  # what is known to do nothing else


class SyncBatchNorm(BatchModule):
    """BatchNorm over the batches of all processes of a group, on any backend and device, gloo on a CPU included.

    Takes the place of ``torch.nn.SyncBatchNorm``: same arguments, same state dict. Every real element counts the
    same, however unevenly samples and padding are spread; a process may have no sample at all, [0, C, *]. While
    training, outputs, gradients of the inputs and running statistics (with the unbiased variance of all elements)
    are those of one ``BatchNorm`` on the joined batch; the gradients of weight and bias are each process's own
    share, and DDP averages them as any others. In eval mode, in a group of one, or without a process group this
    is ``BatchNorm``.

    Each forward pass takes one all_gather of 5 C numbers, each backward pass one all_reduce of as many for every
    process. **Every process must call the layer, and backward through it, the same number of times**: one without
    samples calls it with an empty batch and calls ``backward()`` on any loss made of its output, such as
    ``y.sum()``. Where one does not, the others raise after ``timeout``. Recomputation by activation checkpointing
    takes part like any other call, and does not move running statistics again.

    Statistics run in float32, in float64 for float64. A single value per channel over all processes normalizes
    to 0 and leaves the running variance alone: looking at the count to refuse it would stall a GPU.

    Args:
        num_features: C, channels.
        eps: added to the variance.
        momentum: weight of the new value; None averages all batches since the last reset with equal weights.
        affine: whether there are a gain and a shift.
        track_running_stats: whether running statistics are kept; without them eval mode uses the batch of the
            process.
        process_group: who shares statistics; None is everybody.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: whether there is a shift.
        channel_dim: axis of the channels.
        timeout: seconds to wait for the other processes in one collective. None waits as long as the process
            group was set up to (torch's default: 30 minutes, 10 with NCCL), which allows for a process that
            validates or saves while the others are back in training.

    Shape:
        any with at least two axes and C channels on ``channel_dim`` -> the same

    Raises:
        ValueError: another number of channels, masks that do not fit, a group this process is not in.
        TypeError: an input that is not floating point, a mask that is not bool, lengths that are no whole numbers.
        RuntimeError: another process did not take part.

    Examples:
        >>> norm = SyncBatchNorm(1)  # without a process group: BatchNorm
        >>> norm(torch.tensor([[1.0], [3.0]])).T.detach()
        tensor([[-1.0000,  1.0000]])
        >>> SyncBatchNorm.convert(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))[1]
        SyncBatchNorm(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)

    References:
        Ioffe and Szegedy 2015, arxiv.org/abs/1502.03167; Chan, Golub and LeVeque 1983, doi.org/10.2307/2683386
    """

    usual = BATCH

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: distributed.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        channel_dim: int = 1,
        timeout: float | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            bias=bias,
            channel_dim=channel_dim,
        )
        if timeout is not None and not timeout > 0:
            raise ValueError(
                f"SyncBatchNorm waits timeout seconds for other processes, given {timeout}; "
                "pass more than 0, or None for the timeout of the process group"
            )
        self.process_group, self.timeout = process_group, timeout

    def forward(
        self,
        input: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalize ``input`` over the real elements of all processes.

        Args:
            input: x, channels on ``channel_dim``; [0, C, *] where this process has no sample.
            mask: bool, True = real, shaped like x without its channel axis or broadcastable to x.
            lengths: real positions of each sample, for sequences padded on the right.
        """
        ranks = ranks_of(self.process_group, self.timeout, "SyncBatchNorm") if self.training else None
        if ranks is None:
            return super().forward(input, mask=mask, lengths=lengths)
        self._check(input)
        if input.ndim < 2:
            raise ValueError(
                f"SyncBatchNorm needs a batch axis and channels, given shape {list(input.shape)}; "
                "add an axis with x.unsqueeze(0)"
            )
        real = as_mask(input, mask, lengths, self.channel_dim, "SyncBatchNorm")
        y, found = self._synchronized(input, real, ranks)
        momentum = self._count_batch(found.elements > 0)
        if momentum is not None:
            update_running(self.running_mean, self.running_var, *per_channel(Moments(*found)), momentum)
        return y

    def _synchronized(
        self, x: torch.Tensor, mask: torch.Tensor | None, ranks: Ranks
    ) -> tuple[torch.Tensor, ChannelMoments]:
        """Return the normalized batch of this process, and the moments of all."""
        spec = batch_spec(self.spec, x.ndim, self.channel_dim)
        centered, row = measure(spec, x, mask, stats_dtype(spec, x))
        ratio, mean, variance, found = put_together(gather(row, ranks, self._anchor()), ranks.rank)
        shape = [1 if axis in spec.axes else self.num_features for axis in range(-x.ndim, 0)]
        given = Moments(mean.reshape(shape), variance.reshape(shape), 0)
        y = kernels.forward(spec, centered * ratio.reshape(shape), self.weight, self.bias, mask, given=given)
        return y.to(x.dtype), found

    def _anchor(self) -> torch.Tensor | None:
        """Return a parameter that is trained, the same on every process."""
        return next((each for each in (self.weight, self.bias) if each is not None and each.requires_grad), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy everything but the process group, which is a handle on open connections: copies share it."""
        memo[id(self.process_group)] = self.process_group
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    @classmethod
    def convert(
        cls,
        module: nn.Module,
        process_group: distributed.ProcessGroup | None = None,
        *,
        timeout: float | None = None,
    ) -> nn.Module:
        """Put a SyncBatchNorm in the place of every batch norm of torch.nn and of normwise inside ``module``.

        Parameters and buffers stay the same objects, so an optimizer made before keeps working. As with torch's
        ``convert_sync_batchnorm``, hooks on the layers that are replaced are not carried over.

        Args:
            module: changed in place; a batch norm itself is returned as a new layer.
            process_group: who shares statistics; None is everybody.
            timeout: seconds to wait for the other processes, None for the group's own.

        Returns:
            ``module``, or the layer in its place.

        Raises:
            ValueError: a subclass of a batch norm whose forward does more (an activation, say), or a lazy one
                that has no channels yet; nothing is changed then.
        """
        for path, each in module.named_modules():
            if isinstance(each, (_BatchNorm, BatchModule)):
                _check_convertible(path, each)
        made: dict[nn.Module, nn.Module] = {}

        def twin(child: nn.Module | None) -> nn.Module | None:
            if not isinstance(child, (_BatchNorm, BatchModule)):
                return child
            if child not in made:  # a layer used in two places stays one layer
                made[child] = cls._like(child, process_group, timeout)
            return made[child]

        for parent in list(module.modules()):
            parent._modules.update({name: twin(child) for name, child in parent._modules.items()})
        return twin(module) or module

    @classmethod
    def _like(
        cls, norm: _BatchNorm | BatchModule, process_group: distributed.ProcessGroup | None, timeout: float | None
    ) -> Self:
        twin = cls(
            norm.num_features,
            norm.eps or 0.0,
            norm.momentum,
            norm.affine,
            norm.track_running_stats,
            process_group,
            "meta",
            bias=norm.bias is not None,
            channel_dim=norm.channel_dim if isinstance(norm, BatchModule) else 1,
            timeout=timeout,
        )
        twin._parameters.update(norm._parameters)
        twin._buffers.update(norm._buffers)
        return twin.train(norm.training)


def _check_convertible(path: str, norm: _BatchNorm | BatchModule) -> None:
    where = f"{type(norm).__name__} at {path or 'the top'}"
    if isinstance(norm, LazyModuleMixin):
        raise ValueError(f"convert() cannot take the place of {where}: it has no channels yet; run one batch first")
    if type(norm).forward not in (*_PLAIN, SyncBatchNorm.forward) or norm._modules:
        raise ValueError(
            f"convert() cannot take the place of {where}: it does more than a batch norm, which would be lost "
            "(a forward of its own, or modules inside); replace it by hand"
        )
