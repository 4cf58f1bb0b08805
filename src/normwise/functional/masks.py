"""Masks: which elements are real. True is real, as in scaled_dot_product_attention; False is padding.

A mask is given as bool, shaped like the input without its channel axis ([B, T] for [B, T, H] or [B, C, T]), or
in full with sizes of 1 where it repeats. ``lengths`` says the same for right-padded sequences: one whole number
a sample, counted along the one axis that is neither batch nor channels.
"""

from __future__ import annotations

import torch

from normwise.functional._checks import check_mask

__all__ = ["as_mask", "mask_of_lengths"]


def mask_of_lengths(lengths: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mask [B, T] that is True on the first ``lengths[b]`` positions.

    Args:
        lengths: whole numbers [B], 0 to ``size``.
        size: T, positions a row.

    Raises:
        TypeError: ``lengths`` are not whole numbers.
        ValueError: not one axis, or a length beyond ``size`` (not looked at inside torch.compile).

    Examples:
        >>> mask_of_lengths(torch.tensor([2, 3]), 3)
        tensor([[ True,  True, False],
                [ True,  True,  True]])
    """
    if not isinstance(lengths, torch.Tensor):
        raise TypeError(f"lengths are a tensor, given {type(lengths).__name__}; wrap them in torch.as_tensor(...)")
    if lengths.is_floating_point() or lengths.dtype is torch.bool or lengths.is_complex():
        raise TypeError(f"lengths are whole numbers, given {lengths.dtype}; convert them with lengths.long()")
    if lengths.ndim != 1:
        raise ValueError(f"lengths hold one number a sample, given shape {list(lengths.shape)}; pass shape [B]")
    if not torch.compiler.is_compiling() and not lengths.is_meta and lengths.numel() and _reads(lengths):
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > size:
            raise ValueError(
                f"lengths count real positions out of T = {size}, given {low} to {high}; "
                "pass the number of real steps in the layout of this input"
            )
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def _reads(x: torch.Tensor) -> bool:
    """Return whether numbers can be read: not inside torch.func, and not of a FakeTensor."""
    from torch._C._functorch import is_functorch_wrapped_tensor  # type: ignore[import]
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(x, FakeTensor) and not is_functorch_wrapped_tensor(x)


def as_mask(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    lengths: torch.Tensor | None,
    channel_dim: int,
    who: str,
) -> torch.Tensor | None:
    """Return what the user said about padding as a bool tensor that broadcasts to ``x``, or None.

    Args:
        x: the input.
        mask: bool, shaped like ``x`` with or without its channel axis, or broadcastable to it.
        lengths: real positions of each sample.
        channel_dim: the axis of ``x`` that holds channels.
        who: the norm's name, for messages.
    """
    if mask is None and lengths is None:
        return None
    channel = channel_dim % x.ndim
    if mask is None:
        assert lengths is not None
        return _of_lengths(x, lengths, channel, who)
    if lengths is not None:
        raise ValueError(f"{who} takes mask or lengths, given both; drop lengths, a mask says more")
    check_mask(mask, who)
    without = [size for axis, size in enumerate(x.shape) if axis != channel]
    if list(mask.shape) == without:
        return mask.unsqueeze(channel)
    fits = mask.ndim == x.ndim and all(m in (1, size) for m, size in zip(mask.shape, x.shape, strict=True))
    if not fits:
        raise ValueError(
            f"{who} needs a mask of shape {without} (the input without its channel axis {channel}) or one that "
            f"broadcasts to {list(x.shape)}, given {list(mask.shape)}; pass one value for each position"
        )
    return mask


def _of_lengths(x: torch.Tensor, lengths: torch.Tensor, channel: int, who: str) -> torch.Tensor:
    steps = [axis for axis in range(x.ndim) if axis not in (0, channel)]
    if len(steps) != 1:
        raise ValueError(
            f"{who} reads lengths along the one axis beside batch and channels, given an input of shape "
            f"{list(x.shape)}; pass mask= instead"
        )
    if isinstance(lengths, torch.Tensor) and lengths.shape != (x.shape[0],):
        raise ValueError(
            f"{who} needs one length a sample, {x.shape[0]} of them for shape {list(x.shape)}, given shape "
            f"{list(lengths.shape)}; pass lengths of shape [{x.shape[0]}]"
        )
    shape = [1] * x.ndim
    shape[0], shape[steps[0]] = x.shape[0], x.shape[steps[0]]
    return mask_of_lengths(lengths, x.shape[steps[0]]).reshape(shape)
