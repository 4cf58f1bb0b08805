"""Norms whose statistics are taken over a batch, or over the positions of one sample, and may be kept running."""

from __future__ import annotations

from dataclasses import replace

import torch

from normwise import kernels
from normwise.functional._checks import check_channels, check_floating, check_parameter
from normwise.functional._hidden import _kept, made
from normwise.functional.masks import as_mask
from normwise.kernels import Moments
from normwise.kernels._calls import refusal_of_call
from normwise.spec import NormSpec, Scope, Statistic

__all__ = [
    "BATCH",
    "batch_norm",
    "batch_spec",
    "instance_norm",
    "instance_spec",
    "per_channel",
    "running_moments",
    "update_running",
]

BATCH = NormSpec(
    scope=Scope.BATCH, axes=(-3, -1), center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True, running=True
)


def batch_spec(spec: NormSpec, ndim: int, channel_dim: int) -> NormSpec:
    """Return ``spec`` over every axis but the channels of an input of ``ndim`` axes."""
    channel = channel_dim % ndim - ndim
    axes = tuple(axis for axis in range(-ndim, 0) if axis != channel)
    return spec if spec.axes == axes else replace(spec, axes=axes)


@_kept
def _spec_of(eps: float, ndim: int, channel: int) -> NormSpec:
    """Return the spec of a batch norm, the same object each time: making one takes longer than a small batch."""
    return batch_spec(replace(BATCH, eps=eps), ndim, channel)


@_kept
def instance_spec(eps: float, ndim: int) -> NormSpec:
    """Return the spec of an instance norm on [N, C, *], the same object each time."""
    return NormSpec(
        scope=Scope.INSTANCE,
        axes=tuple(range(2 - ndim, 0)),
        center=True,
        statistic=Statistic.VARIANCE,
        eps=eps,
        bias=True,
    )


def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float | torch.Tensor = 0.1,
    eps: float = 1e-5,
    *,
    mask: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    channel_dim: int = 1,
    kernel: str = "auto",
) -> torch.Tensor:
    """Return weight * (x - mean) / sqrt(var + eps) + bias per channel, as ``F.batch_norm``.

    In training mean and (biased) variance are those of all real elements of a channel, and the running ones
    move: r <- (1 - momentum) r + momentum * value, with the variance unbiased there (n / (n - 1)). A channel
    without a real element leaves them as they are, one with a single element leaves the variance. Outputs at
    padding are 0. Statistics run in float32 or wider.

    Args:
        input: x, channels on axis ``channel_dim``.
        running_mean: [C], changed in place while training.
        running_var: [C], changed in place while training.
        weight: gain [C].
        bias: shift [C].
        training: whether to take the statistics of ``input``.
        momentum: weight of the new value, a fraction in [0, 1].
        eps: added to the variance.
        mask: bool, True = real, shaped like x without its channel axis or broadcastable to x.
        lengths: real positions of each sample, for sequences padded on the right.
        channel_dim: 1 for [N, C, *], -1 for [B, T, H].
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Raises:
        ValueError: shapes that do not fit; one value per channel while training; no statistics to use.

    References:
        Ioffe and Szegedy 2015, arxiv.org/abs/1502.03167

    Examples:
        >>> x = torch.tensor([[1.0], [3.0], [99.0]])
        >>> batch_norm(x, training=True, mask=torch.tensor([True, True, False])).T
        tensor([[-1.0000,  1.0000,  0.0000]])
    """
    who = "batch_norm()"
    check_floating(input, who)
    if input.ndim < 2:
        raise ValueError(
            f"{who} needs a batch axis and channels, given shape {list(input.shape)}; add an axis with x.unsqueeze(0)"
        )
    channels = input.shape[channel_dim] if -input.ndim <= channel_dim < input.ndim else 0
    check_channels(input, channel_dim, channels, who)
    _check_parameters(channels, who, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    spec = made(_spec_of, eps, input.ndim, channel_dim % input.ndim)
    real = as_mask(input, mask, lengths, channel_dim, who)
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError(
                f"{who} without training=True uses running_mean and running_var, given None; "
                "pass them, or training=True"
            )
        given = running_moments(spec, input, running_mean, running_var)
        return kernels.forward(spec, input, weight, bias, real, given=given, kernel=kernel)
    elements = input.numel() // max(channels, 1)
    if elements == 1:
        raise ValueError(
            f"{who} cannot take a variance of one value per channel while training, given shape {list(input.shape)}; "
            "use a larger batch (drop_last=True), or eval mode"
        )
    y, found = kernels.forward_and_moments(spec, input, weight, bias, real, kernel=kernel)
    if running_mean is not None and running_var is not None and not _moved(running_mean, running_var, found, momentum):
        update_running(running_mean, running_var, *per_channel(found), momentum)
    return y


def _moved(
    running_mean: torch.Tensor, running_var: torch.Tensor, found: Moments, momentum: float | torch.Tensor
) -> bool:
    """Do what ``update_running`` does in three operations, where all elements are real and dtypes are the same."""
    n, mean, var = found.elements, found.mean, found.statistic
    if torch.compiler.is_compiling() or refusal_of_call(running_mean) is not None:  # transforms, tracers, dual numbers
        return False
    if isinstance(momentum, torch.Tensor) or type(n) is not int or n < 2:
        return False
    if mean is None or running_mean.dtype is not mean.dtype or running_var.dtype is not mean.dtype:
        return False
    with torch.no_grad():
        running_mean.lerp_(mean.view(-1), momentum)
        running_var.lerp_(var.view(-1) * (n / (n - 1)), momentum)
    return True


def _check_parameters(channels: int, who: str, **parameters: torch.Tensor | None) -> None:
    for name, parameter in parameters.items():
        check_parameter(parameter, (channels,), name, who)


def running_moments(spec: NormSpec, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Moments:
    """Return running statistics in the dtype of statistics, shaped to broadcast to ``x``."""
    shape = [1 if axis in spec.axes else x.shape[axis] for axis in range(-x.ndim, 0)]
    dtype = torch.promote_types(x.dtype, torch.float32)
    return Moments(mean.to(dtype).reshape(shape), var.to(dtype).reshape(shape), 0)


def update_running(
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor,
    unbiased: torch.Tensor,
    elements: torch.Tensor,
    momentum: float | torch.Tensor,
) -> None:
    """Move running statistics towards those of a batch, in place: r <- r + momentum * (value - r).

    Args:
        running_mean: [C], or None.
        running_var: [C], or None.
        mean: [C], of the batch.
        unbiased: [C], variance of the batch, with n - 1.
        elements: real elements behind each channel, [C] or a scalar; without any nothing moves, and of a single
            one there is no variance to move to.
        momentum: weight of the new value.
    """
    if running_mean is None or running_var is None:
        return
    with torch.no_grad():
        old_mean, old_var = running_mean.to(mean.dtype), running_var.to(unbiased.dtype)
        running_mean.copy_(torch.where(elements > 0, old_mean + momentum * (mean - old_mean), old_mean))
        running_var.copy_(torch.where(elements > 1, old_var + momentum * (unbiased - old_var), old_var))


def per_channel(found: Moments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, unbiased variance and number of elements of each channel of a batch, without gradient."""
    assert found.mean is not None
    mean, var = found.mean.detach().flatten(), found.statistic.detach().flatten()
    n = _count(found, var).flatten()
    return mean, var * (n / (n - 1).clamp_min(1)), n


def _count(found: Moments, like: torch.Tensor) -> torch.Tensor:
    # full, not as_tensor: a number that depends on a dynamic size stays symbolic under torch.compile and export
    n = found.elements
    return n.to(like.dtype) if isinstance(n, torch.Tensor) else like.new_full((), n)


def _over_samples(found: Moments, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean and unbiased variance of samples, averaged with their elements as weights, and all elements."""
    assert found.mean is not None
    shape = (x.shape[0], x.shape[1])
    mean, var = found.mean.detach().reshape(shape), found.statistic.detach().reshape(shape)
    n = _count(found, var).expand(found.statistic.shape).reshape(shape)
    unbiased, total = var * n / (n - 1).clamp_min(1), n.sum(0)
    weight = n / total.clamp_min(1)
    return (mean * weight).sum(0), (unbiased * weight).sum(0), total


def instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float | torch.Tensor = 0.1,
    eps: float = 1e-5,
    *,
    mask: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """Return weight * (x - mean) / sqrt(var + eps) + bias per sample and channel of [N, C, *], as ``F.instance_norm``.

    Running statistics, where given, move by the average over samples of mean and unbiased variance, weighted by
    the number of real elements of each sample.

    Args:
        input: x [N, C, *].
        running_mean: [C], changed in place with ``use_input_stats``.
        running_var: [C], changed in place with ``use_input_stats``.
        weight: gain [C].
        bias: shift [C].
        use_input_stats: False takes the running statistics.
        momentum: weight of the new value.
        eps: added to the variance.
        mask: bool, True = real, shaped [N, *] or broadcastable to x.
        lengths: real positions of each sample of [N, C, T].
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    References:
        Ulyanov et al. 2016, arxiv.org/abs/1607.08022

    Examples:
        >>> instance_norm(torch.tensor([[[1.0, 3.0, 99.0]]]), lengths=torch.tensor([2]))
        tensor([[[-1.0000,  1.0000,  0.0000]]])
    """
    who = "instance_norm()"
    check_floating(input, who)
    if input.ndim < 3:
        raise ValueError(
            f"{who} needs [N, C, *] with at least one axis to normalize, given shape {list(input.shape)}; "
            "use layer_norm() for [N, C]"
        )
    channels = input.shape[1]
    _check_parameters(channels, who, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    real = as_mask(input, mask, lengths, 1, who)
    spec = made(instance_spec, eps, input.ndim)
    if not use_input_stats:
        if running_mean is None or running_var is None:
            raise ValueError(
                f"{who} with use_input_stats=False uses running_mean and running_var, given None; "
                "pass them, or use_input_stats=True"
            )
        given = running_moments(batch_spec(spec, input.ndim, 1), input, running_mean, running_var)
        return kernels.forward(spec, input, weight, bias, real, given=given, kernel=kernel)
    elements = input.numel() // max(channels * input.shape[0], 1)
    if elements == 1:
        raise ValueError(
            f"{who} cannot take a variance of one value per sample and channel, given shape {list(input.shape)}; "
            "use a larger input, or batch_norm()"
        )
    if running_mean is None:
        return kernels.forward(spec, input, weight, bias, real, kernel=kernel)
    y, found = kernels.forward_and_moments(spec, input, weight, bias, real, kernel=kernel)
    update_running(running_mean, running_var, *_over_samples(found, input), momentum)
    return y
