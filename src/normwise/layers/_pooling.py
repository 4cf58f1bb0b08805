"""Statistics of parts of a batch, and of the whole from those of its parts (Chan et al. 1983)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from normwise import kernels
from normwise.functional.batch import BATCH, batch_spec
from normwise.kernels._arithmetic import masked, masked_mean, power_of_two
from normwise.spec import NormSpec
from normwise.spec.definition import stats_dtype

__all__ = ["ChannelMoments", "Part", "Whole", "batch_moments", "measure", "nothing", "pool", "put_together"]


class ChannelMoments(NamedTuple):
    """Mean, biased variance and number of real elements of each channel, [C] each, or [parts, C]."""

    mean: torch.Tensor
    statistic: torch.Tensor
    elements: torch.Tensor


def batch_moments(x: torch.Tensor, mask: torch.Tensor | None, channel_dim: int) -> ChannelMoments:
    """Return the moments of each channel of a batch, in float64; zeros where there is no real element.

    Args:
        x: the input.
        mask: bool, broadcastable to ``x``.
        channel_dim: its axis of channels.
    """
    spec = batch_spec(BATCH, x.ndim, channel_dim)
    row = measure(spec, x, mask, stats_dtype(spec, x)).row
    power, center, rest, variance, elements = row.to(_wide(x.device)).unflatten(0, (5, -1)).unbind(0)
    return ChannelMoments((center + rest) / power, variance / power / power, elements)


def nothing(channels: int, device: torch.device) -> ChannelMoments:
    """Return the moments of no element."""
    zeros = torch.zeros(channels, dtype=_wide(device), device=device)
    return ChannelMoments(zeros, zeros, zeros)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's devices have none


def _of_empty(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask for a batch without samples: with one, statistics of nothing are 0 instead of 0 / 0."""
    return torch.ones((1,) * x.ndim, dtype=torch.bool, device=x.device) if mask is None and not x.numel() else mask


def pool(parts: ChannelMoments) -> ChannelMoments:
    """Return the moments of a whole from those of its parts, [parts, C] each."""
    elements = parts.elements.sum(0)
    weight = parts.elements / elements.clamp_min(1)
    mean = (weight * parts.mean).sum(0)
    mean = mean + (weight * (parts.mean - mean)).sum(0)  # the rounding of the weights, taken back
    return ChannelMoments(mean, (weight * (parts.statistic + (parts.mean - mean).pow(2))).sum(0), elements)


class Part(NamedTuple):
    """What one process has of a batch."""

    centered: torch.Tensor  # x * power - center, 0 at padding
    row: torch.Tensor  # [5 * C], what the other processes must know: power, center, rest, variance, elements


def measure(spec: NormSpec, x: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> Part:
    """Return ``x`` centred on its own mean as far as ``dtype`` can say it, and its statistics.

    A power of two brings values whose squares overflow into range. The mean of what is left after centring
    is kept apart: the mean of a batch with a large offset does not fit into one number.
    """
    mask = _of_empty(x, mask)
    wide = masked(x.to(dtype), mask)
    power = power_of_two(spec, x.dtype, wide)
    power = wide.new_ones((1,) * x.ndim) if power is None else power
    scaled = wide * power
    found = kernels.moments(spec, scaled, mask)
    assert found.mean is not None
    center = found.mean.detach()
    elements = found.elements
    if not isinstance(elements, torch.Tensor):  # full: a number that depends on a dynamic size stays symbolic
        elements = torch.full((), elements, dtype=dtype, device=x.device)
    centered = masked(scaled - center, mask)
    rest = masked_mean(centered, spec.axes, elements, mask)
    row = [each.expand(center.shape).flatten() for each in (power, center, rest, found.statistic, elements)]
    return Part(centered, torch.cat(row))


class Whole(NamedTuple):
    """A batch put together, [C] each, for the process that asked."""

    ratio: torch.Tensor  # by which its centred values must still be multiplied
    mean: torch.Tensor  # of the whole, relative to them
    variance: torch.Tensor  # in their units
    found: ChannelMoments  # of the batch as it is, the same on every process


def put_together(rows: torch.Tensor, own: int) -> Whole:
    """Return the statistics of the whole batch.

    Args:
        rows: [processes, 5 * C], what ``measure`` made on each.
        own: which of them is this process.
    """
    powers, centers, rests, variances, elements = rows.unflatten(1, (5, -1)).unbind(1)
    power = powers.detach().amin(0)
    ratio = power / powers.detach()
    centers = centers.detach() * ratio
    base = centers.gather(0, elements.detach().argmax(0, keepdim=True)).squeeze(0)
    whole = pool(ChannelMoments(centers - base + rests * ratio, variances * ratio.square(), elements.detach()))
    found = ChannelMoments((base + whole.mean) / power, whole.statistic / power / power, whole.elements)
    return Whole(ratio[own], base - centers[own] + whole.mean, whole.statistic, found)
