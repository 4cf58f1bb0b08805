"""What an operator of ONNX is given besides tensors, and how large a tensor it may make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from normwise.errors import TargetError
from normwise.targets.program import MOST_ELEMENTS

__all__ = ["Node", "integers", "sized"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The attributes of a node; defaults are those of the operator's definition."""

    kind: str
    opset: int
    attributes: Mapping[str, Any]
    outputs: int

    def only(self, **allowed: Any) -> None:
        """Refuse attributes of other values than the ones that are done here.

        Raises:
            TargetError: names the attribute.
        """
        for name, values in allowed.items():
            found = self.text(name) if isinstance(self.attributes.get(name), bytes) else self.attributes.get(name)
            if found is not None and found not in values:
                raise TargetError(f"not supported: {self.kind} with {name}={found!r}")

    def text(self, name: str, default: str = "") -> str:
        """Return an attribute of text."""
        found = self.attributes.get(name)
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else found or default

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute as it is written."""
        found = self.attributes.get(name)
        return default if found is None else found


def integers(value: Any) -> list[int]:
    """Return the integers of an attribute or of a tensor that holds sizes or axes."""
    if isinstance(value, torch.Tensor):
        return [int(item) for item in value.reshape(-1).tolist()]
    return [int(value)] if isinstance(value, int | float) else [int(item) for item in value]


def sized(sizes: Sequence[int]) -> list[int]:
    """Return sizes that a value may have.

    Raises:
        TargetError: more elements than one value may have here; a file of a few bytes can ask for any number.
    """
    count = 1
    for size in sizes:
        count *= max(int(size), 0)
    if count > MOST_ELEMENTS:
        raise TargetError(f"a value of {count:,} elements is asked for, {MOST_ELEMENTS:,} are allowed here")
    return [int(size) for size in sizes]
