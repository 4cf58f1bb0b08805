"""Inputs for a program read from a file, from the sizes, types and names it declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from normwise.errors import TargetError
from normwise.targets.guesses import BATCH
from normwise.targets.onnx_graph import Input, Source

__all__ = ["generated"]

# What an open size may be, by turns: steps of a sequence, then height and width, unequal where that runs.
_STEPS = (13, 16, 32)
_PIXELS = ((64, 96), (64, 64), (224, 224), (32, 32))
_MOST = 2**26  # elements of an input that a file declares


def generated(source: Source) -> tuple[tuple[Any, ...], str]:
    """Return arguments that the program runs on, and the note about them.

    Raises:
        TargetError: it runs on none of those tried; the message has the reason.
    """
    first: Exception | None = None
    for sizes in _choices(source.inputs):
        try:
            args = _made(source, sizes)
            with torch.no_grad():
                source.program.rehearse(*args)
        except TargetError:
            raise
        except Exception as error:  # sizes that do not fit each other
            first = first or error
            continue
        shapes = ", ".join("x".join(map(str, arg.shape)) or "a number" for arg in args)
        return args, f"inputs generated ({shapes or 'it takes none'})"
    why = " ".join(f"{type(first).__name__}: {first}".split())[:300]
    raise TargetError(f"it ran on none of the generated inputs ({why}); give --inputs, such as ids=2x12:long")


def _choices(inputs: tuple[Input, ...]) -> Iterator[list[tuple[int, ...]]]:
    tried = set()
    for batch in (BATCH, 1):
        for steps, pixels in zip((*_STEPS, _STEPS[0]), _PIXELS, strict=True):
            named: dict[str, int] = {}
            sizes = [_sizes(item, batch, steps, pixels, named) for item in inputs]
            if str(sizes) not in tried:
                tried.add(str(sizes))
                yield sizes


def _sizes(item: Input, batch: int, steps: int, pixels: tuple[int, int], named: dict[str, int]) -> tuple[int, ...]:
    rank, found = len(item.sizes), []
    for axis, size in enumerate(item.sizes):
        if isinstance(size, int):
            found.append(size)
            continue
        if axis == 0:
            free = batch
        elif rank >= 4 and axis >= rank - 2:
            free = pixels[axis - rank + 2]
        else:
            free = 3 if rank >= 4 and axis == 1 else steps
        found.append(named.setdefault(size, free) if size else free)
    count = 1
    for size in found:
        count *= size
    if count > _MOST:
        raise TargetError(f"the input {item.name[:80]!r} is declared with {count:,} elements")
    return tuple(found)


def _made(source: Source, sizes: list[tuple[int, ...]]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(_values(item, size, source, generator) for item, size in zip(source.inputs, sizes, strict=True))


def _values(item: Input, sizes: tuple[int, ...], source: Source, generator: torch.Generator) -> Tensor:
    if item.dtype is torch.bool or "mask" in item.name.lower():
        return torch.ones(sizes, dtype=item.dtype)
    if item.dtype.is_floating_point:
        return torch.randn(sizes, generator=generator).to(item.dtype)
    below = source.below.get(item.name, 2)
    return torch.randint(max(below, 1), sizes, generator=generator).to(item.dtype)
