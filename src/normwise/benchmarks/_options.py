"""What a benchmark is asked for, with its own shapes and dtypes where nothing is said."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Self

import torch

from normwise.benchmarks._machine import cpus

__all__ = ["Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure.

    Args:
        threads: of torch, one run each.
        shapes: of the input.
        dtypes: of input and parameters.
        device: where.
        quick: fewer shapes and rounds.
        eager: time our eager kernel too.
    """

    threads: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    device: str = "cpu"
    quick: bool = False
    eager: bool = False

    @classmethod
    def of(
        cls,
        part: ModuleType,
        *,
        threads: tuple[int, ...] = (),
        shapes: tuple[str | tuple[int, ...], ...] = (),
        dtypes: tuple[str | torch.dtype, ...] = (),
        device: str = "cpu",
        quick: bool = False,
        eager: bool = False,
    ) -> Self:
        """Check what was asked of a benchmark, and fill in its own choice.

        Raises:
            ValueError: a shape with other axes than the benchmark's, threads that there are not, no such device.
        """
        for count in threads:
            if not 1 <= count <= cpus():
                raise ValueError(f"--threads takes 1 to {cpus()} on this machine, given {count}")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as failure:
            raise ValueError(f"no device {device!r} here: {str(failure).splitlines()[0]}") from failure
        default_shapes = part.QUICK_SHAPES if quick else part.SHAPES
        default_dtypes = part.QUICK_DTYPES if quick else part.DTYPES
        return cls(
            threads=tuple(dict.fromkeys(threads)) or (torch.get_num_threads(),),
            shapes=tuple(_shape(each, part) for each in shapes) or default_shapes,
            dtypes=tuple(getattr(torch, d) if isinstance(d, str) else d for d in dtypes) or default_dtypes,
            device=device,
            quick=quick,
            eager=eager,
        )


def _shape(given: str | tuple[int, ...], part: ModuleType) -> tuple[int, ...]:
    """Read a shape such as 4096x1024."""
    sizes = given.lower().split("x") if isinstance(given, str) else [str(size) for size in given]
    wanted = len(part.SHAPE.split("x"))
    if len(sizes) != wanted or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        example = "x".join(map(str, part.SHAPES[0]))
        raise ValueError(f"--shape takes {part.SHAPE} such as {example} here, given {given!r}")
    return tuple(map(int, sizes))
