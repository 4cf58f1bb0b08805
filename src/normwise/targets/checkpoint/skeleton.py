"""The norms of a checkpoint as a module: what facts and rules read tensors from. It computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from normwise.targets.checkpoint.stored import StoredNorm

__all__ = ["skeleton"]

_PARAMETERS = ("weight", "bias")


class StoredTensors(nn.Module):
    """A holder of tensors without a forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run."""
        del args, kwargs
        raise RuntimeError("a checkpoint holds tensors, not the model that uses them")


def skeleton(norms: Sequence[StoredNorm]) -> nn.Module:
    """Return a module that holds each norm at its path, with the tensors under torch's names.

    The paths are those of a stranger ("forward", 500 dots): they are kept as they are, in one level, and never become
    attributes.
    """
    root = StoredTensors()
    for norm in norms:
        holder = StoredTensors() if norm.path else root
        for said, tensor in norm.tensors.items():
            if said in _PARAMETERS:
                holder._parameters[said] = nn.Parameter(tensor, requires_grad=False)
            else:
                holder._buffers[said] = tensor
        if norm.path:
            root._modules[norm.path] = holder
    return root.eval()
