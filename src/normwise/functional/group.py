"""Norms over a group of channels and the positions of one sample."""

from __future__ import annotations

import torch

from normwise import kernels
from normwise.functional._checks import check_floating, check_groups, check_parameter
from normwise.functional._hidden import _kept, made
from normwise.functional.masks import as_mask
from normwise.spec import NormSpec, Scope, Statistic

__all__ = ["group_norm", "group_spec"]


@_kept
def group_spec(num_groups: int, eps: float, ndim: int) -> NormSpec:
    """Return the spec of a group norm on [N, C, *] of ``ndim`` axes, the same object each time."""
    return NormSpec(
        scope=Scope.GROUP,
        axes=tuple(range(1 - ndim, 0)),
        groups=num_groups,
        center=True,
        statistic=Statistic.VARIANCE,
        eps=eps,
        bias=True,
    )


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    mask: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """Return weight * (x - mean) / sqrt(var + eps) + bias per sample and group of channels, as ``F.group_norm``.

    Args:
        input: x [N, C, *].
        num_groups: groups that the C channels are split into, in order.
        weight: gain [C].
        bias: shift [C].
        eps: added to the variance.
        mask: bool, True = real, shaped [N, *] or broadcastable to x; outputs at padding are 0.
        lengths: real positions of each sample of [N, C, T].
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Raises:
        ValueError: C is not a multiple of ``num_groups``, or shapes do not fit.

    References:
        Wu and He 2018, arxiv.org/abs/1803.08494

    Examples:
        >>> group_norm(torch.tensor([[1.0, 3.0, 10.0, 30.0]]), 2)
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """
    who = "group_norm()"
    check_floating(input, who)
    if input.ndim < 2:
        raise ValueError(
            f"{who} needs [N, C, *], given shape {list(input.shape)}; add the batch axis with x.unsqueeze(0)"
        )
    channels = input.shape[1]
    check_groups(num_groups, channels, "num_groups", who)
    check_parameter(weight, (channels,), "weight", who)
    check_parameter(bias, (channels,), "bias", who)
    real = as_mask(input, mask, lengths, 1, who)
    return kernels.forward(made(group_spec, num_groups, eps, input.ndim), input, weight, bias, real, kernel=kernel)
