"""Rules of DTensor for the operators: rows may be sharded along any axis before them, rows themselves may not.

Loaded when the first DTensor is met. For each axis of the mesh a rule lists what is computed without communication:
everything replicated, or the inputs sharded along one axis; then outputs and statistics are sharded alike, and the
gradients of weights are partial sums. DTensor brings inputs that are sharded otherwise to one of these.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from normwise.kernels._ops import before_rows, ops

__all__ = ["DTensor"]

_Shardings = list[tuple[list[Placement | None], list[Placement | None]]]


def _shardings(x: Any, size: int, outputs: str, inputs: str) -> _Shardings:
    """Return the acceptable placements, one letter an argument or output.

    r: rows, s: their statistics, w: weights, replicated, p: gradients of weights, partial sums; -: no tensor.
    """

    def place(kind: str, axis: int | None) -> Placement | None:
        if kind == "-":
            return None
        if axis is None or kind == "w":
            return Replicate()
        return Partial() if kind == "p" else Shard(axis + (kind == "s"))

    axes = [None, *range(len(before_rows(x, size)))]
    return [([place(kind, axis) for kind in outputs], [place(kind, axis) for kind in inputs]) for axis in axes]


def _kinds(letters: str, *tensors: Any) -> str:
    """Return a letter for each tensor, - where there is none."""
    return "".join("-" if each is None else letter for letter, each in zip(letters, tensors, strict=True))


@register_sharding(ops.norm_rows.default)
def _norm_rows(x: Any, weight: Any, bias: Any, size: int, *numbers: Any) -> _Shardings:
    return _shardings(x, size, "r", _kinds("rww", x, weight, bias) + "----")


@register_sharding(ops.norm_rows_saving.default)
def _norm_rows_saving(x: Any, weight: Any, bias: Any, size: int, *numbers: Any) -> _Shardings:
    return _shardings(x, size, "rs", _kinds("rww", x, weight, bias) + "----")


@register_sharding(ops.add_norm_rows.default)
def _add_norm_rows(x: Any, residual: Any, weight: Any, bias: Any, size: int, *numbers: Any) -> _Shardings:
    return _shardings(x, size, "rrs", _kinds("rrww", x, residual, weight, bias) + "-----")


@register_sharding(ops.norm_rows_backward.default)
def _norm_rows_backward(dy: Any, dsum: Any, x: Any, stats: Any, weight: Any, size: int, *numbers: Any) -> _Shardings:
    return _shardings(x, size, "rpp", _kinds("rrrsw", dy, dsum, x, stats, weight) + "-----")
