"""What ``fold-batch-norm`` computes and changes: the functions of its recipes, and its two edits for zero padding.

A batch norm with running statistics is y = s x + t by channel, with s = (offset + weight) / sqrt(var + eps) and
t = bias - s mean. Norms that follow each other are one such map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from normwise.conversions._arithmetic import function
from normwise.conversions._edits import Edit, edit
from normwise.errors import ConversionRefused

__all__ = ["AddShiftMap", "PadWithValue", "affine_of"]

Norms = Sequence[Mapping[str, Any]]
"""Of each norm, in the order in which they are applied: "eps", "offset", "has" (which of mean, weight and bias follow
its variance among the tensors), and "index", its channel for each channel of the layer, or None where they agree."""


def affine_of(held: Sequence[torch.Tensor], norms: Norms) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s and t of norms, one number for each channel of the layer.

    Args:
        held: the variance of each norm, and of its mean, weight and bias those that it has, in float64.
        norms: their numbers.

    Raises:
        ConversionRefused: a variance with eps is not positive.
    """
    tensors = iter(held)
    scale, shift = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for norm in norms:
        var = next(tensors).flatten() + norm["eps"]
        mean, weight, bias = (
            next(tensors).flatten() if name in norm["has"] else None for name in ("mean", "weight", "bias")
        )
        if not bool((var > 0).all()):
            raise ConversionRefused([f"a running variance plus eps is {float(var.min()):.3g}, and must be positive"])
        s = var.rsqrt() if weight is None else (weight + norm["offset"]) / var.sqrt()
        t = torch.zeros_like(s) if bias is None else bias
        t = t if mean is None else t - s * mean
        if norm["index"] is not None:
            s, t = s[norm["index"]], t[norm["index"]]
        scale, shift = scale * s, shift * s + t
    return scale, shift


def _spread(vector: torch.Tensor, weight: torch.Tensor, dim: int, groups: int) -> torch.Tensor:
    """Return a vector in the shape in which it multiplies a weight along ``dim``; the groups lie along dim 0."""
    if dim == 0:
        return vector.reshape(-1, *[1] * (weight.dim() - 1))
    rows = vector.reshape(groups, weight.shape[1]).repeat_interleave(weight.shape[0] // groups, 0)
    return rows.reshape(*rows.shape, *[1] * (weight.dim() - 2))


@function
def scale_by_norms(tensor: torch.Tensor, *held: torch.Tensor, norms: Norms, dim: int, groups: int = 1) -> torch.Tensor:
    """Return a weight times s along ``dim``."""
    return tensor * _spread(affine_of(held, norms)[0], tensor, dim, groups)


@function
def pass_through_norms(tensor: torch.Tensor, *held: torch.Tensor, norms: Norms) -> torch.Tensor:
    """Return s b + t of a bias b."""
    scale, shift = affine_of(held, norms)
    return tensor * scale + shift


@function
def add_shift_of_norms(
    tensor: torch.Tensor, weight: torch.Tensor, *held: torch.Tensor, norms: Norms, dim: int, groups: int
) -> torch.Tensor:
    """Return b + the sum of weight times t over its inputs, which lie along ``dim``, and over its positions."""
    product = weight * _spread(affine_of(held, norms)[1], weight, dim, groups)
    if dim == 0:  # a transposed convolution, [in, out / groups, ...]
        product = product.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return tensor + product.flatten(1).sum(1)


@function
def value_under_norms(tensor: torch.Tensor, *held: torch.Tensor, norms: Norms) -> torch.Tensor:
    """Return -t / s, which norms send to zero."""
    scale, shift = affine_of(held, norms)
    if bool((scale == 0).any()):
        raise ConversionRefused(["a gain is zero: no padding value is sent to zero by its norm; use border='map'"])
    return -shift / scale


@function
def shift_map_of_norms(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    *held: torch.Tensor,
    norms: Norms,
    size: Sequence[int],
    op: str,
    arguments: Sequence[Any],
) -> torch.Tensor:
    """Return what a convolution ``op`` without its bias makes of t at every position of an input of ``size``."""
    shift = affine_of(held, norms)[1]
    image = shift.reshape(1, -1, *[1] * len(size)).expand(1, -1, *size)
    return getattr(torch, op)(image, weight, None, *arguments)[0]


class _Pad:
    """Pads the input of a layer with one value for each channel."""

    def __init__(self, pads: Sequence[tuple[int, int]]) -> None:
        self.pads = [size for pair in reversed(pads) for size in pair]  # as torch has them: the last axis first

    def __call__(self, module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = args[0]
        sizes = x.shape[-(len(self.pads) // 2) :]
        value = module.pad_value.to(x).reshape(-1, *[1] * len(sizes))
        outside = nn.functional.pad((value - value).expand(-1, *sizes), self.pads, value=1.0)
        return (nn.functional.pad(x, self.pads) + outside * value, *args[1:])


class _AddMap:
    """Adds a map to the output of a layer."""

    def __call__(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        held = module.shift_map
        if output.shape[-held.dim() :] != held.shape:
            raise ValueError(
                f"a batch norm was folded into this layer for outputs of {list(held.shape[1:])} positions, given "
                f"{list(output.shape[1 - held.dim() :])}; convert with border='pad' for inputs of any size"
            )
        return output + held.to(output)


@edit("pad-with-value")
class PadWithValue(Edit):
    """Let a convolution pad with one value for each channel instead of zeros.

    Args:
        pads: positions (before, after) of each spatial axis.
        channels: of its input.
        dtype: that of the weight, "float32".
    """

    pads: tuple[tuple[int, int], ...]
    channels: int
    dtype: str

    def apply(self, model: nn.Module) -> None:
        """Register the value and the hook that pads, and turn the layer's own padding off."""
        module: Any = model.get_submodule(self.path)
        weight = next(module.parameters())
        module.register_buffer("pad_value", torch.zeros(self.channels, dtype=weight.dtype, device=weight.device))
        module.register_forward_pre_hook(_Pad(self.pads))
        module.padding = (0,) * len(self.pads)

    @property
    def created(self) -> tuple[str, ...]:
        """Return the key of the value."""
        return (f"{self.path}.pad_value",)


@edit("add-shift-map")
class AddShiftMap(Edit):
    """Add a map of one number for each channel and position to what a convolution returns.

    Args:
        shape: [channels, *positions].
        dtype: that of the weight, "float32".
    """

    shape: tuple[int, ...]
    dtype: str

    def apply(self, model: nn.Module) -> None:
        """Register the map and the hook that adds it."""
        module = model.get_submodule(self.path)
        weight = next(module.parameters())
        module.register_buffer("shift_map", torch.zeros(self.shape, dtype=weight.dtype, device=weight.device))
        module.register_forward_hook(_AddMap())

    @property
    def created(self) -> tuple[str, ...]:
        """Return the key of the map."""
        return (f"{self.path}.shift_map",)
