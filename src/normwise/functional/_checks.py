"""What an argument must be, and what to say when it is not: what was asked, what was given, one next step."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

__all__ = [
    "axes_of",
    "check_broadcast",
    "check_channels",
    "check_floating",
    "check_groups",
    "check_mask",
    "check_parameter",
    "check_trailing",
    "shape_of",
    "size_of",
]


def check_floating(x: object, who: str) -> None:
    """Raise ``TypeError`` unless ``x`` is a tensor of floating point numbers."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{who} normalizes a tensor, given {type(x).__name__}; wrap it in torch.as_tensor(...)")
    if not x.is_floating_point():
        raise TypeError(f"{who} needs a floating point input, given {x.dtype}; convert it with x.float()")


def shape_of(normalized_shape: int | Sequence[int], who: str) -> tuple[int, ...]:
    """Return ``normalized_shape`` as a tuple.

    Raises:
        TypeError: it is no whole number, nor a sequence of them.
        ValueError: it is empty or holds a size below 1.
    """
    sizes = normalized_shape if isinstance(normalized_shape, Iterable) else (normalized_shape,)
    try:
        shape = tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise TypeError(
            f"{who} needs whole numbers for the sizes of the axes to normalize, given {normalized_shape!r}; "
            "for the last axis of x pass x.shape[-1]"
        ) from None
    if not shape or min(shape) < 1:
        raise ValueError(
            f"{who} needs the sizes of the axes to normalize, each 1 or more, given normalized_shape={shape}; "
            "for the last axis of x pass x.shape[-1]"
        )
    return shape


def axes_of(dim: int | Sequence[int], x: torch.Tensor, who: str) -> tuple[int, ...]:
    """Return ``dim`` as negative axes of ``x``.

    Raises:
        ValueError: no axis, or one that ``x`` does not have.
    """
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if not dims or not all(-x.ndim <= axis < x.ndim for axis in dims):
        raise ValueError(
            f"{who} over dim={list(dims)}, given an input of {x.ndim} axes, shape {list(x.shape)}; "
            "pass axes that it has"
        )
    return tuple(axis if axis < 0 else axis - x.ndim for axis in dims)


def size_of(size: object, name: str, who: str) -> int:
    """Return a whole number of channels, groups or features.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below 1.
    """
    try:
        number = operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{who} needs a whole number, given {name}={size!r} of type {type(size).__name__}; pass an int"
        ) from None
    if number < 1:
        raise ValueError(f"{who} needs how many there are, given {name}={number}; pass 1 or more")
    return number


def check_trailing(x: torch.Tensor, shape: tuple[int, ...], who: str) -> None:
    """Raise ``ValueError`` unless the trailing axes of ``x`` are ``shape``."""
    if x.ndim < len(shape) or tuple(x.shape[x.ndim - len(shape) :]) != shape:
        raise ValueError(
            f"{who} normalizes trailing axes of sizes {list(shape)}, given an input of shape {list(x.shape)}; "
            f"build it with normalized_shape={list(x.shape[-len(shape) :])} or move those axes to the end"
        )


def check_parameter(parameter: torch.Tensor | None, shape: tuple[int, ...], name: str, who: str) -> None:
    """Raise ``ValueError`` unless a gain or shift has the shape it multiplies."""
    if parameter is not None and tuple(parameter.shape) != shape:
        raise ValueError(
            f"{who} needs a {name} of shape {list(shape)}, given {list(parameter.shape)}; "
            f"reshape it, or pass {name}=None to leave it out"
        )


def check_broadcast(operand: torch.Tensor | None, x: torch.Tensor, name: str, who: str) -> None:
    """Raise ``ValueError`` unless a mask, scale or shift broadcasts to ``x``."""
    if operand is None:
        return
    shape = tuple(operand.shape)
    repeats = (1,) * (x.ndim - len(shape)) + shape
    if len(repeats) != x.ndim or any(size not in (1, full) for size, full in zip(repeats, x.shape, strict=True)):
        raise ValueError(
            f"{who} needs a {name} that broadcasts to its input of shape {list(x.shape)}, given a {name} of shape "
            f"{list(shape)}; give it axes of size 1 where it repeats, such as {name}.unsqueeze(1)"
        )


def check_mask(mask: object, who: str) -> None:
    """Raise ``TypeError`` unless ``mask`` is None or a tensor of bools."""
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise TypeError(f"{who} needs a mask as a tensor, given {type(mask).__name__}; wrap it in torch.as_tensor(...)")
    if mask is not None and mask.dtype is not torch.bool:
        raise TypeError(f"{who} needs a bool mask, True = real, given {mask.dtype}; convert it with mask.bool()")


def check_groups(groups: int, channels: int, name: str, who: str) -> None:
    """Raise ``ValueError`` unless ``groups`` split ``channels`` evenly."""
    if groups < 1 or channels % groups:
        raise ValueError(
            f"{who} splits {channels} channels into groups of one size, given {name}={groups}; "
            f"pass a divisor of {channels}"
        )


def check_channels(x: torch.Tensor, channel_dim: int, channels: int, who: str, name: str = "num_features") -> None:
    """Raise ``ValueError`` unless axis ``channel_dim`` of ``x`` exists and has ``channels`` elements."""
    if not -x.ndim <= channel_dim < x.ndim:
        raise ValueError(
            f"{who} looks for channels on axis {channel_dim}, given an input of {x.ndim} axes, shape {list(x.shape)}; "
            "pass another channel_dim or add the missing axis with x.unsqueeze(...)"
        )
    if x.shape[channel_dim] != channels:
        raise ValueError(
            f"{who} has {name}={channels} on axis {channel_dim}, given {x.shape[channel_dim]} there in shape "
            f"{list(x.shape)}; build it with {name}={x.shape[channel_dim]}, or move the channels to axis {channel_dim}"
        )
