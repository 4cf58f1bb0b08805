"""What ops take of their operands: the numbers, or only a shape; and their arguments, however they were given."""

from __future__ import annotations

from typing import Any

from normwise.graph import Op

__all__ = ["LIKE_SECOND", "argument", "reads_numbers"]

LIKE_SECOND = frozenset({"view_as", "reshape_as", "expand_as", "type_as"})
"""Ops that take only the shape or dtype of their second operand."""

_SHAPE_ONLY = frozenset({
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_empty", "new_full",
})  # fmt: skip


def reads_numbers(op: Op, value: int) -> bool:
    """Whether an op reads the numbers of an operand, and not only its shape or dtype."""
    return op.short not in _SHAPE_ONLY and (op.short not in LIKE_SECOND or op.inputs[0] == value)


def argument(op: Op, place: int, name: str) -> Any:
    """Return an argument that the program may have given by place or by name, or None."""
    return op.args[place] if len(op.args) > place else op.kwargs.get(name)
