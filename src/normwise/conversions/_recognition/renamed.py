"""A layer whose tensors have other names, or other shapes, than the layer calls them by."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

__all__ = ["rename"]

Names = tuple[tuple[str, str, tuple[int, ...]], ...]  # the layer's word, the registered name, the layer's shape


def rename(module: nn.Module, names: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Let a layer find its tensors under other names: state dict, ``named_parameters`` and checkpoints keep those.

    Args:
        module: becomes an instance of a subclass of its class, which pickles and copies like its class.
        names: the name under which a tensor is registered, and the shape in which the layer takes it, by the
            layer's own word ("weight").
    """
    if names:
        module.__class__ = _subclass(type(module), tuple((word, *rest) for word, rest in sorted(names.items())))


@cache
def _subclass(base: type[nn.Module], names: Names) -> type[nn.Module]:
    def reduced(self: nn.Module, protocol: int) -> Any:
        return _blank, (base, names), self.__dict__

    found = {word: _reader(name, shape) for word, name, shape in names}
    made = type(base.__name__, (base,), {**found, "__reduce_ex__": reduced, "__module__": base.__module__})
    made.__doc__ = base.__doc__
    return made


def _reader(name: str, shape: tuple[int, ...]) -> property:
    def read(self: nn.Module) -> torch.Tensor:
        # looked up where torch keeps it: the layer's word and the registered name may be the same, of two shapes
        held: torch.Tensor | None = self._parameters.get(name)
        tensor = self._buffers[name] if held is None else held
        assert tensor is not None
        return tensor if tensor.shape == shape else tensor.view(shape)

    return property(read)


def _blank(base: type[nn.Module], names: Names) -> nn.Module:
    """Return a layer without anything in it, for pickle and copy to fill."""
    made = _subclass(base, names)
    return made.__new__(made)
