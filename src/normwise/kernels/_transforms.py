"""Rules of ``torch.vmap`` for the operators: a batch of inputs is more rows; a batch of weights is a loop.

They serve who calls the operators themselves; inside ``torch.func`` the layers compute in plain torch, which has
every derivative that transforms ask for (``_calls.refusal_of_call``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from normwise.kernels._ops import LIBRARY, ops

__all__: list[str] = []

_Dims = tuple[int | None, ...]


def _first(args: tuple[Any, ...], in_dims: _Dims, size: int) -> list[Any]:
    """Return the tensors with their batch axis in front, made one where there is none."""

    def moved(arg: Any, dim: int | None) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        return arg.expand(size, *arg.shape) if dim is None else arg.movedim(dim, 0)

    return [moved(arg, dim) for arg, dim in zip(args, in_dims, strict=True)]


def _one_by_one(op: Callable[..., Any], info: Any, in_dims: _Dims, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Call the operator for each element of the batch."""
    found = [
        op(*(arg if dim is None else arg.select(dim, index) for arg, dim in zip(args, in_dims, strict=True)))
        for index in range(info.batch_size)
    ]
    if isinstance(found[0], torch.Tensor):
        return torch.stack(found), 0
    given = [each[0] is not None for each in zip(*found, strict=True)]
    stacked = (
        torch.stack(each) if there else None for each, there in zip(zip(*found, strict=True), given, strict=True)
    )
    return tuple(stacked), tuple(0 if there else None for there in given)


def _register(name: str, tensors: int, stats: int | None) -> None:
    """Register the rule of an operator: its first ``tensors`` arguments are rows, output ``stats`` is statistics."""
    op = getattr(ops, name).default

    def rule(info: Any, in_dims: _Dims, *args: Any) -> tuple[Any, Any]:
        if any(dim is not None for dim in in_dims[tensors:]):
            return _one_by_one(op, info, in_dims, args)
        found = op(*_first(args[:tensors], in_dims[:tensors], info.batch_size), *args[tensors:])
        if isinstance(found, torch.Tensor):
            return found, 0
        return found, tuple(1 if index == stats else 0 for index in range(len(found)))

    torch.library.register_vmap(f"normwise::{name}", rule, lib=LIBRARY)


_register("norm_rows", tensors=1, stats=None)
_register("norm_rows_saving", tensors=1, stats=1)
_register("add_norm_rows", tensors=2, stats=2)


def _norm_rows_backward(info: Any, in_dims: _Dims, *args: Any) -> tuple[Any, Any]:
    op, needs = ops.norm_rows_backward.default, args[-1]
    if needs & 6 or in_dims[4] is not None:  # each element of the batch has gradients of weights of its own
        return _one_by_one(op, info, in_dims, args)
    dy, dsum, x, stats = _first(args[:4], in_dims[:4], info.batch_size)
    return op(dy, dsum, x, stats.movedim(0, 1), *args[4:]), (0 if needs & 1 else None, None, None)


torch.library.register_vmap("normwise::norm_rows_backward", _norm_rows_backward, lib=LIBRARY)
